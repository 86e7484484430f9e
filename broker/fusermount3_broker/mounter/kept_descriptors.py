"""Descriptors that the mounter opens before it serves, for children whose root is no longer the broker's."""

import os
from contextlib import suppress

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.mounter import programs
from fusermount3_broker.mounter.locked_flags import Cell

_FUSE_DEVICE = os.makedev(10, 229)


class Descriptors:
    """Descriptors that the mounter opens before it serves, for children whose root is no longer the broker's."""

    def __init__(self, kubelet: int | None) -> None:
        #: A mount of its own: the one at /proc may hide processes.
        self.proc = detached(b"proc")
        self.fusectl = detached(b"fusectl")
        self.devices = _private_devices()
        self.programs = programs.load(detached(b"tmpfs"))
        #: The supervisor's pid, never accepted as a caller's.
        self.supervisor = os.getppid()
        #: Kubelet's directory, if there are volumes.
        self.kubelet = kubelet
        #: What the kernel says of disks, if there are volumes.
        self.sysfs = detached(b"sysfs") if kubelet is not None else None
        #: An empty file; see `mount_tree.alone`.
        self.locks = os.memfd_create("locks")
        #: The cell in which to lock the flags of a mount. Each child has its own.
        self.cell = Cell(self.proc, -1)


def detached(filesystem: bytes) -> int:
    """Return a new mount of `filesystem` that is attached nowhere."""
    context = syscalls.fsopen(filesystem, syscalls.FSOPEN_CLOEXEC)
    try:
        syscalls.fsconfig(context, syscalls.FSCONFIG_CMD_CREATE, None, None, 0)
        return syscalls.fsmount(context, syscalls.FSMOUNT_CLOEXEC, syscalls.MOUNT_ATTR_NOSUID)
    finally:
        os.close(context)


def _private_devices() -> int:
    """Return a directory that holds ``dev/fuse``, a node that root of any user namespace may open.

    /dev/fuse itself may be 0600; and its name matters, because callers look at /proc/self/fd. Where mknod(2) is
    refused (the broker itself runs in a container), the host's own node has to do. The mount is read-only. Every caller
    can still use the device, but a container's root with a descriptor of it can't change its mode for all others.
    """
    directory = detached(b"tmpfs")
    try:
        os.mkdir("dev", 0o755, dir_fd=directory)
        os.mknod("dev/fuse", 0o020666, _FUSE_DEVICE, dir_fd=directory)
        os.chmod("dev/fuse", 0o666, dir_fd=directory)
        _label_as_the_hosts(f"/proc/self/fd/{directory}/dev/fuse")
    except PermissionError:
        os.close(directory)
        flags = syscalls.OPEN_TREE_CLONE | syscalls.OPEN_TREE_CLOEXEC | syscalls.AT_RECURSIVE
        directory = syscalls.open_tree(syscalls.AT_FDCWD, b"/", flags)
        syscalls.mount_setattr(directory, b"", _ALL_OF_IT, syscalls.MOUNT_ATTR_RDONLY)
        return directory
    syscalls.mount_setattr(directory, b"", syscalls.AT_EMPTY_PATH, syscalls.MOUNT_ATTR_RDONLY)
    return directory


def _label_as_the_hosts(node: str) -> None:
    """Give the node the SELinux label of /dev/fuse, so that the policy lets containers use its descriptors as it lets
    them use the host's."""
    with suppress(OSError):  # the host is without SELinux
        os.setxattr(node, syscalls.XATTR_NAME_SELINUX, os.getxattr("/dev/fuse", syscalls.XATTR_NAME_SELINUX))


_ALL_OF_IT = syscalls.AT_EMPTY_PATH | syscalls.AT_RECURSIVE
