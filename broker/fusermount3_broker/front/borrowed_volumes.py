"""Volumes that have the filesystem of another pod's volume: of a mount pod's, its *source*.

The pods name no source. A volume of a template has keys, and a volume of a mount pod offers its filesystem under one of
them (`messages.sharing_key`); which of these is believed is decided by `policy.may_borrow`. A source counts as served
once its FUSE program has answered a request. Until then, publishing a *borrower* waits, so that no container of its pod
starts without the filesystem. If it has waited too long, it has left nothing behind, and kubelet asks again.

A borrower keeps the filesystem that it has for as long as that is served, also if the source is removed or there is a
newer one. If the filesystem is dead, it gets the next one that is served, in its running containers, too.

A source *retires* when its pod asks whether it is still used, as a pod does that is about to end: no borrower gets its
filesystem any more. Who needs one waits for another source, as the controller creates one.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from errno import ENODATA, ENOENT, ENOTCONN, ETIMEDOUT
from functools import partial
from typing import Any

from fusermount3_broker.front import hung_connections
from fusermount3_broker.front.context import Front
from fusermount3_broker.front.decisions import policy
from fusermount3_broker.front.model import Device, Mount, Volume
from fusermount3_broker.front.mounter_client import (
    MounterFailed,
    Operation,
    OperationEnded,
    OperationFailed,
    OperationRefused,
)
from fusermount3_broker.front.restored_containers import RestoredContainers, former
from fusermount3_broker.front.tables.volume_table import Volumes
from fusermount3_broker.front.volume_operations import VolumeOperations
from fusermount3_broker.front.waiting_volumes import Wait, WaitingVolumes, not_ready
from fusermount3_broker.messages.mounter import Borrowed, StartBorrow, StartStat, Stated
from fusermount3_broker.messages.refusal import Refusal
from fusermount3_broker.service import log

#: Seconds between the first looks for an emptyDir of the pod, which kubelet creates while it has the volume published;
#: and between later ones. A pod with one has a FUSE program of its own.
_LOOKS = [0.01 * 2**number for number in range(6)]
#: Seconds between questions to a FUSE program that has not answered: the first pause, and the longest.
_ASK_AGAIN, _LONGEST_PAUSE = 0.1, 5.0
#: Seconds for which a source that has asked whether it is used retires. A pod that is about to end asks each second.
RETIRING = 60.0
#: Why a volume waits whose only source does.
RETIRES = b"it is about to end, and there is no other yet"
#: What is no answer of a FUSE program: it has mounted nothing, is gone, or hangs.
_NO_ANSWERS = (ENODATA, ENOTCONN, ETIMEDOUT)

#: Makes a volume, which is new or not; returns whether anything of it was missing. Raises Refusal.
Make = Callable[[Volume, bool], Awaitable[bool]]
#: Records the volume and makes it, or leaves nothing; returns the result in a word. Raises Refusal.
Establish = Callable[[Volume, Make], Awaitable[str]]
#: Publishes a volume that a FUSE program of its own pod serves. Raises Refusal with ENOENT if the pod has no emptyDir
#: for the socket, also after each of these pauses, in seconds.
PublishHere = Callable[[Iterable[float]], Awaitable[str]]


class Borrowing:
    """Gives borrowers the filesystems of sources. For use in a running event loop."""

    def __init__(
        self,
        front: Front,
        volumes: Volumes,
        operations: VolumeOperations,
        establish: Establish,
        restored_containers: RestoredContainers,
    ) -> None:
        self._front = front
        self._volumes = volumes
        self._operations = operations
        self._establish = establish
        self._restored_containers = restored_containers
        #: The connections of sources whose FUSE program has answered.
        self._answered: set[int] = set()
        #: The connections of sources that retire, and until when, in monotonic seconds.
        self._retiring: dict[int, float] = {}
        #: The connections of sources whose FUSE program has unmounted them, while another pod has them.
        self._unmounted: set[int] = set()
        #: The connections that new borrowers are about to have.
        self._promised: Counter[int] = Counter()
        self._waiting = WaitingVolumes()
        self._tasks: set[asyncio.Task[None]] = set()
        front.shared_died = self._renew_soon

    # Sources ---------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Take up the sources that the last front had."""
        for source in self._volumes:
            mount = self._newest(source) if source.share else None
            if mount and not mount.awaits_program:
                self.committed(source, mount)

    def committed(self, source: Volume, mount: Mount) -> None:
        """A FUSE program serves `mount` on a volume: if that is a source, give it to its borrowers.

        What was at its target before was dead, or the mounter had not replaced it.
        """
        if source.share and mount.connection:
            for each in self._front.registry.mounts_of(source.target):
                if each.device != mount.device:
                    self._front.states.note_dead(each.connection)
            self._begin(self._offer(source, mount))

    async def _offer(self, source: Volume, mount: Mount) -> None:
        """Wait until the FUSE program answers, and give its filesystem to borrowers."""
        pause = _ASK_AGAIN
        while self._front.is_live(mount) and self._volumes.find(source.target) == source:
            if await self._answers(source):
                self._answered = {mount.connection} | {
                    each.connection for each in self._front.registry if each.connection in self._answered
                }
                self._waiting.tell()
                await self._renew(source.share)
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def unmounted(self, source: Volume, mount: Mount) -> None:
        """The FUSE program of a source has unmounted it for itself: end the filesystem as soon as no other pod has it.

        It is still mounted at the target, and some programs (on go-fuse) end only when it is mounted nowhere.
        """
        self._unmounted &= {each.connection for each in self._front.registry}
        self._unmounted.add(mount.connection)
        self.retire(source)

    async def _end(self, source: Volume, mount: Mount) -> None:
        """Abort the connection, unless the program has ended."""
        if self._front.is_live(mount) and await self._answers(source):
            with suppress(MounterFailed, OperationFailed, OperationRefused, OperationEnded):
                await hung_connections.abort(self._front, mount, "its FUSE program has unmounted it")

    async def _answers(self, source: Volume) -> bool:
        """Ask the filesystem of the source; return whether its program answers. If it hangs, return when it goes on."""
        hanging: Operation | None = None
        start = StartStat(self._operations.seconds, source.target)
        try:
            async with self._operations.begin(b"cannot ask the volume", source, start) as operation:
                stated = await operation.expect(Stated)
                if stated.errno == ETIMEDOUT:
                    hanging = operation.second_handle()
        except Refusal:
            return False
        if hanging:
            with hanging:
                await hanging.ended()
        return stated.served or (stated.published and stated.errno not in _NO_ANSWERS)

    def _newest(self, source: Volume) -> Mount | None:
        """Return the filesystem at the target of a source, if one is there that is not known to be dead."""
        mounts = self._front.registry.mounts_of(source.target)
        return mounts[0] if mounts and self._front.is_live(mounts[0]) else None

    def _sources(self, borrower: Volume) -> list[Volume]:
        """Return the sources that the borrower may use: those of mount namespaces first, and of these the newest."""
        return policy.sources_for(borrower, self._volumes.sources(borrower.keys), self._front.mount_namespaces)

    def _lender(self, borrower: Volume) -> tuple[Volume, Mount] | None:
        """Return the source whose filesystem the borrower would get now, with that, if there is one."""
        for source in self._sources(borrower):
            mount = self._newest(source)
            if mount and self._can_lend(mount):
                return source, mount
        return None

    def _can_lend(self, mount: Mount) -> bool:
        is_served = mount.connection in self._answered and self._front.state(mount) == "live"
        return is_served and not self._retires(mount)

    def retire(self, source: Volume) -> int:
        """Give nobody else the filesystem of the source for `RETIRING` seconds; return how many borrowers have it.

        Also counted is who may have it: a new front learns that soon. The program that mounts next does not retire.
        A filesystem that is `unmounted` ends if nobody has it.
        """
        unknown = 0
        mounts = self._front.registry.mounts_of(source.target)
        own = {mount.connection for mount in mounts}
        now = time.monotonic()
        self._retiring = {each: until for each, until in self._retiring.items() if until > now}
        self._retiring |= dict.fromkeys(own, now + RETIRING)
        borrowers = self._volumes.borrowers(source.share) if source.share else []
        have = sum(
            self._volumes.is_taken(each.target) and self._front.borrowed.get(each.target, unknown) in own | {unknown}
            for each in borrowers
        )
        users = have + sum(self._promised[each] for each in own)
        if not users:
            for mount in mounts:
                if mount.connection in self._unmounted:
                    self._unmounted.discard(mount.connection)
                    self._begin(self._end(source, mount))
        return users

    def _retires(self, mount: Mount) -> bool:
        return time.monotonic() < self._retiring.get(mount.connection, 0.0)

    # Borrowers -------------------------------------------------------------------------------------------------

    async def publish(self, volume: Volume, publish_here: PublishHere) -> str:
        """Publish a volume of a template, by a program of its pod or of a mount pod; return the result in a word.

        Raises Refusal: EAGAIN if no source was served in time.
        """
        async with self._operations.lock(volume.target):  # no volume that is being made now: it may fail
            known = self._volumes.find(volume.target)
        if known and not known.is_borrower:
            return await publish_here(())
        if known and self._volumes.is_taken(volume.target):
            return await self._establish(volume.as_borrower(), self._renewed)
        borrower = volume.as_borrower()
        pauses: Iterable[float] = _LOOKS

        async def attempt(wait: Wait) -> str:
            nonlocal pauses
            looks, pauses = pauses, ()
            if not known:
                with _unless_absent():
                    return await publish_here(looks)
            if not self._lender(borrower):
                raise Refusal(ENOENT, b"")
            return await self._establish(borrower, partial(self._begun, wait))

        return await self._waiting.publish(volume.target, attempt, lambda: self._problem(borrower))

    def _problem(self, borrower: Volume) -> bytes:
        sources = self._sources(borrower)
        if not sources:
            return b"none on this node offers the volume"
        mounts = [mount for mount in map(self._newest, sources) if mount]
        if not mounts:
            return b"its FUSE program has not mounted the volume yet"
        if all(map(self._retires, mounts)):
            return RETIRES
        return b"its FUSE program does not answer"

    async def _begun(self, wait: Wait, borrower: Volume, _is_new: bool) -> bool:
        """Make a borrower that has no filesystem yet, as `Make`. Raises Refusal with ENOENT if there is no source."""
        lender = self._lender(borrower)
        if wait.is_over or not lender:
            raise Refusal(ENOENT, b"")
        connection = lender[1].connection
        self._promised[connection] += 1
        try:
            return await self._borrow(borrower, *lender)
        finally:
            self._promised -= Counter([connection])

    async def _renewed(self, borrower: Volume, is_new: bool) -> bool:
        """Make a borrower that has had a filesystem, as `Make`: give it another one if that is dead."""
        if is_new:  # it was unpublished meanwhile
            raise not_ready(self._problem(borrower))
        lender = self._lender(borrower)
        return not self._has_live(borrower) and lender is not None and await self._borrow(borrower, *lender)

    def _has_live(self, borrower: Volume) -> bool:
        connection = self._front.borrowed.get(borrower.target)
        return any(each.connection == connection and self._front.is_live(each) for each in self._front.registry)

    async def _borrow(self, borrower: Volume, source: Volume, mount: Mount) -> bool:
        """Have the mounter give a borrower the filesystem of a source, unless it has one that is served.

        Return whether it has a new one. Raises Refusal.
        """
        borrowed = replace(mount, volume=borrower.target, mountpoint=b"")
        start = StartBorrow(
            seconds=self._operations.publish_seconds,
            source=source.target,
            device=mount.device,
            connection=mount.connection,
            target=borrower.target,
            read_only=borrower.read_only,
            former=former(self._front, borrower.target, borrowed),
        )
        async with self._operations.begin(b"cannot publish the volume", borrower, start) as operation:
            said = await operation.expect(Borrowed)
        has = self._front.registry.find(Device(said.device))
        self._front.borrowed[borrower.target] = has.connection if has else 0
        self._volumes.note_taken(borrower.target)
        if said.device == mount.device and (said.new or start.former):
            self._restored_containers.look_at(borrowed, borrower)
        return said.new

    def forget(self, target: bytes) -> None:
        """The volume at that target is being removed."""
        self._front.borrowed.pop(target, None)
        self._waiting.forget(target)

    def _renew_soon(self, key: bytes) -> None:
        self._begin(self._renew(key))

    async def _renew(self, key: bytes) -> None:
        """Give the borrowers of that key whose filesystem is dead another one, if one is served."""
        borrowers = [each for each in self._volumes.borrowers(key) if not each.block]
        await asyncio.gather(*map(self._renew_one, borrowers))

    async def _renew_one(self, borrower: Volume) -> None:
        fields: dict[str, log.Value] = {"target": borrower.target, "volume": borrower.id, "pod": borrower.pod}
        async with self._operations.lock(borrower.target):
            if self._volumes.find(borrower.target) is not borrower or not self._volumes.is_taken(borrower.target):
                return
            try:
                if await self._renewed(borrower, False):
                    self._front.log(log.INFO, "a volume has the filesystem of its mount pod again", **fields)
            except Refusal as refusal:  # kubelet will ask again
                text = refusal.text
                self._front.log(log.WARNING, "can't give a volume the filesystem of its mount pod", **fields, text=text)

    # Utilities -------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Stop all that was begun."""
        for task in list(self._tasks):
            task.cancel()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._is_over)

    def _is_over(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._front.log(log.ERROR, f"internal error: {error!r}")


@contextmanager
def _unless_absent() -> Iterator[None]:
    """Suppress a Refusal with ENOENT: what the volume needs is not there yet."""
    try:
        yield
    except Refusal as refusal:
        if refusal.errno != ENOENT:
            raise
