"""The front's server: accepts callers, admits or refuses them (`limits`), and gives each admitted call a task (`call`).

Admission waits for nothing but the processor: a caller over a limit is refused at once. Such refusals are logged here,
once a second, because there may be very many.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

from fusermount3_broker.front.call import Call
from fusermount3_broker.front.context import Front
from fusermount3_broker.front.decisions.limits import LimitReached
from fusermount3_broker.front.mounter_client import MounterFailed
from fusermount3_broker.front.peer import PeerGone
from fusermount3_broker.kernel import error_texts
from fusermount3_broker.messages.refusal import Refusal
from fusermount3_broker.service import log
from fusermount3_broker.service.channel import Channel, HungUp
from fusermount3_proxy.wire import ProtocolError

#: Callers that are admitted or refused before the admitted calls have their turn.
_AT_ONCE = 4


#: Makes the call for a connection.
Begin = Callable[[Front, Channel], Call]


def admit(front: Front, channel: Channel, begin: Begin) -> Call | None:
    """Return the connection's call, made by `begin`, for `serve`; None if the caller was refused or is gone."""
    call = begin(front, channel)
    try:
        call.enter()
        return call
    except LimitReached as reached:
        call.turn_away(reached)
    except Refusal as refusal:
        call.refuse(refusal)
    except PeerGone:
        front.gone += 1
        front.requests["request caller went away"] += 1
    call.end()
    return None


async def serve(call: Call) -> None:
    """Serve an admitted call."""
    try:
        await call.wait_for_turn()
        await call.serve()
    except Refusal as refusal:
        try:
            await call.let_go()
        finally:  # even if the broker stops meanwhile
            call.refuse(refusal)
    except ProtocolError as error:
        call.refuse(Refusal(error.errno, f"bad request: {error.text}".encode()))
    except MounterFailed as error:
        call.failed(error)
    except HungUp:
        call.decided(log.INFO, "caller went away")
    except asyncio.CancelledError:
        call.decided(log.NOTICE, "ended: the broker stops")
        raise
    finally:
        call.end()


class Server:
    """Accepts callers for `front`."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: dict[socket.socket, Begin] = {}

    async def run(self, listeners: Sequence[socket.socket], stop: asyncio.Event) -> None:
        """Serve the callers that connect to `listeners` until `stop`; then finish calls under way, within deadlines.

        A call with ``--sync-init`` may take minutes; it is cancelled after that time, and its mount is rolled back.
        """
        for listener in listeners:
            self.listen(listener, Call)
        telling = asyncio.create_task(self._tell_refusals())
        await stop.wait()
        telling.cancel()
        await asyncio.wait([telling])
        for listener in list(self._listeners):
            self.leave(listener)
        deadlines = self._front.configuration.deadlines
        await self._end_calls(2 * deadlines.operation + deadlines.commit)
        self._log_refusals()

    def listen(self, listener: socket.socket, begin: Begin) -> None:
        """Serve callers that connect to `listener`, too, each with a call that `begin` makes."""
        listener.setblocking(False)
        self._listeners[listener] = begin
        self._watch(listener)

    def leave(self, listener: socket.socket) -> None:
        """Stop accepting callers on `listener`, which may be closed afterwards."""
        if self._listeners.pop(listener, None):
            asyncio.get_running_loop().remove_reader(listener.fileno())

    async def _end_calls(self, seconds: int) -> None:
        """Wait up to `seconds` for the calls under way; then hang up on the rest."""
        if self._tasks:
            _, remaining = await asyncio.wait(self._tasks, timeout=seconds)
            for task in remaining:
                task.cancel()
            await asyncio.gather(*remaining, return_exceptions=True)

    def _watch(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        """Accept some of the callers that have connected; the event loop calls again for the others."""
        loop = asyncio.get_running_loop()
        try:
            with suppress(BlockingIOError):
                for _ in range(_AT_ONCE):
                    connection, _ = listener.accept()
                    self._admit(connection, self._listeners[listener])
        except OSError as error:  # for example, no descriptors left: callers wait until it passes
            self._front.log(log.ERROR, f"cannot accept a caller: {error_texts.of(error)}")
            loop.remove_reader(listener.fileno())
            loop.call_later(1, self._watch, listener)

    def _admit(self, connection: socket.socket, begin: Begin) -> None:
        try:
            entered = admit(self._front, Channel(connection), begin)
        except Exception as error:
            self._front.log(log.ERROR, f"internal error: {error!r}")
            return
        if entered:
            task = asyncio.get_running_loop().create_task(serve(entered))
            self._tasks.add(task)
            task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._front.log(log.ERROR, f"internal error: {error!r}")

    async def _tell_refusals(self) -> None:
        while True:
            await asyncio.sleep(1)
            self._log_refusals()

    def _log_refusals(self) -> None:
        """Log the refusals since the last time, one record per account and limit, and the callers that went away."""
        for refused in self._front.refusals.take():
            self._front.log(
                log.NOTICE,
                "requests refused",
                request_id=refused.id,
                account=refused.account,
                limit=refused.reason.limit,
                requests=refused.requests,
                errno=refused.reason.errno,
                text=refused.reason.text,
            )
        if self._front.gone:
            self._front.log(log.INFO, "callers went away before they were admitted", requests=self._front.gone)
            self._front.gone = 0
