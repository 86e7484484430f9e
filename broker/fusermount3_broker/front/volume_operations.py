"""The mounter's operations on volumes, for kubelet: one after the other for a volume, few at once for a pod.

Limits don't apply to kubelet, but each pod may occupy only so many children of the mounter, because its filesystems may
block them.

A machine that starts a hundred pods at once is slow. So what waits for no FUSE program has much time; and a child that
was too slow has ended before the next operation on its volume begins: else that would find what the child is about to
take away.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from errno import EAGAIN, EIO, ETIMEDOUT
from weakref import WeakValueDictionary

from fusermount3_broker.front.context import Front
from fusermount3_broker.front.decisions.limits import AccountName
from fusermount3_broker.front.model import Volume
from fusermount3_broker.front.mounter_client import (
    MounterFailed,
    Operation,
    OperationEnded,
    OperationFailed,
    OperationRefused,
)
from fusermount3_broker.front.slots import Slots
from fusermount3_broker.messages.mounter import Start, StartStat
from fusermount3_broker.messages.refusal import Refusal
from fusermount3_broker.service import log

#: Concurrent operations of the mounter for kubelet: for all pods, and for one pod.
_AT_ONCE, _FOR_A_POD = 32, 8
#: Seconds for which an operation waits for a slot of its pod.
_PATIENCE = 60
#: Seconds for each step of an operation that waits for no FUSE program. kubelet waits 120 for its request.
_STEP = 30
#: Seconds for which the end of a child is waited for that has not answered in time: it may end its step, and undo it.
_END = 30


class VolumeOperations:
    """Starts operations, in a running event loop."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._slots = Slots(_AT_ONCE, _FOR_A_POD)
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    @property
    def seconds(self) -> int:
        """Seconds for each step of an operation that may wait for a FUSE program."""
        return self._front.configuration.deadlines.operation

    @property
    def publish_seconds(self) -> int:
        """Seconds for each step of an operation that waits for none."""
        return max(_STEP, self.seconds)

    def lock(self, target: bytes) -> asyncio.Lock:
        """Return the lock of that target, which exists as long as an operation refers to it."""
        return self._locks.setdefault(target, asyncio.Lock())

    @asynccontextmanager
    async def begin(
        self, prefix: bytes, volume: Volume | None, start: Start, *descriptors: int
    ) -> AsyncIterator[Operation]:
        """Start an operation of the mounter, with these descriptors, once a slot is free. Failures are raised as
        Refusal with `prefix`; once a child that changes something has ended, unless it blocks.
        """
        account = AccountName(f"pod {volume.pod}" if volume else "pod")
        try:
            await self._slots.take(account, _PATIENCE)
        except TimeoutError:
            raise Refusal(EAGAIN, b"%b: too many operations of this pod are under way" % prefix) from None
        try:
            operation = await self._begin(start, account, *descriptors)
        except MounterFailed as error:
            self._front.log(log.ERROR, str(error))
            raise Refusal(EAGAIN, b"%b: the broker's mounter takes no requests" % prefix) from None
        begun = time.monotonic()
        try:
            yield operation
        except OperationFailed as error:
            text = f"{error.step}: {os.strerror(error.errno)}".encode()
            raise Refusal(error.errno, b"%b: %b" % (prefix, text)) from None
        except (OperationEnded, OperationRefused):
            late = time.monotonic() - begun > 0.9  # its alarm has ended it if it took that long
            problem = ETIMEDOUT if late else EIO
            if not isinstance(start, StartStat):
                await _ended(operation)
            raise Refusal(problem, b"%b: %b" % (prefix, os.strerror(problem).encode())) from None
        finally:
            self._slots.give_back_after(account, operation)

    async def _begin(self, start: Start, account: AccountName, *descriptors: int) -> Operation:
        """Start an operation in the account's slot; give the slot back if that fails. Raises MounterFailed."""
        try:
            return await self._front.mounter.begin(start, [*descriptors])
        except BaseException:
            self._slots.give_back(account)
            raise


async def _ended(operation: Operation) -> None:
    """Have the operation end, and wait until its child has."""
    operation.hang_up()
    with suppress(TimeoutError):
        async with asyncio.timeout(_END):
            await operation.ended()
