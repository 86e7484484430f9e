"""The caller's identity, as the kernel reports it for the process that connected. Nothing here comes from a message.

Log records contain the uid and gid in the front's user namespace, as SO_PEERCRED reports them here; decisions use the
ones that the mounter reads after it has joined the caller's user namespace (`mounter.MountFacts`).
"""

import os
import select
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from errno import EACCES
from functools import lru_cache

from fusermount3_broker.front.decisions import limits
from fusermount3_broker.front.decisions.limits import AccountName
from fusermount3_broker.front.decisions.subordinate_ids import Subordinates
from fusermount3_broker.kernel import syscalls
from fusermount3_broker.messages.refusal import Refusal
from fusermount3_broker.service.channel import has_hung_up

_INVISIBLE = (
    b"the broker can't see the caller's process, and this kernel identifies it by nothing else; run the broker with"
    b" hostPID, or --pid=host, or on Linux 6.5 or newer"
)


class PeerGone(Exception):
    """The process that connected has ended, so there is no caller to serve on its connection."""


@dataclass(frozen=True)
class Peer:
    """A caller. `pidfd` refers to the process that connected; the owner of the `Peer` closes it.

    `pid` is 0 if the process isn't visible in the front's pid namespace. The call is charged to `account`. `container`,
    for people to read, is the last part of the caller's cgroup, by which a container engine identifies the container;
    `pod` is the UID of its Kubernetes pod. Both are empty if the front can't see them.
    """

    pidfd: int
    pid: int
    uid: int
    gid: int
    account: AccountName
    container: str
    pod: str


#: Opens a file of /proc by its path relative to /proc, like `os.open` with a directory's descriptor.
OpenProc = Callable[[str, int], int]


def identify(
    connection: socket.socket, open_proc: OpenProc, subordinates: Subordinates = limits.NONE_SUBORDINATE
) -> Peer:
    """Return the caller at the other end of `connection`. Raises PeerGone, OSError, Refusal."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    pid, uid, gid = struct.unpack("iII", credentials)
    pidfd = _pidfd(connection, pid, uid, open_proc)
    try:
        return Peer(pidfd, pid, uid, gid, *_account(connection, pidfd, pid, uid, open_proc, subordinates))
    except BaseException:
        os.close(pidfd)
        raise


def _pidfd(connection: socket.socket, pid: int, uid: int, open_proc: OpenProc) -> int:
    try:
        data = connection.getsockopt(socket.SOL_SOCKET, syscalls.SO_PEERPIDFD, 4)
        return int(struct.unpack("i", data)[0])
    except ProcessLookupError:
        raise PeerGone from None
    except OSError:  # ENOPROTOOPT before Linux 6.5
        if pid == 0:
            raise Refusal(EACCES, _INVISIBLE) from None
        return pidfd_of_pid(connection, pid, uid, open_proc)


def pidfd_of_pid(connection: socket.socket, pid: int, uid: int, open_proc: OpenProc) -> int:
    """Return a pidfd for `pid`, after checking that the pid still belongs to the process that connected.

    A pid can be reused once its process has ended. That process's connection has hung up then, unless another process
    has a copy of it. So the connection must be alive, and the process must have the uid of the one that connected.
    Raises PeerGone.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        raise PeerGone from None
    if _effective_uid(_read(pid, "status", open_proc)) != uid or has_hung_up(connection):
        os.close(pidfd)
        raise PeerGone
    return pidfd


def _effective_uid(status: bytes) -> int:
    """Return the effective uid in /proc/PID/status (proc_pid_status(5)); -1 if there is none."""
    lines = status.split(b"\n")  # no other separator: the process chooses its own name
    return next((int(line.split()[2]) for line in lines if line.startswith(b"Uid:\t")), -1)


def _account(
    connection: socket.socket, pidfd: int, pid: int, uid: int, open_proc: OpenProc, subordinates: Subordinates
) -> tuple[AccountName, str, str]:
    """Return the caller's account, the last part of its cgroup, and its pod. Raises PeerGone, OSError."""
    cgroup = _read(pid, "cgroup", open_proc)
    if _has_ended(pidfd):  # its pid may have been another process's when the cgroup was read
        raise PeerGone
    if not cgroup:
        return _account_by_network(connection), "", ""
    return *_account_in(cgroup, uid, subordinates), limits.pod_of(cgroup)


def account_of_process(
    pid: int, uid: int, open_proc: OpenProc, subordinates: Subordinates = limits.NONE_SUBORDINATE
) -> tuple[AccountName, str]:
    """Return the account of a caller whose connection is gone, and the last part of its cgroup, if visible."""
    return _account_in(_read(pid, "cgroup", open_proc), uid, subordinates)


@lru_cache(256)
def _account_in(cgroup: bytes, uid: int, subordinates: Subordinates) -> tuple[AccountName, str]:
    account = limits.account_of(cgroup, uid, subordinates)
    last = max((line.rpartition(b"/")[2] for line in cgroup.split(b"\n")), key=len, default=b"")
    return account, limits.container_of(account) or last.decode("utf-8", "replace")


def _account_by_network(connection: socket.socket) -> AccountName:
    """Return an account for a process that isn't visible.

    A connection belongs to the network namespace of the process that connected (net/unix/af_unix.c,
    unix_stream_connect): each pod has its own, and root in the pod can't choose another one, whereas it can choose its
    uid. Raises OSError.
    """
    cookie = connection.getsockopt(socket.SOL_SOCKET, syscalls.SO_NETNS_COOKIE, 8)
    return limits.account_in_network(*struct.unpack("Q", cookie))


def _has_ended(pidfd: int) -> bool:
    waiting = select.poll()
    waiting.register(pidfd, select.POLLIN)
    return bool(waiting.poll(0))


def command_of(pid: int, open_proc: OpenProc) -> str:
    """Return the command name of a process, for people to read; empty if the process isn't visible."""
    return _read(pid, "comm", open_proc).strip().decode("utf-8", "replace")


def parent_of(pid: int, open_proc: OpenProc) -> int:
    """Return the pid of a process's parent (proc_pid_stat(5)); 0 if the process isn't visible."""
    said = _read(pid, "stat", open_proc).rpartition(b")")[2].split()
    return int(said[1]) if len(said) > 1 else 0


def uid_of(pid: int, proc: int) -> int:
    """Return the effective uid of a process. Raises OSError if it has ended."""
    return os.stat(f"{pid}", dir_fd=proc).st_uid


def _read(pid: int, name: str, open_proc: OpenProc) -> bytes:
    """Return the contents of a file of the process; nothing if the process isn't visible."""
    if pid <= 0:
        return b""
    try:
        descriptor = open_proc(f"{pid}/{name}", os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""
    finally:
        os.close(descriptor)
