"""Filesystems of volumes that their FUSE programs have unmounted for themselves, and that the volumes still have.

A program on go-fuse or jacobsa's library unmounts when it is told to end, and ends when the kernel tells it that its
filesystem has ended; but that is still mounted at the volume's target, and in containers that use it. These containers
may still write, so as long as one of them has the filesystem, nothing is done. Then the connection is aborted, and the
program ends: without that, it would be killed at the end of its grace period.

Other pods may have the filesystem of a shared volume; `borrowed_volumes` has the same rule for these.
"""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, repeat

from fusermount3_broker.front import hung_connections
from fusermount3_broker.front.context import Front
from fusermount3_broker.front.model import Mount, Volume
from fusermount3_broker.front.mounter_client import MounterFailed, OperationEnded, OperationFailed, OperationRefused
from fusermount3_broker.front.volume_operations import VolumeOperations
from fusermount3_broker.front.volume_tasks import VolumeTasks
from fusermount3_broker.messages.mounter import Recognized, StartFindInContainers
from fusermount3_broker.messages.refusal import Refusal

#: Seconds before each look at the containers: in the first minute, in which pods end, and later.
_SOON, _LATER = (0.0, *[1.0] * 60), 10.0


class UnmountedVolumes(VolumeTasks):
    """Ends filesystems that nobody has any more. For use in a running event loop."""

    def __init__(self, front: Front, operations: VolumeOperations) -> None:
        super().__init__(front)
        self._operations = operations

    def unmounted(self, volume: Volume, mount: Mount) -> None:
        """The FUSE program of the volume has unmounted this mount: end it as soon as no other container has it."""
        self.begin(volume.target, self._end(volume, mount))

    async def _end(self, volume: Volume, mount: Mount) -> None:
        for pause in _pauses():
            await asyncio.sleep(pause)
            if not self._front.is_live(mount):
                return
            if await self._is_in_containers(volume, mount):
                continue
            with suppress(MounterFailed, OperationFailed, OperationRefused, OperationEnded):
                await hung_connections.abort(self._front, mount, "its FUSE program has unmounted it")
            return

    async def _is_in_containers(self, volume: Volume, mount: Mount) -> bool:
        """Return whether a container of the volume's pod has the filesystem, besides that of the program; True, too, if
        that is not known."""
        start = StartFindInContainers(
            seconds=self._operations.seconds,
            target=volume.target,
            device=mount.device,
            type=mount.type.encode(),
            source=mount.source,
            but=mount.namespace,
        )
        try:
            async with self._operations.begin(b"cannot look at the volume", volume, start) as operation:
                return bool((await operation.expect(Recognized)).devices)
        except Refusal:
            return True


def _pauses() -> Iterator[float]:
    return chain(_SOON, repeat(_LATER))
