"""When which node is looked at next. Each is in the queue once, at the earliest time at which somebody wants it."""

import asyncio
import heapq
import time


class LookQueue:
    """Nodes by time; one that somebody looks at is given to nobody else, and rests for `pause` seconds afterwards."""

    def __init__(self, pause: float) -> None:
        self._pause = pause
        #: In seconds of the monotonic clock.
        self._due: dict[str, float] = {}
        self._rested: dict[str, float] = {}
        #: All times that were set; those that `_due` does not have any more are passed over.
        self._heap: list[tuple[float, str]] = []
        self._taken: set[str] = set()
        self._changed = asyncio.Event()

    def add(self, node: str, seconds: float = 0.0) -> None:
        """Have the node looked at in so many seconds, unless that is due earlier."""
        due = max(time.monotonic() + seconds, self._rested.get(node, 0.0))
        if due < self._due.get(node, float("inf")):
            self._due[node] = due
            self._push(node)

    async def take(self) -> str:
        """Return a node that is due, as soon as there is one; until `done`, it is the caller's."""
        while True:
            self._changed.clear()
            wait = self._next()
            if wait is not None and wait <= 0:
                _, node = heapq.heappop(self._heap)
                del self._due[node]
                self._taken.add(node)
                return node
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def done(self, node: str, again: float | None) -> None:
        """Give the node back, to be looked at again in so many seconds; None: only when it is added, or was."""
        self._taken.remove(node)
        rested = time.monotonic() + self._pause
        if again is not None:
            self._rested[node] = rested
            self.add(node, again)
        elif node not in self._due:
            self._rested.pop(node, None)
        if node in self._due:
            self._due[node] = max(self._due[node], rested)
            self._push(node)

    def _push(self, node: str) -> None:
        if node not in self._taken:
            heapq.heappush(self._heap, (self._due[node], node))
            self._changed.set()

    def _next(self) -> float | None:
        """Return the seconds until the first node is due; None, if there is none."""
        while self._heap:
            due, node = self._heap[0]
            if self._due.get(node) == due and node not in self._taken:
                return due - time.monotonic()
            heapq.heappop(self._heap)
        return None
