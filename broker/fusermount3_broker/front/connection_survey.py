"""Surveys by a child of the mounter: how many requests wait in each connection, and whether its process still serves
it.

No code here accesses a FUSE filesystem, or looks at any process but those known to serve a mount.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from fusermount3_broker.front.context import Front
from fusermount3_broker.front.model import Device, Mount
from fusermount3_broker.front.mounter_client import MounterFailed, OperationEnded, OperationFailed, OperationRefused
from fusermount3_broker.messages.mounter import StartSurvey, Surveyed

#: The most connections in one survey: a line for each must fit into a record.
MOST_SURVEYED = 1000
#: Seconds that a query for the state of mounts waits for the mounter's answer.
PATIENCE = 1.0


class Seen(NamedTuple):
    """How many requests wait in a connection, and whether the known process still serves it."""

    waiting: int
    served: bool


def _by_nobody(_: Mount) -> tuple[int, int]:
    return 0, 0


async def refresh(front: Front) -> None:
    """Update how many requests wait in connections, as far as the mounter answers within `PATIENCE`.

    If there are very many connections, survey only some: first those with waiting requests, then those never surveyed.
    """
    states = front.states
    mounts = sorted(
        front.registry, key=lambda each: (not states.waiting(each.connection), states.knows(each.connection))
    )
    try:
        async with asyncio.timeout(PATIENCE):
            await ask(front, mounts[:MOST_SURVEYED])
    except TimeoutError:
        pass


async def ask(
    front: Front, mounts: Collection[Mount], server_of: Callable[[Mount], tuple[int, int]] = _by_nobody
) -> dict[Device, Seen]:
    """Survey these mounts, at most `MOST_SURVEYED`, record how many requests wait, and return the results.

    `server_of` returns the process that served each mount, and its descriptor. Mounts that the mounter doesn't report
    are missing from the result.
    """
    if not mounts:
        return {}
    lines = b"".join(b"%d %d %d %d\n" % (each.device, each.connection, *server_of(each)) for each in mounts)
    start = StartSurvey(front.configuration.deadlines.operation, lines)
    try:
        with await front.mounter.begin(start, []) as operation:
            surveyed = await operation.expect(Surveyed)
    except (MounterFailed, OperationFailed, OperationRefused, OperationEnded):
        return {}
    now = time.monotonic()
    told: dict[Device, Seen] = {}
    for line in surveyed.connections.splitlines():
        device, waiting, served = map(int, line.split())
        told[Device(device)] = Seen(waiting, bool(served))
    for mount in mounts:
        if seen := told.get(mount.device):
            front.states.note(mount.connection, seen.waiting, now)
    return told
