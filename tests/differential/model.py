"""Cases and observations: plain values that are sent to the workers and back, and compare with ``==``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

USER = 1000
"""The user of the cases: with an entry in passwd, in no group that matters."""
ROOT = 0
STRANGER = 12345
"""A uid that passwd doesn't know."""

PROGRAM = b"fusermount3"
COMM_FD = 3
WORK = b"/work"
"""The fresh tree of each case; `worker.populate` says what is in it."""


class Comm(Enum):
    """The kind of descriptor 3 that the caller has."""

    STREAM = "a stream socket"
    SEQPACKET = "a seqpacket socket"
    DGRAM = "a datagram socket"
    PEERLESS = "a stream socket whose peer is gone"
    FILE = "a file"
    CLOSED = "nothing"


class Policy(Enum):
    """The administrator's settings: in fuse.conf, and for the proxy in the broker's configuration."""

    DEFAULT = "default"
    ALLOW_OTHER = "allow-other"
    NO_MOUNTS = "no-mounts"
    ONE_MOUNT = "one-mount"


@dataclass(frozen=True)
class Policies:
    """The two files of a policy."""

    fuse_conf: bytes
    broker_toml: str


POLICIES = {
    Policy.DEFAULT: Policies(b"# nothing\n", ""),
    Policy.ALLOW_OTHER: Policies(b"user_allow_other\nmount_max = -1\n", "user_allow_other = true\nmount_max = -1"),
    Policy.NO_MOUNTS: Policies(b"mount_max = 0\n", "mount_max = 0"),
    Policy.ONE_MOUNT: Policies(b"mount_max=1\n", "mount_max = 1"),
}


@dataclass(frozen=True)
class Step:
    """An event before the call: the name of a function of `worker.STEPS`, and its arguments."""

    name: str
    arguments: tuple[bytes | int, ...] = ()


@dataclass(frozen=True)
class Case:
    """One call of the helper. `argv` includes the program's name.

    `environment` is the entire environment. `closed` are descriptors below 3 that the caller has closed. With
    `cwd_deleted` the working directory is removed before the call. `since` is the release whose behaviour the proxy
    imitates here; the case doesn't run with older ones.
    """

    argv: tuple[bytes, ...]
    uid: int = USER
    comm: Comm = Comm.STREAM
    environment: tuple[tuple[bytes, bytes], ...] = ((b"_FUSE_COMMFD", b"3"),)
    cwd: bytes = WORK
    cwd_deleted: bool = False
    policy: Policy = Policy.DEFAULT
    setup: tuple[Step, ...] = ()
    closed: tuple[int, ...] = ()
    since: tuple[int, int] = (3, 14)


@dataclass(frozen=True)
class Message:
    """A message on the comm socket: its bytes, and the target and the open flags of each descriptor."""

    data: bytes
    descriptors: tuple[tuple[bytes, int], ...]


@dataclass(frozen=True)
class MountLine:
    """A line of mountinfo, without the numbers that vary between runs."""

    root: bytes
    mountpoint: bytes
    options: bytes
    type: bytes
    source: bytes
    super_options: bytes


@dataclass(frozen=True)
class Observation:
    """Everything that a caller can see of a call.

    `status` is negative for death by a signal. If the helper became a watcher, `status` is the watcher's, `watched` is
    its name, and `mounts` are the mounts while it watched; `mounts_at_end` are the mounts that remain after everything
    has ended. `processes` are the names of the processes that remain.
    """

    status: int | None
    stdout: bytes
    stderr: bytes
    messages: tuple[Message, ...]
    mounts: tuple[MountLine, ...]
    watched: bytes | None = None
    mounts_at_end: tuple[MountLine, ...] = ()
    processes: tuple[bytes, ...] = ()
