"""Mounting on a volume takes two processes: what is made in the caller's namespaces appears in the broker's, too.

The *child* serves the caller (`mounting`), in the caller's namespaces. Its *twin* stays where the mounter is; it
attaches at the volume's target what the child sends it, and takes that away again, also when the child has ended before
it said that the mount stays. It believes the child as little as need be, for that is among a caller's files: nothing
but a FUSE filesystem is attached, and nowhere but at the target that the front has named.
"""

import errno
import os
import select
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from broker import connections, consumers, mounts, plan, syscalls
from broker.conversation import receive, rights
from broker.descriptors import Descriptors
from broker.mounts import Fuse
from broker.plan import Errno, GroupId, NamespaceInode, StartVolumeMount, UserId
from broker.records import Vocabulary
from broker.targets import Target
from fusermount3_proxy import wire


class Put(NamedTuple):
    """From the child, with a mount: attach it at the target. Answered by `Done`."""


class Clone(NamedTuple):
    """From the child: copy what is at the target. Answered by `Done`, with the copy."""


class Withdraw(NamedTuple):
    """From the child: take away what was put. Answered by `Done`; then the twin ends."""


class Keep(NamedTuple):
    """From the child: what was put stays. Then the twin ends, when other containers of the pod have it, too: all but
    those in the mount namespace `but`, if that is not 0.
    """

    but: NamespaceInode


class Done(NamedTuple):
    """From the twin. `errno` is 0, or why it is not done; if it is, whose filesystem was put."""

    errno: Errno
    uid: UserId
    gid: GroupId
    allow_other: bool


_Record = Put | Clone | Withdraw | Keep | Done
_vocabulary: Vocabulary[_Record] = Vocabulary(_Record.__args__)


class Twin:
    """The twin, as the child has it: what it is told by `end`."""

    def __init__(self, end: socket.socket, seconds: int, mount_namespace: int) -> None:
        """`mount_namespace`: the inode of the one in which the twin is."""
        self.mount_namespace = mount_namespace
        self._end = end
        self._seconds = seconds

    def put(self, mount: int) -> Fuse:
        """Have the mount attached at the target; return whose filesystem it is. Raises OSError as `Target.put`."""
        done, _ = self._ask(Put(), mount)
        return Fuse(done.uid, done.gid, done.allow_other)

    def clone(self) -> int:
        """Return a copy of the mount that is at the target, attached nowhere. Raises OSError as `Target.clone`."""
        _, (copy,) = self._ask(Clone())
        return copy

    def withdraw(self) -> None:
        """Have what was put taken away. Raises OSError."""
        self._ask(Withdraw())

    def keep(self, but: int) -> None:
        """Say that what was put stays; `but` is as in `consumers.restore`."""
        with suppress(OSError):
            self._end.send(_vocabulary.dump(Keep(but)))

    def _ask(self, record: _Record, *descriptors: int) -> tuple[Done, list[int]]:
        ancillary = [rights(*descriptors)] if descriptors else []
        self._end.sendmsg([_vocabulary.dump(record)], ancillary, socket.MSG_NOSIGNAL)
        waiting = select.poll()
        waiting.register(self._end, select.POLLIN)
        if not waiting.poll(1000 * (self._seconds + 1)):
            raise TimeoutError(errno.ETIMEDOUT, "the twin hangs")
        data, received = receive(self._end)
        if not data:  # its alarm
            raise TimeoutError(errno.ETIMEDOUT, "the twin was killed")
        done = _vocabulary.load(data)
        assert isinstance(done, Done)
        if done.errno:
            raise OSError(done.errno, "in the twin")
        return done, received


class Volume(NamedTuple):
    """What the child is to do: a start record, its descriptors, and the front's pid."""

    start: StartVolumeMount
    descriptors: list[int]
    front: int

    @classmethod
    def receive(cls, end: socket.socket) -> "Volume | None":
        """Return what the twin hands over; None if it has hung up, since nobody asked for a volume."""
        data, descriptors = receive(end)
        if not data:
            return None
        front, _, record = data.partition(b" ")
        start = plan.load(record)
        assert isinstance(start, StartVolumeMount)
        return cls(start, descriptors, int(front))


class Child(NamedTuple):
    """The child, as the twin has it, which forks it before there is anything to do, as it was forked itself."""

    pid: int
    end: socket.socket

    @classmethod
    def fork(cls, serve: Callable[[socket.socket], None]) -> "Child":
        """Fork a child that does `serve` with its end of the talk, and ends. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = syscalls.fork()
        if pid == 0:
            try:
                ours.close()
                serve(theirs)
            finally:
                os._exit(0)
        theirs.close()
        return cls(pid, ours)

    def hand_over(self, volume: Volume) -> None:
        """Raises OSError."""
        data = b"%d " % volume.front + plan.dump(volume.start)
        self.end.sendmsg([data], [rights(*volume.descriptors)], socket.MSG_NOSIGNAL)

    def has_ended(self) -> bool:
        """Whether it was killed while it waited."""
        waiting = select.poll()
        waiting.register(self.end, 0)
        return bool(waiting.poll(0))

    def dismiss(self) -> None:
        """Have it end without having served, and reap it: else that is left to pid 1, which may be the supervisor."""
        self.end.close()
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


class Attendant:
    """The twin's own side: it does for its child what that asks, at one target."""

    def __init__(self, opened: Descriptors, path: bytes, read_only: bool, seconds: int) -> None:
        """`read_only`: who comes by the target may not write."""
        self._opened = opened
        self._path = path
        self._attributes = syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV
        if read_only:
            self._attributes |= syscalls.MOUNT_ATTR_RDONLY
        self._seconds = seconds
        self._mount: int | None = None
        self._replaced: int | None = None

    def attend(self, end: socket.socket) -> None:
        """Do what the child asks, until it says what becomes of the mount, or has ended. Raises OSError."""
        while True:
            try:
                data, descriptors = receive(end)
                record = _vocabulary.load(data)
            except (OSError, wire.ProtocolError):  # the end is an empty record, which is none of these
                record, descriptors = Withdraw(), []
            if isinstance(record, Keep):
                self._restore_consumers(record.but)
                return
            try:
                answer, given = self._do(record, descriptors)
            except OSError as error:
                answer, given = Done(error.errno or errno.EIO, 0, 0, False), []
            with suppress(OSError):
                end.sendmsg([_vocabulary.dump(answer)], [rights(*given)] if given else [], socket.MSG_NOSIGNAL)
            for each in given:
                os.close(each)
            if isinstance(record, Withdraw):
                return

    def _restore_consumers(self, but: int) -> None:
        if self._mount is not None and self._replaced is not None:
            dead = mounts.look(self._replaced).device
            consumers.restore(self._opened, self._path, dead, self._mount, but, self._seconds, served=True)

    def _do(self, record: _Record, descriptors: list[int]) -> tuple[Done, list[int]]:
        signal.alarm(self._seconds)
        try:
            with Target(self._opened, self._path) as target:
                if isinstance(record, Clone):
                    return _DONE, [target.clone(self._seconds)]
                if isinstance(record, Put) and len(descriptors) == 1 and self._mount is None:
                    return self._put(target, *descriptors), []
                if isinstance(record, Withdraw):
                    if self._mount is not None:
                        target.withdraw(self._mount, self._replaced, self._seconds)
                    return _DONE, []
        finally:
            signal.alarm(0)
        raise OSError(errno.EBADMSG, "not to be said")

    def _put(self, target: Target, mount: int) -> Done:
        if not connections.exists(self._opened.fusectl, mounts.look(mount).device):
            raise PermissionError(errno.EPERM, "it is no FUSE filesystem")
        syscalls.mount_setattr(mount, b"", syscalls.AT_EMPTY_PATH, self._attributes, syscalls.MS_PRIVATE)
        self._replaced = target.put(mount, self._seconds)
        self._mount = mount
        fuse = mounts.fuse_of(mounts.look(mount).mount_id)
        assert fuse is not None
        return Done(0, *fuse)


_DONE = Done(0, 0, 0, False)
