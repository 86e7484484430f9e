"""Entering the namespaces of another process, by its pidfd. Used by the mounter's children."""

import errno
import fcntl
import os
import socket
import struct
from typing import NamedTuple

from broker import confinement, syscalls


def pidfd_of_peer(connection: int, given: int, proc: int) -> int:
    """Return a pidfd of the process that connected, by the kernel's word: whose namespaces they are, nobody may choose.

    Before Linux 6.5 the kernel doesn't give one; then `given` is it, if it has the number of that process. Raises
    OSError.
    """
    with socket.socket(fileno=os.dup(connection)) as peer:
        try:
            return int(struct.unpack("i", peer.getsockopt(socket.SOL_SOCKET, syscalls.SO_PEERPIDFD, 4))[0])
        except OSError as error:
            if error.errno != errno.ENOPROTOOPT:
                raise
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    pid = struct.unpack("iII", credentials)[0]
    if pid <= 0 or _pid_of(given, proc) != pid:
        raise PermissionError(errno.EPERM, "the pidfd is not that of the caller")
    return given


def _pid_of(pidfd: int, proc: int) -> int:
    """Return the pid that a pidfd stands for (proc_pid_fdinfo(5)); -1 if its process has ended, or it is no pidfd."""
    with open(f"self/fdinfo/{pidfd}", "rb", opener=lambda path, flags: os.open(path, flags, dir_fd=proc)) as file:
        lines = file.read().split(b"\n")
    return next((int(line[5:]) for line in lines if line.startswith(b"Pid:\t")), -1)


def join_user_namespace(pidfd: int) -> bool:
    """Join the process's user namespace; whether it is another than this one. Raises OSError."""
    try:
        syscalls.setns(pidfd, syscalls.CLONE_NEWUSER)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def join_mount_namespace(pidfd: int, proc: int) -> int:
    """Join the process's mount namespace, with `proc`, the mounter's own /proc, as working directory; return its inode.

    The process may have gone to other namespaces since its user namespace was joined. A filesystem with the uids of
    one would be in the hands of the root of the other then, who could make it hold devices. So the one must belong to
    the other. Raises OSError.
    """
    syscalls.setns(pidfd, syscalls.CLONE_NEWNS)
    os.fchdir(proc)
    check_owner_of_mount_namespace()
    return os.stat("self/ns/mnt").st_ino


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
    """Where to create a superblock, so that its program sees pids, if they are `visible` to it at all.

    `here`: in this process; otherwise in a child of it, which is in the namespace from birth if there is no
    `descriptor`, and else has to be the child of one that has joined it by that.
    """

    visible: bool
    here: bool
    descriptor: int | None = None


def pid_namespace(pidfd: int, proc: int, in_user_namespace: bool, traced: bool) -> PidNamespace:
    """Return the process's pid namespace, which a child can join if it is below this one (so not without hostPID).

    Whoever has CAP_SYS_PTRACE over the mounter's user namespace can get hold of what is in its pid namespace. That the
    caller hasn't (`traced`) says nothing of its neighbours there. With a user namespace of their own they can't have
    it; else what goes there is confined before. Raises OSError.
    """
    try:
        syscalls.setns(pidfd, syscalls.CLONE_NEWPID)
    except OSError:
        return PidNamespace(visible=False, here=True)
    if os.stat("self/ns/pid_for_children", dir_fd=proc).st_ino == os.stat("self/ns/pid", dir_fd=proc).st_ino:
        return PidNamespace(visible=True, here=True)
    if in_user_namespace:
        return PidNamespace(visible=True, here=False)
    theirs = os.open("self/ns/pid_for_children", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    back = os.open("self/ns/pid", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    syscalls.setns(back, syscalls.CLONE_NEWPID)
    os.close(back)
    if traced or not confinement.POSSIBLE:
        os.close(theirs)
        return PidNamespace(visible=False, here=True)
    return PidNamespace(visible=True, here=False, descriptor=theirs)


def capabilities_of(pid: int, proc: int) -> tuple[int, int]:
    """Return the bounding and the effective set of a process, as bits; none for one that is not to be seen."""
    try:
        status = os.open(f"{pid}/status", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    except OSError:
        return 0, 0
    with open(status, "rb", buffering=0) as file:
        lines = file.readall().split(b"\n")  # no other byte: the process has chosen its name
    sets = dict(line.split(b":\t", 1) for line in lines if line.startswith(b"Cap"))
    return int(sets[b"CapBnd"], 16), int(sets[b"CapEff"], 16)
