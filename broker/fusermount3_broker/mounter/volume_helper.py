"""The helper of a mounter child, which attaches the child's mount in the broker's own mount namespace.

Mounting on a volume takes two processes, because a mount made in the caller's namespaces must appear in the broker's,
too. The *child* serves the caller (`mounting`) in the caller's namespaces. Its *helper* stays in the mounter's. The
helper locks the flags of the mount that the child sends, attaches it at the volume's target, and detaches it again
unless the child confirms it. The child works among a caller's files, so the helper trusts it as little as possible: it
attaches only FUSE filesystems with locked flags, and only at the target that the front has named.
"""

import errno
import os
import select
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.messages import mounter
from fusermount3_broker.messages.mounter import Errno, GroupId, NamespaceInode, StartVolumeMount, UserId
from fusermount3_broker.messages.records import Vocabulary
from fusermount3_broker.mounter import fuse_connections, locked_flags, mount_tree, volume_consumers
from fusermount3_broker.mounter.front_connection import receive, rights
from fusermount3_broker.mounter.kept_descriptors import Descriptors
from fusermount3_broker.mounter.mount_tree import Fuse
from fusermount3_broker.mounter.volume_consumers import Former
from fusermount3_broker.mounter.volume_targets import Attached, Target
from fusermount3_proxy import wire


class Lock(NamedTuple):
    """From the child, with a mount: lock its flags (`locked_flags`). Answered by `Done`, with a clone of it."""

    directory: bool


class Attach(NamedTuple):
    """From the child, with a mount whose flags are locked: attach it at the target. Answered by `Done`."""


class Clone(NamedTuple):
    """From the child: copy the mount at the target. Answered by `Done`, with the copy."""


class Withdraw(NamedTuple):
    """From the child: detach the attached mount. Answered by `Done`; then the helper ends."""


class Keep(NamedTuple):
    """From the child: keep the attached mount. Answered by `Done`; then the helper attaches it in the pod's other
    containers, and ends. In the mount namespace `but`, if that is not 0, it replaces only the tombstone.
    """

    but: NamespaceInode


class Done(NamedTuple):
    """From the helper. `errno` is 0 on success. After `Attach`, the other fields hold the owner of the filesystem."""

    errno: Errno
    uid: UserId
    gid: GroupId
    allow_other: bool


_Record = Lock | Attach | Clone | Withdraw | Keep | Done
_vocabulary: Vocabulary[_Record] = Vocabulary(_Record.__args__)


class VolumeHelper:
    """The child's handle on its helper, which it reaches by the socket `end`."""

    def __init__(self, end: socket.socket, seconds: int, mount_namespace: int) -> None:
        """`mount_namespace`: the inode of the helper's mount namespace."""
        self.mount_namespace = mount_namespace
        self._end = end
        self._seconds = seconds

    def lock(self, mount: int, *, directory: bool) -> int:
        """Have the helper lock the mount's flags, as by `Cell.lock`. Raises OSError."""
        try:
            _, (clone,) = self._ask(Lock(directory), mount)
        finally:
            os.close(mount)
        return clone

    def attach(self, mount: int) -> Fuse:
        """Have the helper attach the mount at the target; return the owner of the filesystem.

        Raises OSError as `Target.attach`.
        """
        done, _ = self._ask(Attach(), mount)
        return Fuse(done.uid, done.gid, done.allow_other)

    def clone(self) -> int:
        """Return a detached copy of the mount at the target. Raises OSError as `Target.clone`."""
        _, (copy,) = self._ask(Clone())
        return copy

    def withdraw(self) -> None:
        """Have the helper detach the attached mount. Raises OSError."""
        self._ask(Withdraw())

    def keep(self, but: int) -> None:
        """Have the helper keep the attached mount; `but` is as in `volume_consumers.Former`.

        The helper has no descriptor of the mount any more then, so anybody can unmount it, unless it is not the first
        one of the volume, which takes longer.
        """
        with suppress(OSError):
            self._ask(Keep(but))

    def _ask(self, record: _Record, *descriptors: int) -> tuple[Done, list[int]]:
        ancillary = [rights(*descriptors)] if descriptors else []
        self._end.sendmsg([_vocabulary.dump(record)], ancillary, socket.MSG_NOSIGNAL)
        waiting = select.poll()
        waiting.register(self._end, select.POLLIN)
        if not waiting.poll(1000 * (self._seconds + 1)):
            raise TimeoutError(errno.ETIMEDOUT, "the helper hangs")
        data, received = receive(self._end)
        if not data:  # killed by its alarm
            raise TimeoutError(errno.ETIMEDOUT, "the helper was killed")
        done = _vocabulary.load(data)
        assert isinstance(done, Done)
        if done.errno:
            raise OSError(done.errno, "in the helper")
        return done, received


class Volume(NamedTuple):
    """An operation for the child: the start record, its descriptors, and the front's pid."""

    start: StartVolumeMount
    descriptors: list[int]
    front: int

    @classmethod
    def receive(cls, end: socket.socket) -> "Volume | None":
        """Return the operation that the helper hands over; None if the helper has hung up, because no volume was
        requested."""
        data, descriptors = receive(end)
        if not data:
            return None
        front, _, record = data.partition(b" ")
        start = mounter.load(record)
        assert isinstance(start, StartVolumeMount)
        return cls(start, descriptors, int(front))


class Child(NamedTuple):
    """The helper's handle on the child. The helper forks it before there is an operation, as it was forked itself."""

    pid: int
    end: socket.socket

    @classmethod
    def fork(cls, serve: Callable[[socket.socket], None]) -> "Child":
        """Fork a child that runs `serve` with its end of the socket pair, then exits. Raises OSError."""
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
        data = b"%d " % volume.front + mounter.dump(volume.start)
        self.end.sendmsg([data], [rights(*volume.descriptors)], socket.MSG_NOSIGNAL)

    def has_ended(self) -> bool:
        """Return whether the child was killed while it waited."""
        waiting = select.poll()
        waiting.register(self.end, 0)
        return bool(waiting.poll(0))

    def dismiss(self) -> None:
        """End the child before it has served, and reap it: otherwise pid 1 has to, which may be the supervisor."""
        self.end.close()
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


class HelperProcess:
    """The helper itself: carries out its child's requests, for one target."""

    def __init__(self, opened: Descriptors, start: StartVolumeMount) -> None:
        self._opened = opened
        self._path = start.target
        self._attributes = syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV
        if start.read_only:
            self._attributes |= syscalls.MOUNT_ATTR_RDONLY
        self._seconds = start.seconds
        self._former = start.former
        self._mount: int | None = None
        self._attached = Attached()

    def attend(self, end: socket.socket) -> None:
        """Carry out the child's requests until it keeps or withdraws the mount, or has ended. Raises OSError."""
        while True:
            try:
                data, descriptors = receive(end)
                record = _vocabulary.load(data)
            except (OSError, wire.ProtocolError):  # end of file reads as an empty record, which is invalid
                record, descriptors = Withdraw(), []
            try:
                answer, given = self._do(record, descriptors)
            except OSError as error:
                answer, given = Done(error.errno or errno.EIO, 0, 0, False), []
            with suppress(OSError):
                end.sendmsg([_vocabulary.dump(answer)], [rights(*given)] if given else [], socket.MSG_NOSIGNAL)
            for each in given:
                os.close(each)
            if isinstance(record, Lock):  # after the answer, so that the child need not wait for this
                self._opened.cell.close()
            if isinstance(record, Keep):
                self._restore_consumers(record.but)
            if isinstance(record, Keep | Withdraw):
                return

    def _restore_consumers(self, but: int) -> None:
        if self._mount is not None:
            former = Former.of(self._opened, self._attached, self._former)._replace(but=but)
            volume_consumers.restore(self._opened, self._path, former, self._mount, self._seconds, served=True)

    @property
    def _has_predecessor(self) -> bool:
        """Whether a container may have a former filesystem of the volume, or the tombstone."""
        return self._attached != Attached() or bool(self._former)

    def _do(self, record: _Record, descriptors: list[int]) -> tuple[Done, list[int]]:
        signal.alarm(self._seconds)
        try:
            if isinstance(record, Lock) and len(descriptors) == 1:
                return _DONE, [self._opened.cell.lock(descriptors[0], directory=record.directory)]
            if isinstance(record, Keep):
                if self._mount is not None and not self._has_predecessor:
                    os.close(self._mount)  # an open descriptor would keep others from unmounting it
                    self._mount = None
                return _DONE, []
            with Target(self._opened, self._path) as target:
                if isinstance(record, Clone):
                    return _DONE, [target.clone(self._seconds)]
                if isinstance(record, Attach) and len(descriptors) == 1 and self._mount is None:
                    return self._attach(target, *descriptors), []
                if isinstance(record, Withdraw):
                    if self._mount is not None:
                        target.withdraw(self._mount, self._attached.replaced, self._seconds)
                    return _DONE, []
        finally:
            signal.alarm(0)
        raise OSError(errno.EBADMSG, "unexpected record")

    def _attach(self, target: Target, mount: int) -> Done:
        if not fuse_connections.exists(self._opened.fusectl, mount_tree.look(mount).device):
            raise PermissionError(errno.EPERM, "it is no FUSE filesystem")
        locked_flags.check_locked(mount)
        syscalls.mount_setattr(mount, b"", syscalls.AT_EMPTY_PATH, self._attributes, syscalls.MS_PRIVATE)
        self._attached = target.attach(mount, self._seconds)
        self._mount = mount
        fuse = mount_tree.fuse_of(mount_tree.look(mount).mount_id)
        assert fuse is not None
        return Done(0, *fuse)


_DONE = Done(0, 0, 0, False)
