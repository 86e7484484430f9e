"""The front accepts callers, decides at the door whether they are served (`limits`), and gives each a task (`call`).

Nobody waits to be let in but for the processor: a caller of whom there are too many is told so. What it is told comes
into the log here, once a second, for there may be very many.
"""

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress

from broker import call, log
from broker.channel import Channel
from broker.front import Front

#: Callers that are let in or turned away before those who are inside have their turn.
_AT_ONCE = 4


class Server:
    """Accepts callers for `front`."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: dict[socket.socket, asyncio.Task[None]] = {}

    async def run(self, listeners: Sequence[socket.socket], stop: asyncio.Event) -> None:
        """Serve the callers that come on `listeners` until `stop`; then finish what was begun, within its deadlines.

        A caller with ``--sync-init`` may take minutes; it is let go, and what it began is rolled back.
        """
        for listener in listeners:
            self.listen(listener, call.Call)
        telling = asyncio.create_task(self._tell_refusals())
        await stop.wait()
        telling.cancel()
        await asyncio.wait([telling])
        for listener in list(self._accepting):
            await self.leave(listener)
        deadlines = self._front.configuration.deadlines
        await self._end_calls(2 * deadlines.operation + deadlines.commit)
        self._log_refusals()

    def listen(self, listener: socket.socket, begin: call.Begin) -> None:
        """Serve those who come on `listener`, too, each with a call that `begin` makes."""
        listener.setblocking(False)
        self._accepting[listener] = asyncio.get_running_loop().create_task(self._accept(listener, begin))

    async def leave(self, listener: socket.socket) -> None:
        """Let nobody in any more who comes on `listener`; it may be closed then."""
        accepting = self._accepting.pop(listener, None)
        if accepting:
            accepting.cancel()
            await asyncio.wait([accepting])

    async def _end_calls(self, seconds: int) -> None:
        """Wait so long for the calls under way; then hang up on those that remain."""
        if self._tasks:
            _, remaining = await asyncio.wait(self._tasks, timeout=seconds)
            for task in remaining:
                task.cancel()
            await asyncio.gather(*remaining, return_exceptions=True)

    async def _accept(self, listener: socket.socket, begin: call.Begin) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
                self._let_in(connection, begin)
                with suppress(BlockingIOError):
                    for _ in range(_AT_ONCE - 1):
                        connection, _ = listener.accept()
                        self._let_in(connection, begin)
            except OSError as error:  # no descriptors left, for example: callers wait, and it passes
                self._front.log(log.ERROR, f"cannot accept a caller: {error}")
                await asyncio.sleep(1)
            await asyncio.sleep(0)

    def _let_in(self, connection: socket.socket, begin: call.Begin) -> None:
        try:
            entered = call.let_in(self._front, Channel(connection), begin)
        except Exception as error:
            self._front.log(log.ERROR, f"internal error: {error!r}")
            return
        if entered:
            task = asyncio.get_running_loop().create_task(call.serve(entered))
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
        """Write a record for each account that has come to a limit since the last time, and one for who is gone."""
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
            self._front.log(log.INFO, "callers went away before they were let in", requests=self._front.gone)
            self._front.gone = 0
