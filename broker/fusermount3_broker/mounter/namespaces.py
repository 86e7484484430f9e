"""Join the namespaces of another process by its pidfd. For the mounter's children."""

import errno
import fcntl
import os
import socket
import struct
from typing import NamedTuple

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.messages import mounter


def pidfd_of_peer(connection: int, given: int, proc: int) -> int:
    """Return a pidfd of the process that connected, as the kernel reports it: no one may choose whose namespaces to
    join.

    Before Linux 6.5 the kernel doesn't provide one; then return `given`, if it refers to the pid of that process.
    Raises OSError.
    """
    with socket.socket(fileno=os.dup(connection)) as peer:
        try:
            return int(struct.unpack("i", peer.getsockopt(socket.SOL_SOCKET, syscalls.SO_PEERPIDFD, 4))[0])
        except OSError as error:
            if error.errno != errno.ENOPROTOOPT:
                raise
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    pid = struct.unpack("iII", credentials)[0]
    if pid <= 0 or pid_of(given, proc) != pid:
        raise PermissionError(errno.EPERM, "the pidfd is not that of the caller")
    return given


def pid_of(pidfd: int, proc: int) -> int:
    """Return the pid that a pidfd refers to (proc_pid_fdinfo(5)); -1 if its process has ended, or it is no pidfd."""
    with open(f"self/fdinfo/{pidfd}", "rb", opener=lambda path, flags: os.open(path, flags, dir_fd=proc)) as file:
        lines = file.read().split(b"\n")
    return next((int(line[5:]) for line in lines if line.startswith(b"Pid:\t")), -1)


def join_user_namespace(pidfd: int) -> bool:
    """Join the process's user namespace; return whether it differs from the current one. Raises OSError."""
    try:
        syscalls.setns(pidfd, syscalls.CLONE_NEWUSER)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def join_mount_namespace(pidfd: int, proc: int) -> int:
    """Join the process's mount namespace, with `proc`, the mounter's own /proc, as working directory; return its inode.

    The process may have changed its namespaces since its user namespace was joined. The root of the new user namespace
    would then control a filesystem with the uids of the old one, and could make it hold devices. So the mount namespace
    must belong to the joined user namespace. Raises OSError.
    """
    syscalls.setns(pidfd, syscalls.CLONE_NEWNS)
    os.fchdir(proc)
    check_owner_of_mount_namespace()
    return os.stat("self/ns/mnt").st_ino


def join_mount_namespace_of_owner(mount_namespace: int, proc: int) -> None:
    """Join the user namespace that owns the mount namespace of that descriptor, then the mount namespace itself.

    The user namespaces of the processes in the mount namespace don't matter: a process in a nested user namespace of
    its own has no right to unmount there. Raises OSError.
    """
    owner = fcntl.ioctl(mount_namespace, syscalls.NS_GET_USERNS)
    try:
        if not os.path.samestat(os.fstat(owner), os.stat("self/ns/user", dir_fd=proc)):
            syscalls.setns(owner, syscalls.CLONE_NEWUSER)
    finally:
        os.close(owner)
    syscalls.setns(mount_namespace, syscalls.CLONE_NEWNS)
    os.fchdir(proc)


def check_owner_of_mount_namespace() -> None:
    """Raise PermissionError unless the mount namespace belongs to the user namespace of this process."""
    namespace = os.open("self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    owner = fcntl.ioctl(namespace, syscalls.NS_GET_USERNS)
    belongs = os.path.samestat(os.fstat(owner), os.stat("self/ns/user"))
    os.close(owner)
    os.close(namespace)
    if not belongs:
        raise PermissionError(errno.EPERM, "the mount namespace is another user namespace's")


class PidNamespace(NamedTuple):
    """Where to create a superblock so that its FUSE program sees pids, if it can. `seen`: one of `mounter.PIDS`.

    Without a `descriptor`, that is this process; with one, a child that has joined the pid namespace by it.
    """

    seen: int
    descriptor: int | None = None

    @property
    def hidden(self) -> bool:
        """Whether to create it in a new, empty pid namespace: in that of this process, the FUSE program would see the
        host's pids, and take them for those of its own processes."""
        return self.seen == mounter.PIDS_TRACED


def pid_namespace(pidfd: int, proc: int) -> PidNamespace:
    """Return the process's pid namespace, by a descriptor unless it is that of this process. Raises OSError.

    It can only be joined if it is below that of this process: so not without hostPID.
    """
    back = os.open("self/ns/pid", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        try:
            syscalls.setns(pidfd, syscalls.CLONE_NEWPID)
        except OSError:
            return PidNamespace(mounter.PIDS_FOREIGN)
        theirs = os.open("self/ns/pid_for_children", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
        if os.path.samestat(os.fstat(theirs), os.fstat(back)):
            os.close(theirs)
            return PidNamespace(mounter.PIDS_SEEN)
        syscalls.setns(back, syscalls.CLONE_NEWPID)
        return PidNamespace(mounter.PIDS_SEEN, theirs)
    finally:
        os.close(back)


def usable(pids: PidNamespace, traced: bool) -> PidNamespace:
    """Return `pids`, or the reason why no child of this process enters that pid namespace. To be called when this
    process has joined the caller's user namespace.

    `traced`: the caller may have CAP_SYS_PTRACE, which lets it take over the processes in its pid namespace. That it
    lacks the capability says nothing about its neighbours there; so `superblock_creator` confines what enters.
    """
    if pids.descriptor is None:
        return pids
    if not _may_join(pids.descriptor):
        reason = mounter.PIDS_FOREIGN
    elif traced:
        reason = mounter.PIDS_TRACED
    else:
        return pids
    os.close(pids.descriptor)
    return PidNamespace(reason)


def _may_join(namespace: int) -> bool:
    """Return whether a namespace belongs to the user namespace of this process, or to one below it (ioctl_ns(2))."""
    try:
        os.close(fcntl.ioctl(namespace, syscalls.NS_GET_USERNS))
    except PermissionError:
        return False
    return True


def capabilities_of(pid: int, proc: int) -> tuple[int, int]:
    """Return the bounding and the effective capability set of a process, as bits; no bits for an invisible process."""
    try:
        status = os.open(f"{pid}/status", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    except OSError:
        return 0, 0
    with open(status, "rb", buffering=0) as file:
        lines = file.readall().split(b"\n")  # no other separator: the process chooses its own name
    sets = dict(line.split(b":\t", 1) for line in lines if line.startswith(b"Cap"))
    return int(sets[b"CapBnd"], 16), int(sets[b"CapEff"], 16)
