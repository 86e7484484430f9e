"""Mounts of a broker before this one, where fusectl is another than it was then.

A connection is known by the inode of its directory in fusectl, and those inodes end with the last who has fusectl: if
it is mounted nowhere and nobody keeps a descriptor of it, as systemd does, that is the broker itself. Its mounts live
on. So each mount is also known by its unique id, for which a child of the mounter asks in the mount's own namespace.
"""

import asyncio
from collections import defaultdict
from errno import ESRCH

from broker import log
from broker.front import Front
from broker.operations import MounterFailed, OperationEnded, OperationFailed, OperationRefused
from broker.plan import Recognized, StartRecognize
from broker.registry import Device, Mount, MountNamespace

#: Children that look at the same time.
_AT_ONCE = 8
#: How many mounts one child is asked for: a line of each has to fit into a record.
_MOST_ASKED = 1000


async def recognize(front: Front) -> None:
    """Decide which of the mounts are still there of which fusectl does not tell any more.

    Those of a namespace of which nothing can be learned stay undecided, for the front that comes next.
    """
    namespaces: dict[MountNamespace, list[Mount]] = defaultdict(list)
    for mount in front.registry.unsure.values():
        namespaces[mount.namespace].append(mount)
    if not namespaces:
        return
    turns = asyncio.Semaphore(_AT_ONCE)

    async def decide(namespace: MountNamespace, mounts: list[Mount]) -> int:
        async with turns:
            there = await _ask(front, namespace, mounts)
        if there is None:
            return 0
        for mount in mounts:
            front.registry.decide(mount, mount.device in there)
        return len(there)

    batches = [
        decide(namespace, mounts[begin : begin + _MOST_ASKED])
        for namespace, mounts in namespaces.items()
        for begin in range(0, len(mounts), _MOST_ASKED)
    ]
    recognized = sum(await asyncio.gather(*batches))
    undecided = len(front.registry.unsure)
    if not recognized and not undecided:  # mostly their numbers are others' now, in the same fusectl
        return
    gone = sum(map(len, namespaces.values())) - recognized - undecided
    priority = log.WARNING if undecided else log.NOTICE
    front.log(priority, "fusectl is another than before", recognized=recognized, gone=gone, undecided=undecided)


async def _ask(front: Front, namespace: MountNamespace, mounts: list[Mount]) -> set[Device] | None:
    """Return the devices of those of the mounts that are in the namespace, none if nobody is in it any more; None if
    there was no answer."""
    lines = b"".join(b"%d %d\n" % (mount.device, mount.mount_id) for mount in mounts)
    start = StartRecognize(front.configuration.deadlines.operation, namespace, lines)
    try:
        with await front.mounter.begin(start, []) as operation:
            said = await operation.expect(Recognized)
    except OperationFailed as error:
        return set() if error.errno == ESRCH else None
    except (MounterFailed, OperationEnded, OperationRefused):
        return None
    return {Device(int(line)) for line in said.devices.splitlines()}
