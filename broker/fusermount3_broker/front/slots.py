"""Slots for concurrent operations of the mounter, distributed so that no account can take them all.

An account may have a share of the slots. It gets its first slot if any is free, and another one only if at least three
times as many are free as it would then have. So an account that takes all it can leaves three quarters of the slots
that it found free to others: of 64 slots, 14 accounts get one at once even if none gives any back. The next free slot
goes to the waiting account that has the fewest.

A slot stays taken until the mounter's child has ended. A child that is stuck on its own caller's filesystem keeps
costing that caller's account, and no other.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Coroutine
from typing import Any

from fusermount3_broker.front.decisions.limits import AccountName
from fusermount3_broker.front.mounter_client import Operation


class Slots:
    """`total` slots, of which one account may have `share` at a time."""

    def __init__(self, total: int, share: int) -> None:
        self._total = self._free = total
        self._share = share
        self._taken: Counter[AccountName] = Counter()
        self._waiting: dict[AccountName, deque[asyncio.Future[None]]] = {}
        #: Tasks that wait for the end of a child, with the time at which they began.
        self._ending: dict[asyncio.Task[None], float] = {}

    @property
    def in_use(self) -> int:
        """How many slots all accounts have taken."""
        return self._total - self._free

    def stuck(self, seconds: float) -> int:
        """Return how many slots are taken only by children that outlive their operations by over `seconds`."""
        now = time.monotonic()
        return sum(now - since > seconds for since in self._ending.values())

    def taken(self, account: AccountName) -> int:
        return self._taken[account]

    async def take(self, account: AccountName, seconds: float) -> None:
        """Take a slot until `give_back`; wait up to `seconds` for it. Raises TimeoutError."""
        if account not in self._waiting and self._may_take(account):
            self._take(account)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(account, deque()).append(turn)
        try:
            async with asyncio.timeout(seconds):
                await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # the turn came at the same moment
                self.give_back(account)
            else:
                self._leave(account, turn)
            raise

    def give_back(self, account: AccountName) -> None:
        self._free += 1
        self._taken[account] -= 1
        if not self._taken[account]:
            del self._taken[account]
        while waiting := [each for each in self._waiting if self._may_take(each)]:
            self._next(min(waiting, key=self.taken))

    def give_back_after(
        self, account: AccountName, operation: Operation, ended: Coroutine[Any, Any, None] | None = None
    ) -> None:
        """Hang up on the operation, and give its slot back when its child has `ended`."""
        operation.hang_up()
        self.take_until(account, ended or operation.ended(), operation)

    def take_until(
        self, account: AccountName, ended: Coroutine[Any, Any, None], operation: Operation | None = None
    ) -> None:
        """Close the operation and give its slot back when `ended` returns; without an operation, take a slot first."""
        if operation is None:
            self._take(account)
        child = asyncio.get_running_loop().create_task(ended)
        self._ending[child] = time.monotonic()
        child.add_done_callback(lambda _: self._child_ended(account, operation, child))

    def _child_ended(self, account: AccountName, operation: Operation | None, child: "asyncio.Task[None]") -> None:
        if operation:
            operation.close()
        del self._ending[child]
        self.give_back(account)

    def _may_take(self, account: AccountName) -> bool:
        taken = self.taken(account)
        return taken < min(self._share, self._free // 3) or (not taken and self._free > 0)

    def _take(self, account: AccountName) -> None:
        self._free -= 1
        self._taken[account] += 1

    def _next(self, account: AccountName) -> None:
        """Give a slot to the turn of this account that has waited longest."""
        turn = self._waiting[account][0]
        self._leave(account, turn)
        if not turn.cancelled():
            self._take(account)
            turn.set_result(None)

    def _leave(self, account: AccountName, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(account, deque())
        if turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[account]
