"""What the mounter opens before it serves, for children whose root is no longer the broker's."""

import os
import socket

from broker import syscalls

_FUSE_DEVICE = os.makedev(10, 229)


class Descriptors:
    """What the mounter opens before it serves, for children whose root is no longer the broker's."""

    def __init__(self, orphans: socket.socket, kubelet: int | None) -> None:
        #: Not the one that is mounted at /proc, which may hide processes.
        self.proc = detached(b"proc")
        self.fusectl = detached(b"fusectl")
        self.devices = _private_devices()
        #: Where to say what the next front has to know.
        self.orphans = orphans
        #: Who is never a caller, whoever says so.
        self.supervisor = os.getppid()
        #: Kubelet's directory, if there are volumes.
        self.kubelet = kubelet
        #: Nothing is in this file; see `mounts.alone`.
        self.locks = os.memfd_create("locks")


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
    refused (a broker that is itself in a container), the host's own node has to do. It is read-only, which forbids
    nobody to use the device: but a container's root who has a descriptor of it could change its mode for all others.
    """
    directory = detached(b"tmpfs")
    try:
        os.mkdir("dev", 0o755, dir_fd=directory)
        os.mknod("dev/fuse", 0o020666, _FUSE_DEVICE, dir_fd=directory)
        os.chmod("dev/fuse", 0o666, dir_fd=directory)
    except PermissionError:
        os.close(directory)
        flags = syscalls.OPEN_TREE_CLONE | syscalls.OPEN_TREE_CLOEXEC | syscalls.AT_RECURSIVE
        directory = syscalls.open_tree(syscalls.AT_FDCWD, b"/", flags)
        syscalls.mount_setattr(directory, b"", _ALL_OF_IT, syscalls.MOUNT_ATTR_RDONLY)
        return directory
    syscalls.mount_setattr(directory, b"", syscalls.AT_EMPTY_PATH, syscalls.MOUNT_ATTR_RDONLY)
    return directory


_ALL_OF_IT = syscalls.AT_EMPTY_PATH | syscalls.AT_RECURSIVE
