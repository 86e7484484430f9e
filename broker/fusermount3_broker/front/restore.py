"""Mounts of an earlier broker, when fusectl is not the same instance any more.

A connection is identified by the inode of its directory in fusectl, and those inodes end with the last user of fusectl:
if it is mounted nowhere and no other process, such as systemd, keeps a descriptor of it, that is the broker itself. Its
mounts live on. So each mount is also identified by its unique ID, which a child of the mounter looks up in the mount's
own namespace. The filesystem of a volume may be left only at the volume's target: the caller's namespace has ended with
its container, or that of an eager mount with the earlier broker's. At the target, only the broker mounts, and what it
mounts there is in the table. So a filesystem there with the mount's device number is that mount.

A dead filesystem of a volume is not even there: a tombstone has its place, and only containers still have it. There, a
FUSE filesystem with the mount's device number, type and source is taken for that mount. It could be another one only if
the dead one has ended since, and a program in the pod has then mounted by itself, under the same names, and has got the
same number. In that case, the volume's next filesystem takes its place in that container.
"""

import asyncio
from collections import defaultdict

from fusermount3_broker.front.context import Front
from fusermount3_broker.front.model import Device, Mount, MountNamespace
from fusermount3_broker.front.mounter_client import MounterFailed, OperationEnded, OperationFailed, OperationRefused
from fusermount3_broker.messages.mounter import NobodyThere, Recognized, StartRecognize, StartRecognizeVolume
from fusermount3_broker.service import log

#: Children that look for mounts at the same time.
_AT_ONCE = 8
#: The most mounts for one child: a line for each must fit into a record.
_MOST_ASKED = 1000


async def recognize(front: Front) -> None:
    """Decide which mounts still exist when fusectl can't tell any more.

    The mounts of a namespace or volume that the mounter can't inspect stay undecided, for the next front.
    """
    unsure = list(front.registry.unsure.values())
    if not unsure:
        return
    turns = asyncio.Semaphore(_AT_ONCE)
    namespaces: dict[MountNamespace, list[Mount]] = defaultdict(list)

    async def decide_at_volume(mount: Mount) -> int:
        async with turns:
            there = await _ask_at_volume(front, mount)
        if there:
            front.registry.decide([mount], there)
        elif there is not None:
            namespaces[mount.namespace].append(mount)
        return len(there or ())

    recognized = sum(await asyncio.gather(*(decide_at_volume(mount) for mount in unsure if mount.volume)))
    for mount in unsure:
        if not mount.volume:
            namespaces[mount.namespace].append(mount)

    async def decide(namespace: MountNamespace, mounts: list[Mount]) -> int:
        async with turns:
            there = await _ask(front, namespace, mounts)
        if there is None:
            return 0
        front.registry.decide(mounts, there)
        return len(there)

    batches = [
        decide(namespace, mounts[begin : begin + _MOST_ASKED])
        for namespace, mounts in namespaces.items()
        for begin in range(0, len(mounts), _MOST_ASKED)
    ]
    recognized += sum(await asyncio.gather(*batches))
    undecided = len(front.registry.unsure)
    if not recognized and not undecided:  # usually their numbers now belong to other mounts, in the same fusectl
        return
    gone = len(unsure) - recognized - undecided
    priority = log.WARNING if undecided else log.NOTICE
    front.log(
        priority,
        f"fusectl was mounted anew: {recognized} mounts were recognized, {gone} are gone, {undecided} are undecided",
        recognized=recognized,
        gone=gone,
        undecided=undecided,
    )


async def _ask_at_volume(front: Front, mount: Mount) -> set[Device] | None:
    """Return the mount's device if its filesystem is at the target of its volume or in containers that have the volume;
    None if there was no answer."""
    start = StartRecognizeVolume(
        seconds=front.configuration.deadlines.operation,
        target=mount.volume,
        device=mount.device,
        type=mount.type.encode(),
        source=mount.source,
        shared=mount.share != b"",
    )
    try:
        with await front.mounter.begin(start, []) as operation:
            return _devices(await operation.expect(Recognized))
    except (MounterFailed, OperationEnded, OperationFailed, OperationRefused):
        return None


async def _ask(front: Front, namespace: MountNamespace, mounts: list[Mount]) -> set[Device] | None:
    """Return the devices of those mounts that are in the namespace: an empty set if it has no process any more; None if
    there was no answer."""
    lines = b"".join(b"%d %d\n" % (mount.device, mount.mount_id) for mount in mounts)
    start = StartRecognize(front.configuration.deadlines.operation, namespace, lines)
    try:
        with await front.mounter.begin(start, []) as operation:
            said = await operation.hear()
    except (MounterFailed, OperationEnded, OperationFailed, OperationRefused):
        return None
    if isinstance(said, NobodyThere):
        return set()
    if not isinstance(said, Recognized):
        return None
    return _devices(said)


def _devices(said: Recognized) -> set[Device]:
    return {Device(int(line)) for line in said.devices.splitlines()}
