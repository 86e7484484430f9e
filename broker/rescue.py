"""The way out for who is blocked by a FUSE program that does not answer: the connection is aborted.

Unmounting may block in the kernel, and so may everything that the mounter does at a mountpoint inside a FUSE
filesystem. If the program has read the request, not even SIGKILL ends that. Another child of the mounter then looks at
the number of requests that wait in the connection, and aborts it when that has not moved for `deadlines.unmount`; as
long as it moves, the program is only slow. Nothing is aborted but what the broker has mounted, for the caller or the
mount namespace that is concerned; where a child blocks on something else, it is waited for.

Linux 6.18 aborts an ordinary FUSE filesystem by itself when its last mount goes, and does not send FUSE_DESTROY. So
what blocks there is mostly a path that leads through a FUSE filesystem.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress

from broker import log
from broker.front import Front
from broker.operations import MounterFailed, Operation, OperationEnded, OperationFailed, OperationRefused
from broker.plan import Aborted, Entering, Record, StartAbort, Unmounted
from broker.registry import Device, Mount

#: Seconds after which an unmount seems to block; any other is over long before.
GRACE = 0.2
#: The most seconds that are waited to hear whether something was aborted, when that is not needed any more.
LAST_WORD = 1.0


async def abort(front: Front, mount: Mount, reason: str) -> None:
    """Abort the connection of `mount`. Raises OperationFailed (ENOENT: it is gone), OperationEnded, MounterFailed."""
    with await _begin(front, mount, 0) as operation:
        await operation.expect(Aborted)
    _note_aborted(front, mount, reason)


async def _begin(front: Front, mount: Mount, unmoved: int) -> Operation:
    seconds = front.configuration.deadlines.operation
    return await front.mounter.begin(StartAbort(seconds, mount.device, mount.connection, unmoved), [])


def _note_aborted(front: Front, mount: Mount, reason: str) -> None:
    front.states.note_aborted(mount.connection)
    front.requests["abort aborted"] += 1
    front.log(
        log.NOTICE,
        f"aborted a FUSE connection: {reason}",
        request_id=mount.request,
        mountpoint=mount.mountpoint,
        caller_container=mount.container,
        device=mount.device,
    )


@asynccontextmanager
async def aborted_if_hung(front: Front, mount: Mount, grace: float = GRACE) -> AsyncIterator[asyncio.Task[None]]:
    """While the block runs, which waits for `mount`, abort its connection if it hangs. Gives the task that does."""
    over = asyncio.Event()
    guard = asyncio.create_task(_abort_if_hung(front, mount, grace, over))
    try:
        yield guard
    finally:
        over.set()
        await asyncio.wait([guard], timeout=LAST_WORD)
        guard.cancel()


async def _abort_if_hung(front: Front, mount: Mount, grace: float, over: asyncio.Event) -> None:
    """Abort it after `grace` seconds, if it hangs then, and if that comes before `over`."""
    try:
        await asyncio.wait_for(over.wait(), grace)
    except TimeoutError:
        with suppress(MounterFailed, OperationFailed, OperationRefused, OperationEnded):
            with await _begin(front, mount, front.configuration.deadlines.unmount) as operation:
                await _hear_before(over, operation)
            _note_aborted(front, mount, "its program hangs, and somebody waits for it")


async def _hear_before(over: asyncio.Event, operation: Operation) -> None:
    """Return when the connection is aborted. Raises OperationFailed, and OperationEnded if it was `over` before."""
    said = asyncio.create_task(operation.hear_at_last())
    calling_off = asyncio.create_task(over.wait())
    try:
        await asyncio.wait([said, calling_off], return_when=asyncio.FIRST_COMPLETED)
        operation.hang_up()
        await asyncio.wait([said])  # what has been aborted by now is told all the same
        if not isinstance(said.result(), Aborted):
            raise OperationEnded
    finally:
        said.cancel()
        calling_off.cancel()
        await asyncio.wait([said, calling_off])


async def unmounted(front: Front, operation: Operation, mount: Mount) -> None:
    """Return when the child has unmounted `mount`, however slow its program is. Raises what `Operation.hear` does."""
    said = asyncio.create_task(operation.hear_at_last())
    try:
        await asyncio.wait([said], timeout=GRACE)
        if not said.done():
            await _wait_for_word(front, operation, mount, said)
        record = said.result()
    except OperationEnded:  # by its alarm, which it gets to see when the kernel is done
        if operation.stuck or not _is_gone(front, mount):
            raise
    else:
        if not isinstance(record, Unmounted):
            raise OperationEnded
    finally:
        said.cancel()
        await asyncio.wait([said])


async def _wait_for_word(front: Front, operation: Operation, mount: Mount, said: asyncio.Task[Record]) -> None:
    """Wait until the child has said something, while `mount` moves, and a little longer. Raises OperationEnded."""
    async with aborted_if_hung(front, mount, 0) as guard:
        await asyncio.wait([said, guard], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait([said], timeout=operation.patience)
    if not said.done():
        operation.give_up()
        raise OperationEnded


def _is_gone(front: Front, mount: Mount) -> bool:
    current = front.registry.find(mount.device)
    return current is None or current.connection != mount.connection


def leave(front: Front, operation: Operation, mount: Mount | None) -> None:
    """Have somebody wait until the child of `operation` has ended that could not be killed.

    Meanwhile the connection is aborted that keeps it, if that is known and `mount`.
    """
    task = asyncio.create_task(_wait_for_end(front, operation.remains(), mount))
    front.stuck.add(task)
    task.add_done_callback(front.stuck.discard)


async def _wait_for_end(front: Front, operation: Operation, mount: Mount | None) -> None:
    with operation:
        operation.hang_up()
        async with aborted_if_hung(front, mount, 0) if mount else nullcontext():
            await operation.ended()


def own(front: Front, entering: Entering | None) -> Mount | None:
    """Return the mount that the child enters, if the broker made it, and the caller might unmount it."""
    mount = front.registry.find(Device(entering.device)) if entering else None
    if mount is None or entering is None or mount.namespace != entering.mount_namespace:
        return None
    return mount if entering.uid in (0, mount.uid) else None
