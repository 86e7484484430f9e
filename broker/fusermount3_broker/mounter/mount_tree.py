"""The mount tree of this process's mount namespace: inspect, attach and detach mounts.

umount2(2) takes the topmost mount at a place, and move_mount(2) attaches a mount on top of that, whatever has changed
since the last look. So a child that changes the tree locks the mounts concerned, looks again under the lock, and once
more afterwards. For the mounter's children, whose working directory is the mounter's /proc.
"""

import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

from fusermount3_broker.kernel import features, syscalls
from fusermount3_broker.mounter.child_processes import Rescue, User, in_child

#: Flags to open an entry for inspection: this asks nothing of the filesystem mounted there.
LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
#: Seconds in which a busy mount may become idle before the caller gets EBUSY; at most half of those of the operation.
BUSY_MOMENT = 1.0


class Looked(NamedTuple):
    """Result of `look`: the kernel's device number, and the mount ID (see `syscalls.is_unique_mount_id`)."""

    device: int
    mount_id: int

    @property
    def lasting_id(self) -> int:
        """The mount ID if the kernel never reuses it, else 0."""
        return self.mount_id if syscalls.is_unique_mount_id(self.mount_id) else 0


#: If the kernel can describe a single mount, there is no need to read the list of all; a caller may have thousands.
_UNIQUE = features.tells_of_one_mount()


def look(descriptor: int) -> Looked:
    """Return the mount that a descriptor is on. Raises OSError."""
    device, mount_id = syscalls.statx_mount(descriptor)
    return Looked(device, syscalls.unique_mount_id(descriptor) if _UNIQUE else mount_id)


def look_up(directory: int, name: bytes) -> Looked:
    """Return the topmost mount on an entry of a directory, without keeping that mount busy. Raises OSError."""
    entry = os.open(name, LOOK, dir_fd=directory)
    try:
        return look(entry)
    finally:
        os.close(entry)


class Fuse(NamedTuple):
    """The owner of a FUSE filesystem, as in mountinfo (proc_pid_mountinfo(5)), and whether others may access it."""

    uid: int
    gid: int
    allow_other: bool


@contextmanager
def alone(locks: int, mount_ids: Sequence[int], seconds: int) -> Iterator[None]:
    """Exclude the mounter's other children from changing these mounts and the mounts on them.

    A byte of the file `locks` stands for a mount. The block may only block for users of the same mounts. Raises OSError
    (ETIMEDOUT) after `seconds`.
    """
    give_up = time.monotonic() + seconds
    pause = 0.0002
    while not all(_lock(locks, each) for each in mount_ids):
        if time.monotonic() > give_up:
            raise OSError(errno.ETIMEDOUT, "another operation on the same mount hangs")
        time.sleep(pause)
        pause = min(2 * pause, 0.002)
    try:
        yield
    finally:
        for each in mount_ids:
            fcntl.lockf(locks, fcntl.LOCK_UN, 1, each)


def _lock(locks: int, mount_id: int) -> bool:
    try:
        fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, mount_id)
    except BlockingIOError:
        return False
    return True


def attach(mount: int, mountpoint: int, locks: int, seconds: int) -> None:
    """Attach the mount to the mountpoint, and not to another mount that has covered it in the meantime.

    Raises OSError; then nothing is attached.
    """
    below = look(mountpoint).mount_id
    mount_id = look(mount).mount_id
    flags = syscalls.MOVE_MOUNT_F_EMPTY_PATH | syscalls.MOVE_MOUNT_T_EMPTY_PATH
    with alone(locks, [below], seconds):
        if _parent_of(below) is None:
            raise OSError(errno.EINVAL, "the mountpoint is not in the caller's mount namespace")
        syscalls.move_mount(mount, b"", mountpoint, b"", flags)
        if _parent_of(mount_id) == below:
            return
        with suppress(OSError):
            syscalls.umount2(b"self/fd/%d" % mount, syscalls.MNT_DETACH)
    raise OSError(errno.EBUSY, "the mountpoint is covered")


def detach(mount: int, mountpoint: int, locks: int, seconds: int) -> None:
    """Detach an attached mount as soon as no other mount covers it.

    Raises OSError (EBUSY) when that takes longer than half of `seconds`.
    """
    below = look(mountpoint).mount_id
    mount_id = look(mount).mount_id
    give_up = time.monotonic() + seconds / 2
    while time.monotonic() < give_up:
        with alone(locks, [below, mount_id], seconds):
            if _parent_of(mount_id) is None:
                return  # it has already been unmounted
            if not _is_covered(mount_id):
                syscalls.umount2(b"self/fd/%d" % mount, syscalls.MNT_DETACH)
                return
        time.sleep(0.05)
    raise OSError(errno.EBUSY, "another mount lies on it")


def unmount(directory: int, name: bytes, looked: Looked, lazy: bool, locks: int, seconds: int) -> None:
    """Unmount the mount `looked` from that entry. Raises OSError.

    Only a lazy unmount can go by descriptor; in any other, the descriptor itself would keep the mount busy. That leaves
    a name to be looked up again: a user who may rename the directory's entries in a mount namespace where they are no
    mountpoints could exchange it in the moment after the check.

    Another of the mounter's children may be testing at that moment whether the filesystem is dead (`unmount_dead`),
    because libfuse closes its descriptor before it unmounts. So this retries a busy mount for a moment, without holding
    the locks: a user who keeps a mount busy on purpose delays no other.
    """
    give_up = time.monotonic() + min(BUSY_MOMENT, seconds / 2)
    while True:
        try:
            return _unmount_once(directory, name, looked, lazy, locks, seconds)
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > give_up:
                raise
        time.sleep(0.01)


def _unmount_once(directory: int, name: bytes, looked: Looked, lazy: bool, locks: int, seconds: int) -> None:
    """As `unmount`, but raise EBUSY at once.

    A filesystem ends when its last mount is closed, which may block for ever. So the last reference is closed only
    after the lock has been released; unless the unmount is lazy, this reference is a copy of the mount.
    """
    with ExitStack() as held, alone(locks, [look(directory).mount_id, looked.mount_id], seconds):
        looking = held.enter_context(ExitStack())
        entry = os.open(name, LOOK, dir_fd=directory)
        looking.callback(os.close, entry)
        if look(entry) != looked:
            raise OSError(errno.EBUSY, "another mount has come, or lies on it")
        if lazy:
            syscalls.umount2(b"self/fd/%d" % entry, syscalls.MNT_DETACH)
            return
        copy = _copy_of(entry)
        if copy is not None:
            held.callback(os.close, copy)
        looking.close()  # or this descriptor would keep the mount busy
        here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        os.fchdir(directory)
        try:
            syscalls.umount2(name, syscalls.UMOUNT_NOFOLLOW)
        finally:
            os.fchdir(here)  # or the working directory would keep the directory busy
            os.close(here)


def _copy_of(entry: int) -> int | None:
    """Return a detached copy of the mount; None if it can't be copied, because it is unbindable. Raises OSError.

    Only root of its mount namespace can make a mount unbindable, and is thus also root over all that wait for its
    locks.
    """
    try:
        flags = syscalls.OPEN_TREE_CLONE | syscalls.OPEN_TREE_CLOEXEC | syscalls.AT_EMPTY_PATH
        return syscalls.open_tree(entry, b"", flags)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


def still_there(lines: bytes) -> bytes:
    """Return the lines of `maintenance.Recognized` for those of `maintenance.StartRecognize`."""
    found = []
    for line in lines.splitlines():
        device, mount_id = map(int, line.split())
        status = _status_of(mount_id, syscalls.STATMOUNT_SB_BASIC) if _UNIQUE else None
        if status and status.device == device:
            found.append(b"%d\n" % device)
    return b"".join(found)


def unmount_dead(place: bytes, looked: Looked, locks: int, seconds: int) -> bool:
    """Unmount the dead filesystem `looked` if it is topmost at `place`; return whether it was. Raises OSError.

    No descriptor is open while this waits for the locks: their holder may be about to unmount the same filesystem.
    """
    parent = _parent_of(looked.mount_id)
    if parent is None:
        return False
    with ExitStack() as held, alone(locks, [parent, looked.mount_id], seconds):
        entry = held.enter_context(opened(place))  # closed after the lock is released; see `_unmount_once`
        if look(entry) != looked or _is_covered(looked.mount_id):
            return False
        syscalls.umount2(b"self/fd/%d" % entry, syscalls.MNT_DETACH)
        return True


@contextmanager
def opened(place: bytes) -> Iterator[int]:
    """Provide an O_PATH descriptor of the topmost mount at a path of mountinfo. Raises OSError.

    No symlink is followed. This doesn't use openat2(2), because systemd forbids it with RestrictSUIDSGID=.
    """
    entry = os.open(b"/", LOOK)
    try:
        for name in filter(None, place.split(b"/")):
            directory, entry = entry, os.open(name, LOOK, dir_fd=entry)
            os.close(directory)
        yield entry
    finally:
        os.close(entry)


def is_dead(entry: int, fuse: Fuse) -> bool:
    """Ask the FUSE filesystem of `entry` whether no FUSE program serves it. Raises TimeoutError if it hangs."""
    try:
        usage(entry, fuse)
    except TimeoutError:
        raise
    except OSError as error:
        return error.errno == errno.ENOTCONN
    return False


class Usage(NamedTuple):
    """Usage of a filesystem, as in statvfs(3): blocks of `block_size` bytes, and inodes."""

    block_size: int
    blocks: int
    free_blocks: int
    available_blocks: int
    inodes: int
    free_inodes: int
    longest_name: int


_USAGE = struct.Struct("=7Q")


def usage(entry: int, fuse: Fuse, rescue: Rescue | None = None) -> Usage | None:
    """Return the usage of the FUSE filesystem of `entry`; None if it reports nothing to this user namespace.

    Without allow_other, a FUSE filesystem answers only its user; so a forked child asks with that user's identity. For
    others, the kernel returns zeros without asking the program (fs/fuse/inode.c, fuse_statfs). Raises OSError, with
    ENOTCONN if no FUSE program serves it; TimeoutError if it hangs, as `in_child` does with `rescue`.
    """
    try:
        return _usage(entry, fuse, rescue)
    except OSError as error:
        if error.errno not in _ENDED_MEANWHILE:
            raise
    return _usage(entry, fuse, rescue)


#: What a request gets that waits when its connection ends; EIO while the program was just reading it (fs/fuse/dev.c,
#: fuse_abort_conn and fuse_dev_do_read). Every later request gets ENOTCONN.
_ENDED_MEANWHILE = (errno.ECONNABORTED, errno.EIO)


def _usage(entry: int, fuse: Fuse, rescue: Rescue | None) -> Usage | None:
    reader, writer = os.pipe()

    def ask() -> None:
        said = statvfs(entry)
        numbers = said.f_frsize, said.f_blocks, said.f_bfree, said.f_bavail, said.f_files, said.f_ffree, said.f_namemax
        os.write(writer, _USAGE.pack(*numbers))

    try:
        capabilities = [syscalls.CAP_SETUID, syscalls.CAP_SETGID]
        in_child(ask, [entry, writer], capabilities, user=User(fuse.uid, fuse.gid), rescue=rescue)
        found = Usage(*_USAGE.unpack(os.read(reader, _USAGE.size)))
    finally:
        os.close(reader)
        os.close(writer)
    return found if any(found) else None


def statvfs(entry: int) -> os.statvfs_result:
    """Return what the FUSE filesystem of `entry` reports. Raises OSError, with ENOTCONN if its connection has ended.

    If that was before the FUSE program had answered FUSE_INIT, Linux 7.2 says ECONNREFUSED instead. A connection that
    says so will never serve a request (fs/fuse/dev.c, fuse_get_req).
    """
    try:
        return os.statvfs(entry)
    except ConnectionRefusedError as error:
        raise OSError(errno.ENOTCONN, "it was never initialized") from error


def hidden_by(mountpoint: int) -> set[bytes]:
    """Return the types of the filesystems that a mount on `mountpoint` would hide, if that is the root of a mount, such
    as / or /dev; an empty set for other directories. Raises OSError."""
    if not syscalls.is_mount_root(mountpoint):
        return set()
    below = look(mountpoint).mount_id
    if syscalls.is_unique_mount_id(below):
        found = (_status_of(each, syscalls.STATMOUNT_FS_TYPE) for each in _mounts_on(below))
        return {each.type for each in found if each}
    types: dict[bytes, bytes] = {}
    children: dict[bytes, list[bytes]] = {}
    for line in _mountinfo().split(b"\n")[1:-1]:
        mount_id, parent, _ = line.split(b" ", 2)
        types[mount_id] = line.partition(b" - ")[2].partition(b" ")[0].partition(b".")[0]
        children.setdefault(parent, []).append(mount_id)
    hidden = list(children.get(b"%d" % below, ()))
    for each in hidden:  # the list grows during the loop
        hidden += children.get(each, ())
    return {types[each] for each in hidden}


def fuse_of(mount_id: int) -> Fuse | None:
    """Return the owner of a mounted FUSE filesystem; None for a mount of another type.

    Raises LookupError if the mount is not in this mount namespace.
    """
    filesystem, options = _type_and_options(mount_id)
    if filesystem.partition(b".")[0] != b"fuse":
        return None
    given = options.split(b",")
    values = dict(option.split(b"=", 1) for option in given if b"=" in option)
    return Fuse(int(values[b"user_id"]), int(values[b"group_id"]), b"allow_other" in given)


def fuse_if_any(mount_id: int) -> Fuse | None:
    """As `fuse_of`, but None also if the mount is not in this mount namespace: it may just have been unmounted."""
    with suppress(LookupError):
        return fuse_of(mount_id)
    return None


def _type_and_options(mount_id: int) -> tuple[bytes, bytes]:
    if syscalls.is_unique_mount_id(mount_id):
        status = _status_of(mount_id, syscalls.STATMOUNT_FS_TYPE | syscalls.STATMOUNT_MNT_OPTS)
        if status is None:
            raise LookupError(f"mount {mount_id} is not in this mount namespace")
        return status.type, status.options
    line = _line_of(mount_id)
    if not line:
        raise LookupError(f"mount {mount_id} is not in this mount namespace")
    filesystem, _, options = line.partition(b" - ")[2].split(b" ", 2)
    return filesystem, options


def _status_of(mount_id: int, mask: int) -> syscalls.MountStatus | None:
    """Return the kernel's description of a mount by its unique ID; None if it is not in this mount namespace."""
    try:
        return syscalls.statmount(mount_id, mask)
    except FileNotFoundError:
        return None


def _mountinfo(process: str = "self") -> bytes:
    """Return /proc/PID/mountinfo (proc_pid_mountinfo(5)), with a newline before each line and after the last.

    Callers choose the names in it freely. The kernel escapes newlines in them, but not carriage returns.
    """
    descriptor = os.open(f"{process}/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
    with open(descriptor, "rb", buffering=0) as file:
        return b"\n" + file.readall()


class Mount(NamedTuple):
    """A line of mountinfo; the IDs are not the unique ones."""

    mount_id: int
    parent_id: int
    device: int
    root: bytes
    place: bytes
    flags: bytes
    type: bytes
    source: bytes


def table(process: int | None = None) -> list[Mount]:
    """Return the mounts in the mount namespace of this process or of another one, as listed in mountinfo.

    For another process, only the mounts below its root. Raises OSError if it has ended.
    """
    return [_mount(line) for line in _mountinfo("self" if process is None else f"{process}").split(b"\n")[1:-1]]


def chain(mount_id: int) -> Iterator[Mount]:
    """Yield a mount of this mount namespace, its parent mount, and so on. The ID is not the unique one.

    The other mounts, of which there may be thousands, are not parsed.
    """
    text = _mountinfo()
    while rest := text.partition(b"\n%d " % mount_id)[2]:
        mount = _mount(b"%d %b" % (mount_id, rest.partition(b"\n")[0]))
        yield mount
        mount_id = mount.parent_id


def _mount(line: bytes) -> Mount:
    before, _, after = line.partition(b" - ")
    mount_id, parent, device, root, place, flags = before.split(b" ")[:6]
    major, _, minor = device.partition(b":")
    kind, source, _ = after.split(b" ", 2)
    number = int(major) << 20 | int(minor)
    return Mount(int(mount_id), int(parent), number, _unescaped(root), _unescaped(place), flags, kind, source)


def is_filesystem(mount: Mount, device: int, type: bytes, source: bytes) -> bool:
    """Return whether this is a mount of the filesystem with that device number, type and source, both unescaped."""
    return mount.device == device and (_unescaped(mount.type), _unescaped(mount.source)) == (type, source)


def _line_of(mount_id: int) -> bytes:
    """Return the line of a mount in mountinfo, after its ID; empty if it is not in this mount namespace."""
    return _mountinfo().partition(b"\n%d " % mount_id)[2].partition(b"\n")[0]


def _parent_of(mount_id: int) -> int | None:
    """Return the ID of the parent mount; None if the mount is not in this mount namespace."""
    if syscalls.is_unique_mount_id(mount_id):
        status = _status_of(mount_id, syscalls.STATMOUNT_MNT_BASIC)
        return status.parent_id if status else None
    line = _line_of(mount_id)
    return int(line.partition(b" ")[0]) if line else None


def _is_covered(mount_id: int) -> bool:
    """Return whether another mount covers the root of this one; a mount on a directory in it doesn't count."""
    if syscalls.is_unique_mount_id(mount_id):
        mask = syscalls.STATMOUNT_MNT_BASIC | syscalls.STATMOUNT_MNT_POINT
        here = _status_of(mount_id, mask)
        others = (_status_of(each, mask) for each in _mounts_on(mount_id)) if here and here.point else ()
        return any(each and here and (each.parent_id, each.point) == (mount_id, here.point) for each in others)
    places = {}
    covering = []
    for line in _mountinfo().split(b"\n")[1:-1]:
        each, parent, _, _, place, _ = line.split(b" ", 5)
        places[each] = place
        if parent == b"%d" % mount_id:
            covering.append(place)
    return places.get(b"%d" % mount_id) in covering


def _mounts_on(mount_id: int) -> Iterator[int]:
    """Yield the unique IDs of the mounts on and below a mount; none if it is not in this mount namespace."""
    last = 0
    try:
        while found := syscalls.listmount(mount_id, last):
            yield from found
            last = found[-1]
    except FileNotFoundError:
        return


def _unescaped(place: bytes) -> bytes:
    """Unescape a path of mountinfo, in which the kernel writes blanks and backslashes as octal numbers."""
    first, *rest = place.split(b"\\")
    return first + b"".join(bytes([int(each[:3], 8)]) + each[3:] for each in rest)


def rehearse(locks: int) -> None:
    """Run the code that attaches a mount, without attaching one."""
    _parent_of(look(locks).mount_id)
    with alone(locks, [0], 1):
        pass
