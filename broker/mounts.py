"""What is mounted in the mount namespace of this process: looking at it, attaching, taking away.

umount2(2) takes the topmost mount at a place, and move_mount(2) puts one on top of what is there, whatever that has
become since somebody looked. So who changes something holds a lock on the mounts concerned, looks again under it, and
looks once more afterwards. For the mounter's children, whose working directory is the mounter's /proc.
"""

import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

from broker import syscalls
from broker.children import Rescue, User, in_child

#: To look at an entry: asks nothing of what is mounted there.
LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
#: Seconds in which a mount that is busy may come to rest before its owner is told that it is busy.
BUSY_MOMENT = 0.3


class Looked(NamedTuple):
    """What `look` found: the kernel's number of the device, and the mount id (see `is_unique`)."""

    device: int
    mount_id: int

    @property
    def lasting_id(self) -> int:
        """The mount id if no other mount will ever have it, else 0."""
        return self.mount_id if is_unique(self.mount_id) else 0


def is_unique(mount_id: int) -> bool:
    """Whether this is an id that no other mount will ever have, and for which statmount(2) can be asked.

    The other ids, those in mountinfo, are small numbers and used again (fs/namespace.c, MNT_UNIQUE_ID_OFFSET).
    """
    return mount_id >= 1 << 31


def _kernel_tells_of_one_mount() -> bool:
    """Whether statmount(2) and what goes with it are there, and this service may use them: Linux 6.12."""
    try:
        root = os.open("/", os.O_PATH | os.O_CLOEXEC)
        try:
            mount_id = syscalls.unique_mount_id(root)
        finally:
            os.close(root)
        syscalls.statmount(mount_id, syscalls.STATMOUNT_MNT_BASIC)
        syscalls.listmount(mount_id)
    except OSError:
        return False
    return is_unique(mount_id)


#: Where the kernel tells of one mount, nobody has to read the list of all; a caller may have thousands.
_UNIQUE = _kernel_tells_of_one_mount()


def look(descriptor: int) -> Looked:
    """Return on which mount a descriptor is. Raises OSError."""
    device, mount_id = syscalls.statx_mount(descriptor)
    return Looked(device, syscalls.unique_mount_id(descriptor) if _UNIQUE else mount_id)


def look_up(directory: int, name: bytes) -> Looked:
    """Return what is on an entry of a directory; it is not busy by that. Raises OSError."""
    entry = os.open(name, LOOK, dir_fd=directory)
    try:
        return look(entry)
    finally:
        os.close(entry)


class Fuse(NamedTuple):
    """Whose a FUSE filesystem is, as mountinfo says (proc_pid_mountinfo(5)), and whether others may enter it."""

    uid: int
    gid: int
    allow_other: bool


@contextmanager
def alone(locks: int, mount_ids: Sequence[int], seconds: int) -> Iterator[None]:
    """Be the only one of the mounter's who changes what is mounted on these mounts.

    A byte of the file `locks` stands for a mount. What is done meanwhile may block only for those who use the same
    mounts. Raises OSError (ETIMEDOUT) after so many seconds.
    """
    give_up = time.monotonic() + seconds
    while not all(_lock(locks, each) for each in mount_ids):
        if time.monotonic() > give_up:
            raise OSError(errno.ETIMEDOUT, "another operation on the same mount hangs")
        time.sleep(0.002)
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
    """Attach the mount to the mountpoint, and to nothing else that has come to lie there since it was looked at.

    Raises OSError, and nothing is attached then.
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
    """Take a mount away that was attached, as soon as nobody's mount lies on it.

    Raises OSError (EBUSY) when that takes longer than half of `seconds`.
    """
    below = look(mountpoint).mount_id
    mount_id = look(mount).mount_id
    give_up = time.monotonic() + seconds / 2
    while time.monotonic() < give_up:
        with alone(locks, [below, mount_id], seconds):
            if _parent_of(mount_id) is None:
                return  # somebody else has unmounted it
            if not _is_covered(mount_id):
                syscalls.umount2(b"self/fd/%d" % mount, syscalls.MNT_DETACH)
                return
        time.sleep(0.05)
    raise OSError(errno.EBUSY, "another mount lies on it")


def unmount(directory: int, name: bytes, looked: Looked, lazy: bool, locks: int, seconds: int) -> None:
    """Unmount what was looked at on that entry. Raises OSError.

    Only a lazy unmount can be asked of a descriptor; for any other the descriptor would be what keeps it busy. So
    there a name is left to be looked up again, which somebody who may rename entries of the directory in a mount
    namespace where they are no mountpoints could exchange in the moment after it was checked.

    Another of the mounter's children may be looking just then whether the filesystem is dead (`unmount_dead`), for
    libfuse closes its descriptor before it unmounts. So what is busy is tried again for a moment, without the locks:
    whoever keeps a mount busy on purpose keeps nobody else waiting.
    """
    give_up = time.monotonic() + BUSY_MOMENT
    while True:
        try:
            return _unmount_once(directory, name, looked, lazy, locks, seconds)
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > give_up:
                raise
        time.sleep(0.01)


def _unmount_once(directory: int, name: bytes, looked: Looked, lazy: bool, locks: int, seconds: int) -> None:
    """As `unmount`; EBUSY at once.

    A filesystem ends when its last mount is closed, which may block for ever. So that is left to be closed (of any
    other unmount than a lazy one, a copy of the mount) when the lock has been given back.
    """
    with ExitStack() as held, alone(locks, [look(directory).mount_id, looked.mount_id], seconds):
        if _is_covered(looked.mount_id):
            raise OSError(errno.EBUSY, "another mount lies on it")
        looking = held.enter_context(ExitStack())
        entry = os.open(name, LOOK, dir_fd=directory)
        looking.callback(os.close, entry)
        if look(entry) != looked:
            raise OSError(errno.EBUSY, "another mount has come")
        if lazy:
            syscalls.umount2(b"self/fd/%d" % entry, syscalls.MNT_DETACH)
            return
        copy = _copy_of(entry)
        if copy is not None:
            held.callback(os.close, copy)
        looking.close()  # or it would be what keeps the mount busy
        here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        os.fchdir(directory)
        try:
            syscalls.umount2(name, syscalls.UMOUNT_NOFOLLOW)
        finally:
            os.fchdir(here)  # or the directory would be busy
            os.close(here)


def _copy_of(entry: int) -> int | None:
    """Return a copy of the mount, attached nowhere; None if it has none, because it is unbindable. Raises OSError.

    Who has made it so is root of its mount namespace, and so of all that wait for its locks.
    """
    try:
        flags = syscalls.OPEN_TREE_CLONE | syscalls.OPEN_TREE_CLOEXEC | syscalls.AT_EMPTY_PATH
        return syscalls.open_tree(entry, b"", flags)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


def still_there(lines: bytes) -> bytes:
    """Return what `plan.Recognized` has, for the lines of `plan.StartRecognize`."""
    found = []
    for line in lines.splitlines():
        device, mount_id = map(int, line.split())
        status = _status_of(mount_id, syscalls.STATMOUNT_SB_BASIC) if _UNIQUE else None
        if status and status.device == device:
            found.append(b"%d\n" % device)
    return b"".join(found)


def unmount_dead(device: int, locks: int, seconds: int) -> int:
    """Unmount the FUSE filesystem of that device wherever it is mounted, if nobody serves it; return how many times.

    Raises OSError.
    """
    wanted = b"%d:%d" % (device >> 20, device & 0xFFFFF)
    reaped = 0
    for line in _mountinfo().split(b"\n")[1:-1]:
        _, _, number, _, place, _ = line.split(b" ", 5)
        if number == wanted:
            reaped += _unmount_if_dead(device, _unescaped(place), locks, seconds)
    return reaped


def _unmount_if_dead(device: int, place: bytes, locks: int, seconds: int) -> bool:
    """Unmount the FUSE filesystem of that device at `place` if nobody serves it; whether that was so. Raises OSError.

    What lies there topmost is looked at: of several mounts of the filesystem, each has its turn. Nothing is open while
    this waits for the locks: whoever has them may be about to unmount the same.
    """
    with opened(place) as entry:
        looked = look(entry)
        fuse = fuse_if_any(looked.mount_id)
        if looked.device != device or fuse is None or not is_dead(entry, fuse):
            return False
    parent = _parent_of(looked.mount_id)
    if parent is None:
        return False
    with ExitStack() as held, alone(locks, [parent, looked.mount_id], seconds):
        entry = held.enter_context(opened(place))  # closed without the lock; see `unmount`
        if look(entry) != looked or _is_covered(looked.mount_id):
            return False
        syscalls.umount2(b"self/fd/%d" % entry, syscalls.MNT_DETACH)
        return True


@contextmanager
def opened(place: bytes) -> Iterator[int]:
    """Give a descriptor of what lies topmost at a path of mountinfo, to look at it. Raises OSError.

    No symlink is followed. It is not openat2(2) that sees to that, because systemd forbids it with RestrictSUIDSGID=.
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
    """Whether nobody serves the FUSE filesystem on which `entry` is. Asks it; raises TimeoutError if it hangs."""
    try:
        usage(entry, fuse)
    except TimeoutError:
        raise
    except OSError as error:
        return error.errno == errno.ENOTCONN
    return False


class Usage(NamedTuple):
    """How full a filesystem is, as statvfs(3) says it: blocks of so many bytes, and inodes."""

    block_size: int
    blocks: int
    free_blocks: int
    available_blocks: int
    inodes: int
    free_inodes: int
    longest_name: int


_USAGE = struct.Struct("=7Q")


def usage(entry: int, fuse: Fuse, rescue: Rescue | None = None) -> Usage | None:
    """Return how full the FUSE filesystem is on which `entry` is; None if it says nothing to this user namespace.

    It answers nobody but its user, if not told otherwise; so the question is put by a child that is this user. Others
    are told noughts, without the program being asked (fs/fuse/inode.c, fuse_statfs). Raises OSError, with ENOTCONN if
    nobody serves it; TimeoutError if it hangs, as `in_child` does with `rescue`.
    """
    reader, writer = os.pipe()

    def ask() -> None:
        said = os.statvfs(entry)
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


def hidden_by(mountpoint: int) -> set[bytes]:
    """Return the types of the filesystems that would be out of sight with a mount on `mountpoint`, if that is the root
    of a mount, such as / or /dev; of other directories nothing is said. Raises OSError."""
    if not syscalls.is_mount_root(mountpoint):
        return set()
    below = look(mountpoint).mount_id
    if is_unique(below):
        found = (_status_of(each, syscalls.STATMOUNT_FS_TYPE) for each in _mounts_on(below))
        return {each.type for each in found if each}
    types: dict[bytes, bytes] = {}
    children: dict[bytes, list[bytes]] = {}
    for line in _mountinfo().split(b"\n")[1:-1]:
        mount_id, parent, _ = line.split(b" ", 2)
        types[mount_id] = line.partition(b" - ")[2].partition(b" ")[0].partition(b".")[0]
        children.setdefault(parent, []).append(mount_id)
    hidden = list(children.get(b"%d" % below, ()))
    for each in hidden:  # which grows meanwhile
        hidden += children.get(each, ())
    return {types[each] for each in hidden}


def fuse_of(mount_id: int) -> Fuse | None:
    """Return whose FUSE filesystem a mount is; None if it is not one.

    Raises LookupError if it is not in this mount namespace.
    """
    filesystem, options = _type_and_options(mount_id)
    if filesystem.partition(b".")[0] != b"fuse":
        return None
    given = options.split(b",")
    values = dict(option.split(b"=", 1) for option in given if b"=" in option)
    return Fuse(int(values[b"user_id"]), int(values[b"group_id"]), b"allow_other" in given)


def fuse_if_any(mount_id: int) -> Fuse | None:
    """As `fuse_of`; None, too, if the mount is not in this mount namespace: it may just have been unmounted."""
    with suppress(LookupError):
        return fuse_of(mount_id)
    return None


def _type_and_options(mount_id: int) -> tuple[bytes, bytes]:
    if is_unique(mount_id):
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
    """Return what the kernel says of a mount by its unique id; None if it is not in this mount namespace."""
    try:
        return syscalls.statmount(mount_id, mask)
    except FileNotFoundError:
        return None


def _mountinfo(process: str = "self") -> bytes:
    """Return /proc/PID/mountinfo (proc_pid_mountinfo(5)), with a newline before each line and after the last.

    Names are what callers like, but for the newlines, which the kernel escapes; carriage returns stand there as such.
    """
    descriptor = os.open(f"{process}/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
    with open(descriptor, "rb", buffering=0) as file:
        return b"\n" + file.readall()


class Mount(NamedTuple):
    """A line of mountinfo; the ids are not the unique ones."""

    mount_id: int
    parent_id: int
    device: int
    root: bytes
    place: bytes
    flags: bytes
    type: bytes
    source: bytes


def table(process: int | None = None) -> list[Mount]:
    """Return all that is mounted in the mount namespace of this process or of another one, as mountinfo has it.

    Of another one's, what is below its root. Raises OSError if it has ended.
    """
    return [_mount(line) for line in _mountinfo("self" if process is None else f"{process}").split(b"\n")[1:-1]]


def chain(mount_id: int) -> Iterator[Mount]:
    """Yield a mount of this mount namespace, the one that it lies on, and so on. The id is not the unique one.

    There may be thousands of others, which are not looked at.
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


def _line_of(mount_id: int) -> bytes:
    """Return what mountinfo says of a mount, after its id; empty if it is not in this mount namespace."""
    return _mountinfo().partition(b"\n%d " % mount_id)[2].partition(b"\n")[0]


def _parent_of(mount_id: int) -> int | None:
    """Return the id of the mount that a mount lies on; None if it is not in this mount namespace."""
    if is_unique(mount_id):
        status = _status_of(mount_id, syscalls.STATMOUNT_MNT_BASIC)
        return status.parent_id if status else None
    line = _line_of(mount_id)
    return int(line.partition(b" ")[0]) if line else None


def _is_covered(mount_id: int) -> bool:
    """Whether another mount lies on this one; one in a directory of it does not."""
    if is_unique(mount_id):
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
    """Yield the unique ids of the mounts on and below a mount; none if it is not in this mount namespace."""
    last = 0
    try:
        while found := syscalls.listmount(mount_id, last):
            yield from found
            last = found[-1]
    except FileNotFoundError:
        return


def _unescaped(place: bytes) -> bytes:
    """Return a path of mountinfo, in which the kernel writes blanks and backslashes as octal numbers."""
    first, *rest = place.split(b"\\")
    return first + b"".join(bytes([int(each[:3], 8)]) + each[3:] for each in rest)


def rehearse(locks: int) -> None:
    """Go through the motions of attaching a mount."""
    _parent_of(look(locks).mount_id)
    with alone(locks, [0], 1):
        pass
