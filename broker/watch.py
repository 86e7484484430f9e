"""Dead and hung mounts: their FUSE program is gone, and nobody unmounted them; or it does not answer.

Root of a container is the usual case of the first: libfuse tries umount(2) itself, is refused, and leaves it at that.
Such a mount answers ENOTCONN to everybody until it is unmounted.

A program that lives is not asked anything: as long as some process has the /dev/fuse descriptor of a connection, that
is alive, and Linux tells in fdinfo which connection a descriptor serves. Only who has the privilege may look there, so
a child of the mounter does (`connections`); all processes are looked through only if a connection is not served any
more by whom it was. A mount without such a process is given to another child, which asks the filesystem itself, and
unmounts it if it is dead. What the surveys say is kept in `states`.

At the target of a volume, a dead mount stays, until the next program takes its place or kubelet the volume away; it is
unmounted only where its program was.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Collection
from errno import ETIMEDOUT
from itertools import islice

from broker import log, rescue
from broker.front import Front
from broker.operations import MounterFailed, OperationEnded, OperationFailed, OperationRefused
from broker.plan import Reaped, StartReap, StartSurvey, Surveyed
from broker.registry import Device, Mount

#: The most seconds after which a mount is tried again that nobody seemed to serve and that was not dead. The first
#: time it is one, then twice as many each time: mostly its program is just ending.
AGAIN = 30.0
#: How often a filesystem is asked that gives no answer in time; then it is left alone.
MOST_UNANSWERED = 3
#: Seconds that a mount must have been without a process before it counts as left alone: libfuse closes its descriptor
#: first and then has the mount unmounted, and who comes to do that must not find it done.
MOMENT = 1.0
#: How many connections one survey tells of: a line of each has to fit into a record.
MOST_SURVEYED = 1000


class Watch:
    """Looks at the mounts, for as long as `run` runs."""

    def __init__(self, front: Front) -> None:
        self._front = front
        #: Which process served a connection when somebody looked last, and with which descriptor.
        self._served: dict[Device, tuple[int, int]] = {}
        #: The connections of the last look.
        self._known: dict[Device, int] = {}
        #: Since when a connection has been without a process.
        self._unserved: dict[Device, float] = {}
        self._not_before: dict[Device, float] = {}
        self._tries: Counter[Device] = Counter()
        self._unanswered: Counter[Device] = Counter()
        #: How many mounts of a filesystem were dead, and are gone.
        self._reaped: Counter[Device] = Counter()

    async def run(self) -> None:
        while True:
            pause = self._pause()
            await asyncio.sleep(min(pause, MOMENT) if pause and self._is_one_just_left() else pause or 1)
            if pause:
                try:
                    await self.look()
                except Exception as error:
                    self._front.log(log.ERROR, f"internal error: {error!r}")

    def _is_one_just_left(self) -> bool:
        return any(time.monotonic() - since < MOMENT for since in self._unserved.values())

    def _pause(self) -> int:
        """Return the seconds between two looks; 0 if nobody wants any."""
        configuration = self._front.configuration
        hung = max(1, configuration.hung_seconds // 4) if configuration.hung_seconds else 0
        return min(filter(None, (configuration.dead_mounts_seconds, hung)), default=0)

    async def look(self) -> None:
        """Look at all mounts once, and unmount those that are dead. Raises nothing that the mounter is the cause of."""
        self._front.registry.reconcile()
        mounts = {mount.device: mount for mount in self._front.registry}
        self._forget_all_but(mounts)
        waiting = await self._survey(mounts.values(), search=False)
        unserved = {device for device in waiting if mounts[device].pid and device not in self._served}
        unserved |= {device for device, mount in mounts.items() if self._front.states.is_aborted(mount.connection)}
        due = {device for device in unserved if self._not_before.get(device, 0.0) <= time.monotonic()}
        if due:
            await self._survey([mounts[device] for device in due], search=True)
        now = time.monotonic()
        for device, count in waiting.items():
            served = device in self._served or not mounts[device].pid
            self._front.states.note(mounts[device].connection, count, served, now)
        unserved = {device for device in unserved if not self._front.states.is_served(mounts[device].connection)}
        self._unserved = {device: self._unserved.get(device, now) for device in unserved}
        for device in due & unserved:
            aborted = self._front.states.is_aborted(mounts[device].connection)
            if self._may_reap(mounts[device]) and (aborted or now - self._unserved[device] >= MOMENT):
                self._not_before[device] = now + min(AGAIN, 2.0 ** self._tries[device])
                self._tries[device] += 1
                await self._reap(mounts[device])

    def _may_reap(self, mount: Mount) -> bool:
        if self._front.configuration.dead_mounts_seconds == 0 or self._unanswered[mount.device] >= MOST_UNANSWERED:
            return False
        is_at_target_only = not mount.mountpoint or mount.namespace == self._front.mount_namespace
        return not (mount.volume and (is_at_target_only or self._reaped[mount.device]))

    def _forget_all_but(self, mounts: dict[Device, Mount]) -> None:
        """Forget what was known of filesystems that are gone, also where another has their number now."""
        known = {device: mount.connection for device, mount in mounts.items()}
        self._front.states.forget_all_but(set(known.values()))
        for device, connection in self._known.items():
            if known.get(device) != connection:
                for table in (
                    self._served,
                    self._unserved,
                    self._not_before,
                    self._tries,
                    self._unanswered,
                    self._reaped,
                ):
                    table.pop(device, None)
        self._known = known

    async def _survey(self, mounts: Collection[Mount], search: bool) -> dict[Device, int]:
        """Return how many requests wait in the connections of these mounts, and take down who serves them.

        What the mounter doesn't tell is missing.
        """
        remaining = iter(mounts)
        waiting: dict[Device, int] = {}
        while batch := list(islice(remaining, MOST_SURVEYED)):
            lines = [(each.device, each.connection, *self._served.get(each.device, (0, 0))) for each in batch]
            told = await self._ask(b"".join(b"%d %d %d %d\n" % line for line in lines), search)
            for line in told.splitlines():
                number, count, pid, descriptor = map(int, line.split())
                device = Device(number)
                waiting[device] = count
                if pid:
                    self._served[device] = pid, descriptor
                else:
                    self._served.pop(device, None)
        return waiting

    async def _ask(self, connections: bytes, search: bool) -> bytes:
        """Return what a child of the mounter says of the connections; nothing if it fails."""
        start = StartSurvey(self._front.configuration.deadlines.operation, search, connections)
        try:
            with await self._front.mounter.begin(start, []) as operation:
                return (await operation.expect(Surveyed)).connections
        except (MounterFailed, OperationFailed, OperationRefused, OperationEnded):
            return b""

    async def _reap(self, mount: Mount) -> None:
        """Have the mounter unmount it, if it is dead.

        If the child can't look, because a process through which it would have ended just then, that is no answer.
        """
        start = StartReap(self._front.configuration.deadlines.operation, mount.device, mount.namespace)
        try:
            with await self._front.mounter.begin(start, []) as operation:
                try:
                    reaped = await operation.expect(Reaped)
                finally:
                    if operation.stuck:
                        rescue.leave(self._front, operation, mount)
        except (MounterFailed, OperationRefused):
            return
        except OperationFailed as error:
            self._unanswered[mount.device] += error.errno == ETIMEDOUT
            return
        except OperationEnded:  # killed by its alarm, or not even that: the filesystem hangs
            self._unanswered[mount.device] += 1
            return
        self._reaped[mount.device] += reaped.mounts
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
