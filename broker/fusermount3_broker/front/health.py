"""The health of the broker: whether the front is not stopping, a child of the mounter answers, and the tables can be
written.

Only one check runs at a time, however many clients ask: a mounter that was stuck must not find a queue of checks when
it continues. Clients that ask meanwhile wait for that check, little more than a second at most.
"""

import asyncio
import os

from fusermount3_broker.front.context import Front
from fusermount3_broker.front.mounter_client import MounterFailed, OperationEnded, OperationFailed, OperationRefused
from fusermount3_broker.messages.mounter import Checked, StartCheck

#: Seconds in which a healthy mounter answers.
PATIENCE = 1.0
#: Seconds for which an answer is valid.
FRESH = 1.0
#: Seconds after which a check without an answer is abandoned, so that the next one may begin.
GIVE_UP = 60


class Health:
    """The health of the broker. `stopping` is set when the broker stops."""

    def __init__(self, front: Front, stopping: asyncio.Event) -> None:
        self._front = front
        self._stopping = stopping
        self._check: asyncio.Task[str] | None = None
        self._answered_at = 0.0

    async def problem(self) -> str:
        """Return why the broker can't serve all callers, within `PATIENCE` seconds, or an empty string if it can."""
        return await self.process_problem() or "; ".join(filter(None, (table.problem for table in self._front.tables)))

    async def process_problem(self) -> str:
        """As `problem`, but only problems that a restart of the broker may solve: it doesn't solve a full disk."""
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
        """Return why the mounter can't mount, or an empty string if it can."""
        try:
            with await self._front.mounter.begin(StartCheck(seconds=1), []) as operation:
                answer = await operation.hear(GIVE_UP)
            return "" if isinstance(answer, Checked) else "the mounter gave an unexpected answer"
        except MounterFailed as error:
            return str(error)
        except OperationFailed as error:
            return f"the mounter can't {error.step}: {os.strerror(error.errno)}"
        except (OperationEnded, OperationRefused):
            return "the mounter ended without an answer"
        finally:
            self._answered_at = asyncio.get_running_loop().time()
