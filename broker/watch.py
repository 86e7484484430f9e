"""Dead mounts: those whose FUSE program is gone, and that nobody unmounted.

Root of a container is the usual case: libfuse tries umount(2) itself, is refused, and leaves it at that. Such a mount
answers ENOTCONN to everybody until it is unmounted.

A program that lives is not asked anything: as long as some process has the /dev/fuse descriptor of a connection, that
is alive, and Linux tells in fdinfo which connection a descriptor serves (fs/fuse/dev.c, fuse_dev_show_fdinfo). A mount
without such a process is given to the mounter, which asks the filesystem itself, and unmounts it if it is dead.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from broker import log
from broker.front import Front
from broker.operations import MounterFailed, OperationEnded, OperationFailed, OperationRefused
from broker.plan import Reaped, StartReap
from broker.registry import Device, Mount

#: The most seconds after which a mount is tried again that nobody seemed to serve and that was not dead. The first
#: time it is one, then twice as many each time: mostly its program is just ending.
AGAIN = 30.0
#: How often a filesystem is asked that gives no answer in time. A program that reads the question and says nothing
#: holds who asked it, beyond any signal, for as long as it lives; so it is left alone then.
MOST_UNANSWERED = 3
_FUSE_DEVICE = "/dev/fuse"
_CONNECTION = b"fuse_connection:\t"


class Watch:
    """Looks for dead mounts, for as long as `run` runs."""

    def __init__(self, front: Front) -> None:
        self._front = front
        #: Where the descriptor of a connection was seen last, as a path below /proc.
        self._seen: dict[Device, Path] = {}
        self._not_before: dict[Device, float] = {}
        self._tries: Counter[Device] = Counter()
        self._unanswered: Counter[Device] = Counter()

    async def run(self) -> None:
        while True:
            seconds = self._front.configuration.dead_mounts_seconds
            await asyncio.sleep(seconds or 1)
            if seconds:
                try:
                    await self._look()
                except Exception as error:
                    self._front.log(log.ERROR, f"internal error: {error!r}")

    async def _look(self) -> None:
        self._front.registry.reconcile()
        mounts = {mount.device: mount for mount in self._front.registry if mount.pid}
        for gone in (self._seen.keys() | self._not_before.keys()) - mounts.keys():
            self._seen.pop(gone, None)
            self._not_before.pop(gone, None)
            del self._tries[gone]
            del self._unanswered[gone]
        unserved = {device for device in mounts if served_by(self._seen.get(device)) != device}
        due = {device for device in unserved if self._not_before.get(device, 0.0) <= time.monotonic()}
        if not due:
            return
        self._seen |= await asyncio.to_thread(lambda: dict(descriptors()))
        for device in due:
            if served_by(self._seen.get(device)) != device and self._unanswered[device] < MOST_UNANSWERED:
                self._not_before[device] = time.monotonic() + min(AGAIN, 2.0 ** self._tries[device])
                self._tries[device] += 1
                await self._reap(mounts[device])

    async def _reap(self, mount: Mount) -> None:
        """Have the mounter unmount it, if it is dead.

        A process through which the mounter would look, and which ends just then, is no answer; the next look finds
        another.
        """
        pid = await asyncio.to_thread(process_in, mount.namespace)
        if pid is None:
            return
        start = StartReap(self._front.configuration.deadlines.operation, mount.device)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return
        try:
            with self._front.mounter.begin(start, [pidfd]) as operation:
                reaped = await operation.expect(Reaped)
        except (MounterFailed, OperationFailed, OperationRefused):
            return
        except OperationEnded:  # killed by its alarm: the filesystem hangs
            self._unanswered[mount.device] += 1
            return
        finally:
            os.close(pidfd)
        if reaped.mounts:
            self._front.registry.find(mount.device)
            self._front.requests["reap unmounted"] += 1
            self._front.log(
                log.NOTICE,
                "unmounted a dead mount: its program is gone",
                request_id=mount.request,
                mountpoint=mount.mountpoint,
                caller_container=mount.container,
                device=mount.device,
            )


def served_by(descriptor: Path | None) -> Device | None:
    """Return the connection that a descriptor below /proc serves."""
    if descriptor is None:
        return None
    try:
        data = (descriptor.parents[1] / "fdinfo" / descriptor.name).read_bytes()
    except OSError:
        return None
    _, found, rest = data.partition(_CONNECTION)
    return Device(int(rest.partition(b"\n")[0])) if found else None


def descriptors() -> Iterator[tuple[Device, Path]]:
    """Yield the connection of each /dev/fuse descriptor on the machine, and where it is below /proc."""
    for process in _processes():
        try:
            entries = list(os.scandir(process / "fd"))
        except OSError:
            continue  # it has ended
        for entry in entries:
            try:
                if os.readlink(entry.path) != _FUSE_DEVICE:
                    continue
            except OSError:
                continue
            device = served_by(Path(entry.path))
            if device is not None:
                yield device, Path(entry.path)


def process_in(namespace: int) -> int | None:
    """Return a process in that mount namespace."""
    for process in _processes():
        try:
            if (process / "ns/mnt").stat().st_ino == namespace:
                return int(process.name)
        except OSError:
            pass
    return None


def _processes() -> Iterator[Path]:
    return (path for path in Path("/proc").iterdir() if path.name.isdecimal())
