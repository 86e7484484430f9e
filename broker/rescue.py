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


async def abort(front: Front, mount: Mount, unmoved: int, reason: str) -> None:
    """Abort the connection of `mount` once nothing has moved in it for so many seconds, 0: at once.

    Raises OperationFailed (ENOENT: it is gone), OperationEnded, MounterFailed.
    """
    start = StartAbort(front.configuration.deadlines.operation, mount.device, mount.connection, unmoved)
    with front.mounter.begin(start, []) as operation:
        said = await (operation.hear_at_last() if unmoved else operation.hear())
    if not isinstance(said, Aborted):
        raise OperationEnded
    front.health.note_aborted(mount.connection)
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
    guard = asyncio.create_task(_abort_if_hung(front, mount, grace))
    try:
        yield guard
    finally:
        guard.cancel()
        await asyncio.wait([guard])


async def _abort_if_hung(front: Front, mount: Mount, grace: float) -> None:
    await asyncio.sleep(grace)
    with suppress(MounterFailed, OperationFailed, OperationRefused, OperationEnded):
        await abort(front, mount, front.configuration.deadlines.unmount, "its program hangs, and somebody waits for it")


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
        async with aborted_if_hung(front, mount, 0) if mount else nullcontext():
            await operation.ended()


def own(front: Front, entering: Entering | None) -> Mount | None:
    """Return the mount that the child enters, if the broker made it, and the caller might unmount it."""
    mount = front.registry.find(Device(entering.device)) if entering else None
    if mount is None or entering is None or mount.namespace != entering.mount_namespace:
        return None
    return mount if entering.uid in (0, mount.uid) else None
