"""The front's side of the mounter: the way to it, and one `Operation` for each conversation with a child of it."""

import asyncio
import os
import socket
from contextlib import suppress
from types import TracebackType
from typing import TypeVar

from broker import plan
from broker.channel import Channel, HungUp
from fusermount3_proxy import wire

RecordT = TypeVar("RecordT", bound=plan.Record)


class MounterFailed(Exception):
    """The mounter takes no operation."""


class OperationFailed(Exception):
    """The child could not go on at `step`, with `errno`; nothing is left mounted."""

    def __init__(self, errno: int, step: str) -> None:
        super().__init__(errno, step)
        self.errno = errno
        self.step = step


class OperationRefused(Exception):
    """The caller sent so many descriptors, instead of one opened with O_PATH."""

    def __init__(self, descriptors: int) -> None:
        super().__init__(descriptors)
        self.descriptors = descriptors


class OperationEnded(Exception):
    """The child ended without a word, or said none in time; nothing is left mounted."""


class Mounter:
    """The mounter, at the other end of `control`. The supervisor starts it again if it ends; the socket stays.

    So does `orphans`, on which its children say what they kept when the front had been killed.
    """

    def __init__(self, control: socket.socket, orphans: socket.socket) -> None:
        for each in (control, orphans):
            each.setblocking(False)  # the front waits for nobody
        self._control = control
        self.orphans = orphans
        self._sending = asyncio.Lock()
        self.pid = 0
        self.restarts = 0

    async def begin(self, start: plan.Start, descriptors: list[int]) -> "Operation":
        """Have a child begin with `start`, and the descriptors that it takes besides, which must stay open meanwhile.

        If the mounter has as much to do as the kernel keeps for it, this waits for room, in turn, and no longer than a
        step may take. Raises MounterFailed.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                await self._send(plan.dump(start), [theirs.fileno(), *descriptors], start.seconds)
        except TimeoutError:
            ours.close()
            raise MounterFailed(f"the mounter takes no operation: no room for {start.seconds} seconds") from None
        except OSError as error:
            ours.close()
            raise MounterFailed(f"the mounter takes no operation: {error}") from None
        except asyncio.CancelledError:
            ours.close()
            raise
        return Operation(ours, start.seconds)

    async def _send(self, record: bytes, descriptors: list[int], seconds: int) -> None:
        """Raises OSError, TimeoutError."""
        if not self._sending.locked() and self._is_sent(record, descriptors):
            return
        async with asyncio.timeout(seconds), self._sending:
            while not self._is_sent(record, descriptors):
                await self._room()

    def _is_sent(self, record: bytes, descriptors: list[int]) -> bool:
        """Send it, if there is room now. Raises OSError."""
        try:
            socket.send_fds(self._control, [record], descriptors)
        except BlockingIOError:
            return False
        return True

    async def _room(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_writer(self._control, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_writer(self._control)

    async def dismiss(self, connections: list[socket.socket], seconds: int) -> "Operation":
        """Have a child be the last who has these callers' connections, after this operation. Raises MounterFailed."""
        return await self.begin(plan.StartDismissal(seconds), [each.fileno() for each in connections])


class Operation:
    """The conversation with one child. Leaving the ``with`` block hangs up; see `plan` for what the child does then."""

    def __init__(self, conversation: socket.socket, seconds: int) -> None:
        self._channel = Channel(conversation)
        #: Whether the child is there, as far as is known: it ends after the conversation.
        self.alive = True
        #: Whether it has said its last word.
        self.finished = False
        #: Whether a step took so long that the child can't have been killed by its alarm: it blocks.
        self.stuck = False
        #: Whom it asks, if that is a FUSE filesystem.
        self.entering: plan.Entering | None = None
        #: Descriptors that came with what it said, and that nobody has taken yet.
        self._descriptors: list[int] = []
        #: How many may come.
        self._most_descriptors = 0
        #: Seconds. The child's own alarm is what ends a step; this is only for a child that can't even be killed.
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

    def say(self, record: plan.Record) -> None:
        """Say it, if the child is still there; if not, `hear` tells what it said last."""
        with suppress(HungUp):
            self._channel.send(plan.dump(record))

    async def hear(self, seconds: int | None = None) -> plan.Record:
        """Return what the child says, within the time of a step or `seconds`.

        Raises OperationFailed or OperationRefused when it says that it failed, OperationEnded when it says nothing.
        """
        try:
            async with asyncio.timeout(self.patience if seconds is None else seconds + 1):
                return await self.hear_at_last()
        except TimeoutError:
            self.give_up()
            raise OperationEnded from None

    async def hear_at_last(self) -> plan.Record:
        """As `hear`, however long it takes."""
        while True:
            try:
                record = plan.load(await self._receive())
            except HungUp:
                self.alive = False
                raise OperationEnded from None
            except wire.ProtocolError:
                raise OperationEnded from None
            if not isinstance(record, plan.Entering):
                break
            self.entering = record
        self.finished = isinstance(record, plan.LAST_WORDS)
        if isinstance(record, plan.Failed):
            raise OperationFailed(record.errno, record.step.decode("utf-8", "replace"))
        if isinstance(record, plan.BadDescriptors):
            raise OperationRefused(record.descriptors)
        return record

    async def _receive(self) -> bytes:
        if not self._most_descriptors:
            return await self._channel.receive()
        data, descriptors = await self._channel.receive_with_descriptors(self._most_descriptors)
        self._descriptors += descriptors
        return data

    async def expect_with_descriptors(self, kind: type[RecordT], most: int) -> tuple[RecordT, list[int]]:
        """As `expect`; return the descriptors, too, that came with it: at most so many, and the taker's to close."""
        self._most_descriptors = most
        record = await self.expect(kind)
        self._most_descriptors = 0
        taken, self._descriptors = self._descriptors, []
        return record, taken

    async def expect(self, kind: type[RecordT]) -> RecordT:
        """Return what the child says, which must be a `kind`; raises as `hear` does."""
        record = await self.hear()
        if not isinstance(record, kind):
            raise OperationEnded
        return record

    async def let_go(self) -> None:
        """Dismiss the child, and wait until it has nothing open that the caller might find busy."""
        if self.alive and not self.finished:
            self.say(plan.LetGo())
            with suppress(OperationEnded, OperationFailed, OperationRefused):
                await self.hear()

    def hang_up(self) -> None:
        """End the conversation, and with it the child; `ended` tells when."""
        with suppress(OSError):
            self._channel.socket.shutdown(socket.SHUT_WR)

    async def ended(self) -> None:
        """Return when the child has ended, after `hang_up`.

        The last thing that happens to its descriptors is that the one which it was given first is closed: what belongs
        to the conversation (exit_files and exit_task_work in kernel/exit.c; the latter goes backwards).
        """
        with suppress(HungUp):
            while True:
                with suppress(wire.ProtocolError):
                    await self._channel.receive()

    async def undo(self) -> bool:
        """Have the child unmount again, and wait for that; whether it has."""
        self.say(plan.Undo())
        try:
            await self.expect(plan.RolledBack)
        except (OperationEnded, OperationFailed, OperationRefused):
            return False
        return True

    def give_up(self) -> None:
        """Wait no longer for the child's next word: something holds it that its alarm does not end."""
        self.alive = False
        self.stuck = True

    def remains(self) -> "Operation":
        """Return a second handle of the conversation, for who waits for the child's end after this one was left."""
        other = Operation(self._channel.socket.dup(), 0)
        other.alive, other.finished, other.entering = self.alive, self.finished, self.entering
        return other
