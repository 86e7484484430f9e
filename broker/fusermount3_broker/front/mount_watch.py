"""Watch for dead and hung mounts: a dead mount's FUSE program is gone but the mount remains; a hung mount's FUSE
program does not answer.

The usual cause of dead mounts is root of a container: libfuse tries umount(2) itself, is refused, and gives up. Every
access to such a mount fails with ENOTCONN until it is unmounted.

When the process that served a mount ends (`serving_processes`), an inquiry begins (`dead_mounts`). In addition, all
mounts are looked at in turn, a fixed number per second however many there are, to see whether a live process has kept
its descriptor, and whether requests wait for it. Mounts with waiting requests are looked at each time.

A look costs a child of the mounter. While every mount is served by a process that is known and watched, and none waits
for its answer, looks are rarer, and at fewer mounts per second.
"""

import asyncio
import time
from collections import deque
from collections.abc import Collection
from itertools import islice

from fusermount3_broker.front import connection_survey
from fusermount3_broker.front.context import Front
from fusermount3_broker.front.dead_mounts import Reaper
from fusermount3_broker.front.model import Device, Mount
from fusermount3_broker.service import log

#: Mounts looked at per second of the time between two looks, and while there is nothing to watch closely.
LOOKS_A_SECOND, CALM_LOOKS_A_SECOND = 50, 20
#: How many times longer the pause before a look is while there is nothing to watch closely.
CALM = 5


class Watch:
    """Watches the mounts while `run` runs."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._serving = front.serving
        self._reaper = Reaper(front)
        self._looking: asyncio.Task[None] | None = None
        #: Mounts still to be looked at in this round.
        self._round: deque[Device] = deque()
        #: Mounts for which requests waited at the last look.
        self._waited_for: dict[Device, None] = {}

    async def run(self) -> None:
        try:
            while True:
                if pause := self._pause():
                    await self._watch(pause)
                await asyncio.sleep(1)
        finally:
            await self._end()

    def _pause(self) -> int:
        """Return the seconds between two looks, or 0 if the configuration wants none."""
        configuration = self._front.configuration
        hung = max(1, configuration.hung_seconds // 4) if configuration.hung_seconds else 0
        return min(filter(None, (configuration.dead_mounts_seconds, hung)), default=0)

    async def _watch(self, pause: int) -> None:
        """Watch the mounts for as long as the configuration wants it."""
        self._front.registry.added = self._serving.added
        self._front.registry.dropped = self._serving.dropped
        for mount in self._front.registry:
            if mount.pid:
                self._serving.suspect(mount, time.monotonic())
        looked_at = time.monotonic() - pause
        while pause:
            now = time.monotonic()
            wanted, rate = (CALM * pause, CALM_LOOKS_A_SECOND) if self._is_calm() else (pause, LOOKS_A_SECOND)
            next_look = looked_at + wanted
            if next_look <= now:
                if self._looking is None or self._looking.done():
                    self._looking = asyncio.create_task(self._look(round(now - looked_at) * rate))
                looked_at, next_look = now, now + pause
            await self._wait_until(min(next_look, self._begin_inquiries() or next_look))
            pause = self._pause()
        await self._end()

    def _is_calm(self) -> bool:
        """Whether there is nothing to watch closely: each mount has a process whose end is an event, and no request
        waits."""
        serving = self._serving
        return not (serving.suspects or serving.unconfirmed or serving.without_pidfd or self._waited_for)

    def _begin_inquiries(self) -> float | None:
        """As `Reaper.begin`; log internal errors, so that one doesn't end all inquiries."""
        try:
            return self._reaper.begin()
        except Exception as error:
            self._front.log(log.ERROR, f"internal error: {error!r}")
            return None

    async def _look(self, most: int) -> None:
        """As `look`; log internal errors, so that one doesn't end all looks."""
        try:
            await self.look(most)
        except Exception as error:
            self._front.log(log.ERROR, f"internal error: {error!r}")

    async def _end(self) -> None:
        self._front.registry.added = self._front.registry.dropped = lambda _: None
        if self._looking:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        await self._reaper.end()
        self._serving.close()

    async def _wait_until(self, moment: float) -> None:
        """Return at that moment, or when there are new suspects."""
        try:
            async with asyncio.timeout(max(0.0, moment - time.monotonic())):
                await self._serving.news.wait()
        except TimeoutError:
            pass
        self._serving.news.clear()

    async def look(self, most: int) -> None:
        """Look at so many of the mounts whose turn it is. Failures of the mounter raise nothing."""
        mounts = self._next(min(most, connection_survey.MOST_SURVEYED))
        asked = {mount.device: self._serving.of(mount) for mount in mounts}
        told = await connection_survey.ask(self._front, mounts, lambda mount: asked[mount.device])
        for mount in mounts:
            seen = told.get(mount.device)
            self._waited_for.pop(mount.device, None)
            if seen is None:
                continue  # it has ended, or the mounter doesn't report it
            if seen.waiting:
                self._waited_for[mount.device] = None
            server = self._serving.of(mount)
            if server != asked[mount.device]:
                continue  # an inquiry has found it meanwhile
            self._serving.unconfirmed.pop(mount.device, None)
            if not seen.served and server != (0, 0):
                self._serving.lost(mount)

    def _next(self, most: int) -> Collection[Mount]:
        """Return so many mounts: first the most closely watched ones, then the others in turn."""
        chosen: dict[Device, Mount] = {}
        close = [*islice(self._serving.unconfirmed, most // 2), *islice(self._waited_for, most // 4)]
        for device in close:
            self._choose(device, chosen)
        if not self._round:
            self._begin_round()
        while self._round and len(chosen) < most:
            self._choose(self._round.popleft(), chosen)
        return chosen.values()

    def _choose(self, device: Device, chosen: dict[Device, Mount]) -> None:
        mount = self._front.registry.find(device)
        if mount is None:
            self._waited_for.pop(device, None)
            self._serving.forget(device)
            return
        if not self._front.states.is_dead(mount.connection):
            chosen[device] = mount
            return
        self._serving.unconfirmed.pop(device, None)
        if self._reaper.may_unmount(mount) and device not in self._serving.suspects:
            self._serving.suspect(mount, time.monotonic())  # it was not to be unmounted before

    def _begin_round(self) -> None:
        """Start a new round over all mounts, and forget the state of those that are gone."""
        mounts = list(self._front.registry)
        self._round.extend(mount.device for mount in mounts)
        connections = {mount.connection for mount in mounts}
        self._front.states.forget_all_but(connections)
        self._reaper.forget_all_but(connections)
        for device in self._serving.devices() - {mount.device for mount in mounts}:
            self._serving.forget(device)
