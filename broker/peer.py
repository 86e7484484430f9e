"""Who is calling: what the kernel says of the process that connected. Nothing here comes from a message.

The uid and gid of a log record are those of the front's user namespace, as SO_PEERCRED gives them here; decisions
use the ones that the mounter reads after it has joined the caller's (`plan.MountFacts`).
"""

import os
import select
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import psutil

from broker import limits, syscalls
from broker.limits import AccountName


class PeerGone(Exception):
    """The process that connected has ended, and its connection is nobody's to act for."""


@dataclass(frozen=True)
class Peer:
    """A caller. `pidfd` refers to the process that connected and is the holder's to close.

    `pid` is 0 where the front is in a pid namespace that doesn't show it. `account` is who pays; `container` the last
    part of its cgroup, by which an engine knows a container, for people; `pod` the UID of its Kubernetes pod. Both are
    empty where that is not to be seen.
    """

    pidfd: int
    pid: int
    uid: int
    gid: int
    account: AccountName
    container: str
    pod: str


#: Opens a file of /proc by its path below that, as `os.open` does with a directory's descriptor.
OpenProc = Callable[[str, int], int]


def identify(connection: socket.socket, open_proc: OpenProc) -> Peer:
    """Return who is at the other end of `connection`. Raises PeerGone, OSError."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    pid, uid, gid = struct.unpack("iII", credentials)
    pidfd = _pidfd(connection, pid, uid)
    try:
        return Peer(pidfd, pid, uid, gid, *_account(connection, pidfd, pid, uid, open_proc))
    except BaseException:
        os.close(pidfd)
        raise


def _pidfd(connection: socket.socket, pid: int, uid: int) -> int:
    try:
        data = connection.getsockopt(socket.SOL_SOCKET, syscalls.SO_PEERPIDFD, 4)
        return int(struct.unpack("i", data)[0])
    except ProcessLookupError:
        raise PeerGone from None
    except OSError:  # ENOPROTOOPT before Linux 6.5
        return pidfd_of_pid(connection, pid, uid)


def pidfd_of_pid(connection: socket.socket, pid: int, uid: int) -> int:
    """Return a pidfd for `pid`, once it is sure that this number still is the process that connected.

    A number can be used again when its process has ended; the connection of that process has hung up then, unless
    it left a copy of it to another. So the connection must be alive, and the process must have the uid of the one
    that connected. Raises PeerGone.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        raise PeerGone from None
    try:
        if psutil.Process(pid).uids().effective != uid or _hung_up(connection):
            raise PeerGone
    except (psutil.Error, PeerGone):
        os.close(pidfd)
        raise PeerGone from None
    return pidfd


def _hung_up(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _account(
    connection: socket.socket, pidfd: int, pid: int, uid: int, open_proc: OpenProc
) -> tuple[AccountName, str, str]:
    """Return the caller's account, the last part of its cgroup, and its pod. Raises PeerGone, OSError."""
    cgroup = _read(pid, "cgroup", open_proc)
    if _has_ended(pidfd):  # and the number may have been another's when it was looked up
        raise PeerGone
    if not cgroup:
        return _account_by_network(connection, uid), "", ""
    return *_account_in(cgroup, uid), limits.pod_of(cgroup)


def account_of_process(pid: int, uid: int, open_proc: OpenProc) -> tuple[AccountName, str]:
    """Return the account of a caller whose connection is gone, and the last part of its cgroup, as far as they show."""
    return _account_in(_read(pid, "cgroup", open_proc), uid)


@lru_cache(256)
def _account_in(cgroup: bytes, uid: int) -> tuple[AccountName, str]:
    account = limits.account_of(cgroup, uid)
    last = max((line.rpartition(b"/")[2] for line in cgroup.split(b"\n")), key=len, default=b"")
    return account, limits.container_of(account) or last.decode("utf-8", "replace")


def _account_by_network(connection: socket.socket, uid: int) -> AccountName:
    """Return an account where the process is not to be seen.

    A connection is in the network namespace of who asked for it (net/unix/af_unix.c, unix_stream_connect): a pod has
    one of its own, and its root can't choose another, as it can its uid. Before Linux 5.14, there is only the uid.
    """
    try:
        cookie = connection.getsockopt(socket.SOL_SOCKET, syscalls.SO_NETNS_COOKIE, 8)
    except OSError:
        return limits.account_of(b"", uid)
    return limits.account_in_network(*struct.unpack("Q", cookie))


def _has_ended(pidfd: int) -> bool:
    waiting = select.poll()
    waiting.register(pidfd, select.POLLIN)
    return bool(waiting.poll(0))


def command_of(pid: int, open_proc: OpenProc) -> str:
    """Return the command name of a process, for people; empty where it is not to be seen."""
    return _read(pid, "comm", open_proc).strip().decode("utf-8", "replace")


def _read(pid: int, name: str, open_proc: OpenProc) -> bytes:
    """Return what a file of the process says; nothing where it is not to be seen."""
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
