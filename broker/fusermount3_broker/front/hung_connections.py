"""Abort of hung FUSE connections, to release the operations that their FUSE program blocks.

Unmounting may block in the kernel, and so may everything that the mounter does at a mountpoint inside a FUSE
filesystem. If the FUSE program has read the request, not even SIGKILL ends that. Another child of the mounter then
watches the number of requests that wait in the connection, and aborts the connection when that number has not moved for
`deadlines.unmount`; as long as it moves, the program is only slow. The broker aborts only connections of its own
mounts, which belong to the caller or the mount namespace concerned; if a child blocks on anything else, the broker
waits for it.

Linux 6.18 aborts an ordinary FUSE filesystem by itself when its last mount goes, and does not send FUSE_DESTROY. So
what blocks there is usually a path that leads through a FUSE filesystem.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress

from fusermount3_broker.front.context import Front
from fusermount3_broker.front.model import Device, Mount
from fusermount3_broker.front.mounter_client import (
    MounterFailed,
    Operation,
    OperationEnded,
    OperationFailed,
    OperationRefused,
)
from fusermount3_broker.messages.mounter import Aborted, Entering, Record, StartAbort, Unmounted
from fusermount3_broker.service import log

#: Seconds after which an unmount seems to block; any other unmount finishes long before.
GRACE = 0.2
#: The most seconds to wait for a result of the abort when it is not needed any more.
LAST_WORD = 1.0
#: Seconds to wait for a slot, unless the operation is over before.
_LONG = 3600.0


async def abort(front: Front, mount: Mount, reason: str) -> None:
    """Abort the connection of `mount`. Raises OperationFailed (ENOENT: it is gone), OperationEnded, MounterFailed."""
    with await _begin(front, mount, 0) as operation:
        await operation.expect(Aborted)
    _note_aborted(front, mount, reason)


async def _begin(front: Front, mount: Mount, unmoved: int) -> Operation:
    seconds = front.configuration.deadlines.operation
    return await front.mounter.begin(StartAbort(seconds, mount.device, mount.connection, unmoved), [])


def _note_aborted(front: Front, mount: Mount, reason: str) -> None:
    front.states.note_dead(mount.connection)
    front.serving.suspect(mount, time.monotonic())
    front.requests["abort aborted"] += 1
    front.log(
        log.NOTICE,
        f"aborted a FUSE connection: {reason}",
        request_id=mount.request_id,
        mountpoint=mount.mountpoint,
        caller_container=mount.container,
        device=mount.device,
    )


@asynccontextmanager
async def aborted_if_hung(front: Front, mount: Mount, grace: float = GRACE) -> AsyncIterator[asyncio.Task[None]]:
    """Abort the connection of `mount` if it hangs while the block, which waits for `mount`, runs. Yield the task that
    does."""
    over = asyncio.Event()
    guard = asyncio.create_task(_abort_if_hung(front, mount, grace, over))
    try:
        yield guard
    finally:
        over.set()
        await asyncio.wait([guard], timeout=LAST_WORD)
        guard.cancel()


async def _abort_if_hung(front: Front, mount: Mount, grace: float, over: asyncio.Event) -> None:
    """Abort the connection if it hangs after `grace` seconds, unless `over` is set before."""
    try:
        await asyncio.wait_for(over.wait(), grace)
    except TimeoutError:
        with suppress(MounterFailed, OperationFailed, OperationRefused, OperationEnded):
            async with _slot(front, mount, over):
                with await _begin(front, mount, front.configuration.deadlines.unmount) as operation:
                    await _await_aborted(over, operation)
            _note_aborted(front, mount, "its FUSE program hangs, and a process waits for it")


@asynccontextmanager
async def _slot(front: Front, mount: Mount, over: asyncio.Event) -> AsyncIterator[None]:
    """Hold one of the slots for children that look at a connection; raise OperationEnded if `over` is set before one is
    free.

    An account with many hung filesystems doesn't prevent looks at those of others.
    """
    slots = front.rescue_slots
    taking = asyncio.create_task(slots.take(mount.account, _LONG))
    calling_off = asyncio.create_task(over.wait())
    try:
        await asyncio.wait([taking, calling_off], return_when=asyncio.FIRST_COMPLETED)
        if not taking.done():
            raise OperationEnded
        yield
    finally:
        calling_off.cancel()
        taking.cancel()
        await asyncio.wait([taking, calling_off])
        if not taking.cancelled() and not taking.exception():
            slots.give_back(mount.account)


async def _await_aborted(over: asyncio.Event, operation: Operation) -> None:
    """Return when the connection is aborted. Raises OperationFailed, or OperationEnded if `over` is set before."""
    said = asyncio.create_task(operation.hear_without_limit())
    calling_off = asyncio.create_task(over.wait())
    try:
        await asyncio.wait([said, calling_off], return_when=asyncio.FIRST_COMPLETED)
        operation.hang_up()
        await asyncio.wait([said])  # an abort that has happened by now is still reported
        if not isinstance(said.result(), Aborted):
            raise OperationEnded
    finally:
        said.cancel()
        calling_off.cancel()
        await asyncio.wait([said, calling_off])


async def unmounted(front: Front, operation: Operation, mount: Mount) -> None:
    """Return when the child has unmounted `mount`, however slow its FUSE program is. Raises as `Operation.hear`
    does."""
    said = asyncio.create_task(operation.hear_without_limit())
    try:
        await asyncio.wait([said], timeout=GRACE)
        if not said.done():
            await _wait_for_word(front, operation, mount, said)
        record = said.result()
    except OperationEnded:  # killed by its alarm, which takes effect when the kernel is done
        if operation.stuck or not _is_gone(front, mount):
            raise
    else:
        if not isinstance(record, Unmounted):
            raise OperationEnded
    finally:
        said.cancel()
        await asyncio.wait([said])


async def _wait_for_word(front: Front, operation: Operation, mount: Mount, said: asyncio.Task[Record]) -> None:
    """Wait for the child's next record while the requests of `mount` move, and a little longer. Raises
    OperationEnded."""
    async with aborted_if_hung(front, mount, 0) as guard:
        await asyncio.wait([said, guard], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait([said], timeout=operation.patience)
    if not said.done():
        operation.give_up()
        raise OperationEnded


def _is_gone(front: Front, mount: Mount) -> bool:
    current = front.registry.find(mount.device)
    return current is None or current.connection != mount.connection


def leave(front: Front, operation: Operation, mount: Mount | None) -> asyncio.Task[None]:
    """Start a task that waits for the end of `operation`'s child, which could not be killed; return the task.

    Meanwhile, abort the connection that holds the child, if it is known (`mount`) and hangs.
    """
    task = asyncio.create_task(_wait_for_end(front, operation.second_handle(), mount))
    front.stuck.add(task)
    task.add_done_callback(front.stuck.discard)
    return task


async def _wait_for_end(front: Front, operation: Operation, mount: Mount | None) -> None:
    with operation:
        operation.hang_up()
        async with aborted_if_hung(front, mount, 0) if mount else nullcontext():
            await operation.ended()


async def ended(front: Front, operation: Operation) -> None:
    """Return when the child has ended, after the front has finished with it.

    If it does not end in the time of a step, abort the connection that it has announced to enter, if that hangs and is
    the caller's own.
    """
    ending = asyncio.create_task(operation.ended())
    try:
        seconds = GRACE if operation.stuck else front.configuration.deadlines.operation + GRACE
        await asyncio.wait([ending], timeout=seconds)
        mount = None if ending.done() else own(front, operation.entering)
        async with aborted_if_hung(front, mount, 0) if mount else nullcontext():
            await ending
    finally:
        ending.cancel()


def own(front: Front, entering: Entering | None) -> Mount | None:
    """Return the mount that the child enters, if the broker made it and the caller may unmount it."""
    mount = front.registry.find(Device(entering.device)) if entering else None
    if mount is None or entering is None or mount.namespace != entering.mount_namespace:
        return None
    return mount if entering.uid in (0, mount.uid) else None
