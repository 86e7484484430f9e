"""Containers that still have a former filesystem of a volume, or the tombstone, after the next one has been mounted.

Of an eager volume, also those that have the placeholder. Its containers start when its filesystem is mounted, and need
no propagation; but one may start when a FUSE program has unmounted it, and before the next one has mounted.

The mounter replaces these when it mounts (`mounter.volume_consumers`). It may not reach a container that is just being
started, and has no further chance if it is killed. So children of the mounter look again a few times.

A pod has one such child at a time, for all of its volumes, and no other until that has ended. So a filesystem whose
program answers slowly, or never, delays the containers of its own pod. As many such pods as there are slots leave none
for others, whose containers then have only what the mounter could do when it mounted.
"""

import asyncio
from contextlib import suppress

from fusermount3_broker.front.context import Front
from fusermount3_broker.front.decisions.limits import AccountName
from fusermount3_broker.front.model import Mount, Volume
from fusermount3_broker.front.mounter_client import MounterFailed, OperationEnded, OperationFailed, OperationRefused
from fusermount3_broker.front.slots import Slots
from fusermount3_broker.front.volume_tasks import VolumeTasks
from fusermount3_broker.messages.mounter import Restored, StartRestore

#: Seconds before each look.
PAUSES = (1.0, 4.0, 15.0, 60.0)
#: Concurrent children for all pods; the mounter allows as many.
_AT_ONCE = 8
#: Seconds for which a child is waited for, and for the children of others before it begins.
_PATIENCE = 60
#: The most former filesystems of a volume that are looked for, the newest.
_MOST = 64


class RestoredContainers(VolumeTasks):
    """Looks again at the containers of pods whose volumes have a new filesystem. For use in a running event loop."""

    def __init__(self, front: Front) -> None:
        super().__init__(front)
        self._slots = Slots(_AT_ONCE, 1)

    def look_at(self, mount: Mount, volume: Volume) -> None:
        """Look a few times at the containers of the volume's pod that may have the volume, as long as this mount is the
        newest."""
        self.begin(mount.volume, self._look(mount, volume))

    async def _look(self, mount: Mount, volume: Volume) -> None:
        for pause in PAUSES:
            await asyncio.sleep(pause)
            if not self._front.is_live(mount):
                return
            with suppress(TimeoutError, MounterFailed, OperationFailed, OperationRefused, OperationEnded):
                await self._restore(mount, volume)

    async def _restore(self, mount: Mount, volume: Volume) -> None:
        """Have a child look at the containers. Raises TimeoutError, MounterFailed and as `Operation.hear`."""
        account = AccountName(f"pod {volume.pod}")
        start = StartRestore(
            seconds=self._front.configuration.deadlines.operation,
            target=mount.volume,
            device=mount.device,
            connection=mount.connection,
            but=mount.namespace if mount.mountpoint else 0,
            former=former(self._front, mount.volume, mount),
            eager=volume.eager,
        )
        await self._slots.take(account, _PATIENCE)
        try:
            operation = await self._front.mounter.begin(start, [])
        except BaseException:
            self._slots.give_back(account)
            raise
        try:
            operation.patience = _PATIENCE
            await operation.expect(Restored)
        finally:
            self._slots.give_back_after(account, operation)


def former(front: Front, volume: bytes, but: Mount | None = None) -> bytes:
    """Return the lines of `mounter.StartVolumeMount`: the filesystems that a volume had, or may have had, and that
    still exist, but not that of one mount."""
    mounts = {each.device: each for each in front.registry.mounts_of(volume)}
    if but:
        mounts |= {each.device: each for each in _succeeded(front, but)}
        mounts.pop(but.device, None)
    lines = [
        b"%d %d\n" % (each.device, each.connection) for each in mounts.values() if front.registry.find(each.device)
    ]
    return b"".join(lines[:_MOST])


def _succeeded(front: Front, mount: Mount) -> list[Mount]:
    """Return what was offered under the same key as the mount, and is dead: known to be, or because this mount is at
    the same target."""
    source = front.registry.find(mount.device)
    return [
        each
        for each in front.registry.shared(mount.share)
        if (source and each.volume == source.volume) or front.states.is_dead(each.connection)
    ]
