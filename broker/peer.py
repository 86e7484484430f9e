"""Who is calling: what the kernel says of the process that connected. Nothing here comes from a message.

The uid and gid of a log record are those of the front's user namespace, as SO_PEERCRED gives them here; decisions
use the ones that the mounter reads after it has joined the caller's (`plan.MountFacts`).
"""

import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from broker import syscalls


class PeerGone(Exception):
    """The process that connected has ended, and its connection is nobody's to act for."""


@dataclass(frozen=True)
class Peer:
    """A caller. `pidfd` refers to the process that connected and is the holder's to close.

    `pid` is 0 where the front is in a pid namespace that doesn't show it.
    """

    pidfd: int
    pid: int
    uid: int
    gid: int


def identify(connection: socket.socket) -> Peer:
    """Return who is at the other end of `connection`. Raises PeerGone, OSError."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    pid, uid, gid = struct.unpack("iII", credentials)
    return Peer(_pidfd(connection, pid, uid), pid, uid, gid)


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


def describe(pid: int, open_proc: Callable[[str, int], int]) -> tuple[str, str]:
    """Return the command name of a process and the last part of its cgroup, which container engines name by id.

    For people; empty where the process is not to be seen. `open_proc` opens a file of /proc.
    """
    if pid <= 0:
        return "", ""
    try:
        with open(f"{pid}/cgroup", "rb", opener=open_proc) as file:
            cgroup = file.read(65536)
        with open(f"{pid}/comm", "rb", opener=open_proc) as file:
            command = file.read(64)
    except OSError:
        return "", ""
    last = max((line.rpartition(b"/")[2] for line in cgroup.splitlines()), key=len, default=b"")
    return command.strip().decode("utf-8", "replace"), last.decode("utf-8", "replace")
