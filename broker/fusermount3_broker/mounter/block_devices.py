"""Block devices that mount pods offer to volumes of other pods with `volumeMode: Block`.

A mount pod sends a descriptor of the device that it has opened. That proves its right to the device: whenever a process
opens a node, the kernel asks the device filter of its cgroup (fs/namei.c, inode_permission), whoever made the node. A
node that a pod has only made, with CAP_MKNOD, or a descriptor opened with O_PATH, proves nothing.

Nobody gets the pod's own node, which the pod could change. The broker makes nodes: first one on a filesystem that is
mounted nowhere, for the front to keep. An extended attribute, which on tmpfs only the mounter can set, says what it is
for. So the front can't pretend that a device was offered. Then one for each volume, mounted on a file at the volume's
target.

When a device is gone, its number may become another disk's. So each node also has the sequence number of the disk, on
kernels that have those (since 5.15).

For the mounter's children that are in the broker's own namespaces.
"""

import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import NamedTuple

from fusermount3_broker.kernel import ownership_marks, syscalls
from fusermount3_broker.messages import mounter
from fusermount3_broker.mounter import invariants, mount_tree, namespaces, pods, volume_targets
from fusermount3_broker.mounter.front_connection import BadRequest, Conversation, HungUp, StepError, receive
from fusermount3_broker.mounter.kept_descriptors import Descriptors
from fusermount3_broker.mounter.volume_targets import Target

#: include/uapi/linux/fs.h
_BLKGETSIZE64 = 0x80081272
_BLKGETDISKSEQ = 0x80081280
#: The attribute of a node: what `Disk.told` returns.
_WHAT = b"trusted.fusermount3-broker.device"
_SECTOR = 512
_NODE = b"device"


class Disk(NamedTuple):
    """A device that the pod of the volume `source` has offered. `sequence`: of the disk, 0 where it is unknown."""

    number: int
    sequence: int
    read_only: bool
    source: bytes

    def told(self) -> bytes:
        """Return the disk as the value of an extended attribute; the node has the number itself."""
        return b"%d %d %b" % (self.sequence, self.read_only, self.source)

    @classmethod
    def of(cls, node: int) -> "Disk | None":
        """Return what the node of a descriptor is for; None if the mounter has not made it. Raises OSError.

        On tmpfs, only the mounter can have set its attribute. A FUSE program answers for those of its filesystem.
        """
        if syscalls.fstatfs_type(node) != syscalls.TMPFS_MAGIC:
            return None
        found = os.fstat(node)
        if not stat.S_ISBLK(found.st_mode):
            return None
        try:
            said = os.getxattr(b"self/fd/%d" % node, _WHAT)
        except OSError as error:
            if error.errno not in (errno.ENODATA, errno.ENOTSUP):
                raise
            return None
        sequence, read_only, source = said.split(b" ", 2)
        return cls(found.st_rdev, int(sequence), read_only == b"1", source)


# Offers ------------------------------------------------------------------------------------------------------------


def offer(opened: Descriptors, talk: Conversation, start: mounter.StartOffer, connection: int, pidfd: int) -> None:
    """Look at the device that a caller has opened and sent, and make a node that says so."""
    volume_targets.begin(opened, start.source)
    with talk.bounded("identify the caller"):
        _check_pod(opened, namespaces.pidfd_of_peer(connection, pidfd, opened.proc), start.source)
    with talk.bounded("open the volume"), Target(opened, start.source) as source:
        source.check_shared()
    with talk.bounded("look at the device"), socket.socket(fileno=os.dup(connection)) as caller:
        _, descriptors = receive(caller)
        if len(descriptors) != 1:
            raise BadRequest(len(descriptors))
        disk, size = _look(descriptors[0], start.source)
    with talk.bounded("make a node"):
        directory = _new_filesystem()
        _make_node(directory, disk)
        node = os.open(_NODE, mount_tree.LOOK, dir_fd=directory)
    talk.say(mounter.Offered(disk.number, size, disk.read_only), node)


def _check_pod(opened: Descriptors, pidfd: int, source: bytes) -> None:
    """Raise PermissionError unless the process is in the pod of the volume `source`."""
    pid = namespaces.pid_of(pidfd, opened.proc)
    pod = pods.pod_of_target(source)
    if not pod or pid <= 0 or not pods.is_in_pod(opened.proc, pid, pod):
        raise PermissionError(errno.EPERM, "the caller is not in the pod")
    if namespaces.pid_of(pidfd, opened.proc) != pid:
        raise ProcessLookupError(errno.ESRCH, "the caller has ended")


def _look(device: int, source: bytes) -> tuple[Disk, int]:
    """Return the disk of which this is an open descriptor, and its size in bytes. Raises OSError."""
    found = os.fstat(device)
    if not stat.S_ISBLK(found.st_mode):
        raise OSError(errno.ENOTBLK, "no block device")
    flags = fcntl.fcntl(device, fcntl.F_GETFL)
    if flags & os.O_PATH or flags & os.O_ACCMODE not in (os.O_RDONLY, os.O_RDWR):
        raise OSError(errno.EBADF, "not opened for reading")
    (size,) = struct.unpack("Q", fcntl.ioctl(device, _BLKGETSIZE64, bytes(8)))
    sequence = 0
    with suppress(OSError):  # ENOTTY before Linux 5.15
        (sequence,) = struct.unpack("Q", fcntl.ioctl(device, _BLKGETDISKSEQ, bytes(8)))
    return Disk(found.st_rdev, sequence, flags & os.O_ACCMODE == os.O_RDONLY, source), min(size, 2**63 - 1)


def _new_filesystem() -> int:
    """Return the root directory of a new filesystem that is mounted nowhere. Raises OSError."""
    context = syscalls.fsopen(b"tmpfs", syscalls.FSOPEN_CLOEXEC)
    try:
        for key, value in ((b"source", volume_targets.SOURCE), (b"mode", b"700"), (b"size", b"4k")):
            syscalls.fsconfig(context, syscalls.FSCONFIG_SET_STRING, key, value, 0)
        syscalls.fsconfig(context, syscalls.FSCONFIG_CMD_CREATE, None, None, 0)
        attributes = syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NOEXEC
        return syscalls.fsmount(context, syscalls.FSMOUNT_CLOEXEC, attributes)
    finally:
        os.close(context)


def _make_node(directory: int, disk: Disk) -> None:
    os.mknod(_NODE, stat.S_IFBLK | 0o600, disk.number, dir_fd=directory)
    os.setxattr(b"self/fd/%d/%b" % (directory, _NODE), _WHAT, disk.told())


# Volumes -----------------------------------------------------------------------------------------------------------


def lend(opened: Descriptors, talk: Conversation, start: mounter.StartLend, node: int) -> None:
    """Have the device of a node that `offer` has made at the target of a volume."""
    volume_targets.begin(opened, start.source, start.target)
    with talk.bounded("look at the device"):
        disk = Disk.of(node)
        if (
            not invariants.allow_device_target(start.target)
            or disk is None
            or disk.source != start.source
            or (disk.read_only and not start.read_only)
        ):
            raise StepError(errno.EPERM, "check the device")
        if _has_gone(opened, disk):
            raise FileNotFoundError(errno.ENOENT, "another disk has its number")
        mount = _mount_of(opened, disk)
    if talk.is_over(0):
        raise HungUp  # the next front may have published or removed the volume since
    with talk.bounded("make the target"), _DeviceTarget(opened, start.target) as target, target.alone(talk.seconds):
        target.put(mount)
    talk.say(mounter.Lent())


def _mount_of(opened: Descriptors, disk: Disk) -> int:
    """Return a new node of the disk, as a detached mount of that file alone. Raises OSError.

    Before Linux 6.15 only what is mounted in the own namespace can be cloned, so this goes to another one for a moment.
    """
    directory = _new_filesystem()
    _make_node(directory, disk)
    home = os.open("self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.mount(None, b"/", None, syscalls.MS_REC | syscalls.MS_PRIVATE, None)
        root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        volume_targets.attach(root, directory)
        return syscalls.open_tree(directory, _NODE, syscalls.OPEN_TREE_CLONE | syscalls.OPEN_TREE_CLOEXEC)
    finally:
        syscalls.setns(home, syscalls.CLONE_NEWNS)
        os.fchdir(opened.proc)


def _has_gone(opened: Descriptors, disk: Disk) -> bool:
    """Return whether there is no such disk any more; False where the kernel numbers no disks."""
    return disk.sequence != 0 and _of_disk(opened, disk, "diskseq") != disk.sequence


def _of_disk(opened: Descriptors, disk: Disk, name: str) -> int:
    """Return a number that sysfs has of whatever disk has that device number; 0 without one."""
    assert opened.sysfs is not None
    path = f"dev/block/{os.major(disk.number)}:{os.minor(disk.number)}/{name}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=opened.sysfs)
    except OSError:
        return 0
    with open(descriptor, "rb", buffering=0) as file:
        return int(file.read(32))


def is_at(opened: Descriptors, path: bytes) -> bool:
    """Return whether a file is at the target of a volume, and not a directory: so it is, or was, that of a device.

    Asks no FUSE program, which may never answer.
    """
    try:
        with _DeviceTarget(opened, path) as target, target.entry() as entry:
            return _is_node(entry) if syscalls.is_mount_root(entry) else stat.S_ISREG(os.fstat(entry).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def state(opened: Descriptors, path: bytes) -> mounter.Stated:
    """Return the state of a volume whose device is, or was, at the target. Raises OSError."""
    with _DeviceTarget(opened, path) as target:
        disk = target.disk()
    nothing = mounter.Stated(disk is not None, False, 0, 0, 0, 0, 0, 0)
    if disk is None:
        return nothing
    if _has_gone(opened, disk):
        return nothing._replace(errno=errno.ENODEV)
    return nothing._replace(served=True, total_bytes=_SECTOR * _of_disk(opened, disk, "size"))


def remove(opened: Descriptors, talk: Conversation, path: bytes) -> None:
    """Remove what `lend` has made at a target."""
    with talk.bounded("remove the target"), _DeviceTarget(opened, path) as target, target.alone(talk.seconds):
        target.remove()


class _DeviceTarget:
    """The target of a block volume: a file made by the broker, on which a node is mounted."""

    def __init__(self, opened: Descriptors, path: bytes) -> None:
        """Open the target's parent directory. Raises OSError, FileNotFoundError if that doesn't exist."""
        self._target = Target(opened, path)

    def __enter__(self) -> "_DeviceTarget":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._target.directory)

    def alone(self, seconds: int) -> AbstractContextManager[None]:
        """Exclude the mounter's other children from changing this target. Raises OSError (ETIMEDOUT)."""
        return self._target.alone(seconds)

    @contextmanager
    def entry(self) -> Iterator[int]:
        """Provide an O_PATH descriptor of what is at the target, on top. Raises OSError."""
        entry = os.open(self._target.name, mount_tree.LOOK, dir_fd=self._target.directory)
        try:
            yield entry
        finally:
            os.close(entry)

    def disk(self) -> Disk | None:
        """Return the disk whose node is at the target, if the broker has mounted one there. Raises OSError."""
        with suppress(FileNotFoundError), self.entry() as entry:
            return Disk.of(entry) if syscalls.is_mount_root(entry) and _is_node(entry) else None
        return None

    def put(self, mount: int) -> None:
        """Make the file, unless it exists, and attach the mount of a node on it, in place of another. Raises OSError.

        FileExistsError: something is there that is not the broker's.
        """
        self._detach()
        with suppress(FileExistsError):
            flags = os.O_CREAT | os.O_EXCL | os.O_RDONLY | os.O_CLOEXEC
            os.close(os.open(self._target.name, flags, 0o600, dir_fd=self._target.directory))
            with self.entry() as entry:
                ownership_marks.mark(entry)
        with self.entry() as entry:
            if not _is_own_file(entry):
                raise FileExistsError(errno.EEXIST, "something else is there")
            volume_targets.attach(entry, mount)

    def remove(self) -> None:
        """Remove node and file, if they are the broker's. Raises OSError."""
        self._detach()
        with suppress(FileNotFoundError), self.entry() as entry:
            if _is_own_file(entry):
                os.unlink(self._target.name, dir_fd=self._target.directory)

    def _detach(self) -> None:
        while self.disk() is not None:
            with self.entry() as entry:
                syscalls.umount2(b"self/fd/%d" % entry, syscalls.MNT_DETACH)


def _is_node(root: int) -> bool:
    """Return whether the mount of which this is the root is one of `_mount_of`."""
    mount = next(mount_tree.chain(syscalls.statx_mount(root)[1]))
    return (mount.type, mount.source, mount.root) == (b"tmpfs", volume_targets.SOURCE, b"/%b" % _NODE)


def _is_own_file(entry: int) -> bool:
    if syscalls.is_mount_root(entry):
        return False
    return stat.S_ISREG(os.fstat(entry).st_mode) and ownership_marks.is_marked(entry)
