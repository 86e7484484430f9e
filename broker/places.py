"""Places for what the mounter does at the same time, shared out so that nobody can take them all.

An account may have a share of the places, and leaves at least as many free as it has; the next place is for the one
of those who wait that has the fewest. So who comes next mostly finds a place, and is the first to get one otherwise.

A place is taken until the mounter's child has ended. One that is stuck, on its own caller's filesystem, goes on costing
that caller, and nobody else.
"""

import asyncio
from collections import Counter, deque

from broker.limits import AccountName
from broker.operations import Operation


class Places:
    """`total` places, of which one account may have `share` at a time."""

    def __init__(self, total: int, share: int) -> None:
        self._free = total
        self._share = share
        self._taken: Counter[AccountName] = Counter()
        self._waiting: dict[AccountName, deque[asyncio.Future[None]]] = {}
        self._children: set[asyncio.Task[None]] = set()

    def taken(self, account: AccountName) -> int:
        return self._taken[account]

    async def take(self, account: AccountName, seconds: float) -> None:
        """Take a place, until `give_back`; wait for it if need be. Raises TimeoutError."""
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

    def give_back_after(self, account: AccountName, operation: Operation) -> None:
        """Hang up on the operation, and give its place back when its child has ended."""
        operation.hang_up()
        child = asyncio.get_running_loop().create_task(operation.ended())
        self._children.add(child)
        child.add_done_callback(lambda _: self._child_ended(account, operation, child))

    def _child_ended(self, account: AccountName, operation: Operation, child: "asyncio.Task[None]") -> None:
        operation.close()
        self._children.discard(child)
        self.give_back(account)

    def _may_take(self, account: AccountName) -> bool:
        return self.taken(account) < min(self._share, self._free)

    def _take(self, account: AccountName) -> None:
        self._free -= 1
        self._taken[account] += 1

    def _next(self, account: AccountName) -> None:
        """Give a place to whom of this account has waited longest."""
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
