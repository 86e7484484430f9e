"""Publishing of volumes that waits for what another pod offers.

No container of a pod starts before its volumes are published. What has waited too long has left nothing behind, and
kubelet asks again.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from errno import EAGAIN, ENOENT

from fusermount3_broker.messages.refusal import Refusal

#: Seconds for which a volume waits. The plugin waits 60 for the answer, kubelet 120.
LONGEST_WAIT = 50.0
#: Seconds after which a volume is tried again without news.
LOOK_AGAIN = 5.0


class Wait:
    """A publish that waits; it `is_over` if the volume was unpublished meanwhile."""

    is_over = False


class WaitingVolumes:
    """Volumes that wait. For use in a running event loop."""

    def __init__(self) -> None:
        #: Set, and replaced, when there may be something for those who wait.
        self._news = asyncio.Event()
        self._waits: dict[bytes, list[Wait]] = {}

    def tell(self) -> None:
        """Have all that wait try again."""
        self._news.set()
        self._news = asyncio.Event()

    def forget(self, target: bytes) -> None:
        """The volume at that target is being removed."""
        for wait in self._waits.get(target, ()):
            wait.is_over = True
        self.tell()

    async def publish(
        self, target: bytes, attempt: Callable[[Wait], Awaitable[str]], problem: Callable[[], bytes]
    ) -> str:
        """Return the result of the first `attempt` that doesn't raise Refusal with ENOENT.

        Raises Refusal: EAGAIN, with the `problem`, if none has succeeded in time.
        """
        wait = Wait()
        self._waits.setdefault(target, []).append(wait)
        try:
            return await self._publish(wait, attempt, problem)
        finally:
            self._waits[target].remove(wait)
            if not self._waits[target]:
                del self._waits[target]

    async def _publish(
        self, wait: Wait, attempt: Callable[[Wait], Awaitable[str]], problem: Callable[[], bytes]
    ) -> str:
        give_up = time.monotonic() + LONGEST_WAIT
        while True:
            news = self._news
            try:
                return await attempt(wait)
            except Refusal as refusal:
                if refusal.errno != ENOENT:
                    raise
            left = give_up - time.monotonic()
            if left <= 0 or wait.is_over:
                raise not_ready(problem())
            with suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), min(left, LOOK_AGAIN))


def not_ready(why: bytes) -> Refusal:
    """Return the refusal of a volume whose mount pod offers nothing yet."""
    return Refusal(EAGAIN, b"its mount pod is not ready: %b" % why)
