"""The front accepts callers, as many at a time as it has places for, and gives each a task (`call`)."""

import asyncio
import socket
from collections.abc import Sequence

from broker import call, log
from broker.channel import Channel
from broker.front import Front


class Server:
    """Accepts callers for `front`."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._tasks: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(front.configuration.max_requests)

    async def run(self, listeners: Sequence[socket.socket], stop: asyncio.Event) -> None:
        """Serve the callers that come on `listeners` until `stop`; then finish what was begun, within its deadlines.

        A caller with ``--sync-init`` may take minutes; it is let go, and what it began is rolled back.
        """
        for listener in listeners:
            listener.setblocking(False)
        accepting = [asyncio.create_task(self._accept(listener)) for listener in listeners]
        await stop.wait()
        for task in accepting:
            task.cancel()
        await asyncio.gather(*accepting, return_exceptions=True)
        deadlines = self._front.configuration.deadlines
        await self._end_calls(2 * deadlines.operation + deadlines.commit)

    async def _end_calls(self, seconds: int) -> None:
        """Wait so long for the calls under way; then hang up on those that remain."""
        if self._tasks:
            _, remaining = await asyncio.wait(self._tasks, timeout=seconds)
            for task in remaining:
                task.cancel()
            await asyncio.gather(*remaining, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        """Accept callers while there are places; the others wait in the kernel's queue."""
        loop = asyncio.get_running_loop()
        while True:
            await self._places.acquire()
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # no descriptors left, for example: callers wait, and it passes
                self._places.release()
                self._front.log(log.ERROR, f"cannot accept a caller: {error}")
                await asyncio.sleep(0.1)
                continue
            except asyncio.CancelledError:
                self._places.release()
                raise
            task = loop.create_task(call.serve(self._front, Channel(connection)))
            self._tasks.add(task)
            task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._places.release()
        if not task.cancelled() and (error := task.exception()):
            self._front.log(log.ERROR, f"internal error: {error!r}")
