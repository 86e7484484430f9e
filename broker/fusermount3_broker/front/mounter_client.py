"""The front's side of the mounter: the sockets to it, and an `Operation` for each conversation with one of its
children."""

import asyncio
import os
import socket
from contextlib import suppress
from types import TracebackType
from typing import TypeVar

from fusermount3_broker.kernel import error_texts
from fusermount3_broker.messages import mounter
from fusermount3_broker.service.channel import Channel, HungUp
from fusermount3_proxy import wire

RecordT = TypeVar("RecordT", bound=mounter.Record)


class MounterFailed(Exception):
    """The mounter accepts no operation."""


class OperationFailed(Exception):
    """The child failed at `step` with `errno`; nothing is left mounted."""

    def __init__(self, errno: int, step: str) -> None:
        super().__init__(errno, step)
        self.errno = errno
        self.step = step


class OperationRefused(Exception):
    """The caller sent this number of descriptors, instead of one opened with O_PATH."""

    def __init__(self, descriptors: int) -> None:
        super().__init__(descriptors)
        self.descriptors = descriptors


class OperationEnded(Exception):
    """The child ended without a record, or sent none in time; nothing is left mounted."""


class OperationNotPlain(OperationEnded):
    """The call is not plain: the child leaves it to another one. The request is still in the caller's connection."""


#: The broker's own operations, which access no filesystem: they proceed when callers' operations use all children
#: available to them.
_OWN = mounter.StartAbort | mounter.StartSurvey | mounter.StartCheck


class Mounter:
    """The mounter. The supervisor restarts it if it ends; the sockets stay.

    Children wait for operations at the other end of `control`, and other children for the broker's own operations at
    the other end of `own`, and some that serve plain calls at the other end of `plain`; without these, all operations
    go through `control`.
    """

    def __init__(
        self, control: socket.socket, own: socket.socket | None = None, plain: socket.socket | None = None
    ) -> None:
        for each in (control, own, plain):
            if each:
                each.setblocking(False)  # the front never blocks
        self._way = _Way(control)
        self._own_way = _Way(own) if own else self._way
        self._plain_way = _Way(plain) if plain else self._way
        self.pid = 0
        self.restarts = 0
        #: Whether there are children that take `StartPlainMount` and `StartPlainUnmount`.
        self.serves_plain_calls = False

    async def begin(self, start: mounter.Start, descriptors: list[int]) -> "Operation":
        """Start an operation in a child, with `start` and additional descriptors, which must stay open meanwhile.

        If the socket's queue to the mounter is full, wait for room, in turn, and no longer than the time of a step.
        Raises MounterFailed.
        """
        way = self._way_of(start)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                await way.send(mounter.dump(start), [theirs.fileno(), *descriptors], start.seconds)
        except TimeoutError:
            ours.close()
            raise MounterFailed(f"the mounter takes no operation: no room for {start.seconds} seconds") from None
        except OSError as error:
            ours.close()
            raise MounterFailed(f"the mounter takes no operation: {error_texts.of(error)}") from None
        except asyncio.CancelledError:
            ours.close()
            raise
        return Operation(ours, start.seconds)

    def _way_of(self, start: mounter.Start) -> "_Way":
        if isinstance(start, mounter.StartPlainMount | mounter.StartPlainUnmount):
            return self._plain_way
        return self._own_way if isinstance(start, _OWN) else self._way

    async def dismiss(self, connections: list[socket.socket], seconds: int) -> "Operation":
        """Hand these callers' connections to a child, which becomes their last holder and closes them. Raises
        MounterFailed."""
        return await self.begin(mounter.StartDismissal(seconds), [each.fileno() for each in connections])


class _Way:
    """A socket to children of the mounter."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._sending = asyncio.Lock()

    async def send(self, record: bytes, descriptors: list[int], seconds: int) -> None:
        """Raises OSError, TimeoutError."""
        if not self._sending.locked() and self._is_sent(record, descriptors):
            return
        async with asyncio.timeout(seconds), self._sending:
            while not self._is_sent(record, descriptors):
                await self._room()

    def _is_sent(self, record: bytes, descriptors: list[int]) -> bool:
        """Send the record if there is room now; return whether it was sent. Raises OSError."""
        try:
            socket.send_fds(self._control, [record], descriptors)
        except BlockingIOError:
            return False
        return True

    async def _room(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_writer(self._control.fileno(), ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_writer(self._control.fileno())


class Operation:
    """The conversation with one child. Leaving the ``with`` block hangs up; see `messages.mounter` for what the child
    does then."""

    def __init__(self, conversation: socket.socket, seconds: int) -> None:
        self._channel = Channel(conversation)
        #: Whether the child exists, as far as is known: it ends after the conversation.
        self.alive = True
        #: Whether the child has sent its last record.
        self.finished = False
        #: Whether a step took so long that the child's alarm can't have killed it: it blocks.
        self.stuck = False
        #: The FUSE filesystem that the child enters, if any.
        self.entering: mounter.Entering | None = None
        #: Descriptors that came with the child's records and were not taken yet.
        self._descriptors: list[int] = []
        #: The most descriptors that may come with a record.
        self._most_descriptors = 0
        #: Seconds to wait. The child's own alarm ends a step; this is only for a child that can't even be killed.
        self.patience: float = seconds + 1

    def __enter__(self) -> "Operation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the conversation, without waiting for the child's end."""
        self._channel.socket.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def say(self, record: mounter.Record) -> None:
        """Send the record if the child still exists; otherwise, `hear` returns the child's last record."""
        with suppress(HungUp):
            self._channel.send(mounter.dump(record))

    async def hear(self, seconds: int | None = None) -> mounter.Record:
        """Return the child's next record, within the time of a step or `seconds`.

        Raises OperationFailed or OperationRefused if the record reports a failure, OperationEnded if no record comes.
        """
        try:
            async with asyncio.timeout(self.patience if seconds is None else seconds + 1):
                return await self.hear_without_limit()
        except TimeoutError:
            self.give_up()
            raise OperationEnded from None

    async def hear_without_limit(self) -> mounter.Record:
        """As `hear`, without a time limit."""
        while True:
            try:
                record = mounter.load(await self._receive())
            except HungUp:
                self.alive = False
                raise OperationEnded from None
            except wire.ProtocolError:
                raise OperationEnded from None
            if not isinstance(record, mounter.Entering):
                break
            self.entering = record
        self.finished = isinstance(record, mounter.LAST_WORDS)
        if isinstance(record, mounter.Failed):
            raise OperationFailed(record.errno, record.step.decode("utf-8", "replace"))
        if isinstance(record, mounter.NotPlain):
            raise OperationNotPlain
        if isinstance(record, mounter.BadDescriptors):
            raise OperationRefused(record.descriptors)
        return record

    async def _receive(self) -> bytes:
        if not self._most_descriptors:
            return await self._channel.receive()
        data, descriptors = await self._channel.receive_with_descriptors(self._most_descriptors)
        self._descriptors += descriptors
        return data

    async def expect_with_descriptors(self, kind: type[RecordT], most: int) -> tuple[RecordT, list[int]]:
        """As `expect`; also return the descriptors that came with the record: at most `most`, which the caller must
        close."""
        self._most_descriptors = most
        record = await self.expect(kind)
        self._most_descriptors = 0
        taken, self._descriptors = self._descriptors, []
        return record, taken

    async def expect(self, kind: type[RecordT]) -> RecordT:
        """Return the child's next record, which must be a `kind`; raises as `hear` does."""
        record = await self.hear()
        if not isinstance(record, kind):
            raise OperationEnded
        return record

    async def let_go(self) -> None:
        """Dismiss the child, and wait until it has closed everything that the caller might find busy."""
        if self.alive and not self.finished:
            self.say(mounter.LetGo())
            with suppress(OperationEnded, OperationFailed, OperationRefused):
                await self.hear()

    def hang_up(self) -> None:
        """End the conversation, and with it the child; `ended` waits for that."""
        with suppress(OSError):
            self._channel.socket.shutdown(socket.SHUT_WR)

    async def ended(self) -> None:
        """Return when the child has ended, after `hang_up`.

        The mounter keeps its end of the conversation open until it has reaped the child (`worker_pool`). If the child
        was killed, its own copy is the last of its descriptors that the kernel closes (`mounter.daemon`).
        """
        with suppress(HungUp):
            while True:
                with suppress(wire.ProtocolError):
                    await self._channel.receive()

    async def undo(self) -> bool:
        """Have the child unmount again, wait for that, and return whether it has."""
        self.say(mounter.Undo())
        try:
            await self.expect(mounter.RolledBack)
        except (OperationEnded, OperationFailed, OperationRefused):
            return False
        return True

    def give_up(self) -> None:
        """Stop waiting for the child's next record: something holds the child that its alarm does not end."""
        self.alive = False
        self.stuck = True

    def second_handle(self) -> "Operation":
        """Return a second handle of the conversation, to wait for the child's end after this one is closed."""
        other = Operation(self._channel.socket.dup(), 0)
        other.alive, other.finished, other.entering = self.alive, self.finished, self.entering
        return other
