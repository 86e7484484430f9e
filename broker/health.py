"""Whether the broker could serve a caller now: the front is not ending, and a child of the mounter answers.

One check is under way at a time, however many ask: a mounter that is stuck must not find a queue of them when it goes
on. Who asks then waits for that one, and a good second at most.
"""

import asyncio
import os

from broker.operations import Mounter, MounterFailed, OperationEnded, OperationFailed, OperationRefused
from broker.plan import Checked, StartCheck

#: Seconds in which a healthy mounter answers.
PATIENCE = 1.0
#: Seconds for which an answer counts.
FRESH = 1.0
#: Seconds after which a check that found no answer is given up, and the next one may begin.
GIVE_UP = 60


class Health:
    """The health of the broker. `stopping` is set when it ends."""

    def __init__(self, mounter: Mounter, stopping: asyncio.Event) -> None:
        self._mounter = mounter
        self._stopping = stopping
        self._check: asyncio.Task[str] | None = None
        self._answered_at = 0.0

    async def problem(self) -> str:
        """Return why the broker can't serve, in at most `PATIENCE` seconds; empty if it can."""
        if self._stopping.is_set():
            return "the broker is ending"
        now = asyncio.get_running_loop().time()
        if self._check is None or (self._check.done() and now - self._answered_at > FRESH):
            self._check = asyncio.create_task(self._ask())
        check = self._check
        await asyncio.wait([check], timeout=PATIENCE)
        return check.result() if check.done() else f"the mounter gave no answer within {PATIENCE:.0f} s"

    def close(self) -> None:
        if self._check is not None:
            self._check.cancel()

    async def _ask(self) -> str:
        """Return why the mounter can't mount; empty if it can."""
        try:
            with await self._mounter.begin(StartCheck(seconds=1), []) as operation:
                answer = await operation.hear(GIVE_UP)
            return "" if isinstance(answer, Checked) else "the mounter said something else"
        except MounterFailed as error:
            return str(error)
        except OperationFailed as error:
            return f"the mounter can't {error.step}: {os.strerror(error.errno)}"
        except (OperationEnded, OperationRefused):
            return "the mounter ended without an answer"
        finally:
            self._answered_at = asyncio.get_running_loop().time()
