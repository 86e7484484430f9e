"""The published volumes: children of the mounter make and remove them when kubelet asks.

A volume has a target in kubelet's directory and a socket in the pod, on which `volume_call` serves calls. Operations on
one target run one after the other and don't delay those on other targets. Limits don't apply to kubelet, but each pod
may occupy only so many children of the mounter, because its filesystems may block them.

A socket has to exist as long as its volume, whatever happens to the broker: so every socket is made again when a front
starts, and a missing one whenever kubelet publishes its volume again. The descriptor of an eager volume's unserved
filesystem is kept here until a FUSE program has it. If the front is killed before that, the next one has another
filesystem mounted in its place.
"""

import asyncio
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from errno import EBUSY, EEXIST, ENOENT
from functools import partial
from typing import Any, NamedTuple

from fusermount3_broker.front.borrowed_volumes import Borrowing, Make
from fusermount3_broker.front.call import Call
from fusermount3_broker.front.context import Front
from fusermount3_broker.front.decisions import policy
from fusermount3_broker.front.decisions.limits import AccountName
from fusermount3_broker.front.lent_devices import Lending
from fusermount3_broker.front.model import Device, Mount, MountNamespace, Volume
from fusermount3_broker.front.mounter_client import Operation
from fusermount3_broker.front.restored_containers import RestoredContainers, former
from fusermount3_broker.front.server import Server
from fusermount3_broker.front.tables.database import NotWritten
from fusermount3_broker.front.tables.mount_table import filesystem_type
from fusermount3_broker.front.tables.volume_table import Volumes
from fusermount3_broker.front.unmounted_volumes import UnmountedVolumes
from fusermount3_broker.front.volume_operations import VolumeOperations
from fusermount3_broker.messages.mounter import (
    Attach,
    Keep,
    Kept,
    Made,
    Mounted,
    MountPlan,
    Published,
    StartEager,
    StartPublish,
    StartStat,
    StartUnpublish,
    Stated,
    Unpublished,
)
from fusermount3_broker.messages.refusal import Refusal
from fusermount3_broker.service import log
from fusermount3_broker.service.channel import Channel

#: The most sockets that come with `Published`.
_MOST_SOCKETS = 2
#: Seconds for which the front waits for a whole unpublish.
_PATIENCE = 60
#: Seconds between attempts to find the emptyDir of a new volume, about two and a half in all: kubelet creates it while
#: it has the volume published.
_LOOK_AGAIN = [0.01 * 2**number for number in range(8)]


class PublishedOtherwise(Refusal):
    """The volume is already published at its target with other attributes, or another volume is published there."""


class Unserved(NamedTuple):
    """A filesystem at a volume's target that no FUSE program serves yet: its /dev/fuse descriptor and its record."""

    device: int
    mount: Mount


class Publication:
    """A published volume with its sockets, and the unserved filesystem of an eager one."""

    def __init__(self, volume: Volume, volumes: Volumes) -> None:
        self.volume = volume
        self.listeners: list[socket.socket] = []
        self._volumes = volumes
        self._held: Unserved | None = None
        self._is_lent = False
        self._is_unwanted = False

    @property
    def needs_filesystem(self) -> bool:
        """Whether this is an eager volume on which nothing has been mounted yet."""
        return self.volume.eager and self._held is None and not self._volumes.is_taken(self.volume.target)

    def hold(self, filesystem: Unserved) -> None:
        """Keep the filesystem at the target for a FUSE program."""
        self._held = filesystem

    def lend(self) -> Unserved | None:
        """Lend the held filesystem to one FUSE program at a time, until `take_back` or `hand_over`.

        Return None if none is held or if it is lent already. The descriptor still belongs to this publication.
        """
        self._drop_what_was_begun()
        if self._held is None or self._is_lent:
            return None
        self._is_lent = True
        return self._held

    def take_back(self) -> bool:
        """Take the filesystem back: the program to which it was lent did not confirm that it serves it.

        Return whether it is still held; if not, it is dead.
        """
        self._is_lent = False
        if self._is_unwanted:
            self._let_go()
        self._drop_what_was_begun()
        return self._held is not None

    def _drop_what_was_begun(self) -> None:
        """Close a filesystem that no program can serve any more: one began and ended, or the connection was aborted."""
        if self._held and not self._is_lent and not _has_unread(self._held.device):
            self._let_go()
            self._volumes.note_taken(self.volume.target)

    def hand_over(self) -> None:
        """Give the filesystem up to the FUSE program that serves it from now on."""
        self._is_lent = False
        self._let_go()
        self._volumes.note_taken(self.volume.target)

    def end(self) -> None:
        """Close the held filesystem, as soon as it is no longer lent."""
        self._is_unwanted = True
        if not self._is_lent:
            self._let_go()

    def _let_go(self) -> None:
        if self._held:
            os.close(self._held.device)
            self._held = None


def _has_unread(device: int) -> bool:
    """Return whether a request waits in `device`, a /dev/fuse: while the first one waits, no program has read any."""
    waiting = select.poll()
    waiting.register(device, select.POLLIN)
    return any(events & select.POLLIN for _, events in waiting.poll(0))


#: Makes the call for a connection to a volume's socket.
BeginIn = Callable[["Publications", Publication, Front, Channel], Call]


class Publications:
    """Publishes the volumes of the table `volumes`, and has `server` serve their sockets.

    `begin` makes the calls on these sockets, `begin_old` those on the sockets for old clients.
    """

    def __init__(self, front: Front, volumes: Volumes, server: Server, begin: BeginIn, begin_old: BeginIn) -> None:
        self._front = front
        self._volumes = volumes
        self._server = server
        self._begin = (begin, begin_old)
        self._served: dict[bytes, Publication] = {}
        self._operations = VolumeOperations(front)
        self.restored_containers = RestoredContainers(front)
        self.unmounted_volumes = UnmountedVolumes(front, self._operations)
        self.borrowing = Borrowing(front, volumes, self._operations, self._establish, self.restored_containers)
        self.lending = Lending(front, volumes, self._operations, self._establish)

    def close(self) -> None:
        """Close the sockets and unserved filesystems of all volumes, which stay published."""
        self.borrowing.end()
        self.lending.end()
        self.restored_containers.end()
        self.unmounted_volumes.end()
        for publication in self._served.values():
            publication.end()
            for listener in publication.listeners:
                listener.close()

    # Requests --------------------------------------------------------------------------------------------------

    async def publish(self, volume: Volume) -> None:
        """Make the volume available, or ensure that it still is. Raises Refusal, and then leaves it as it was."""
        await self._logged("publish", volume.target, volume, self._publish(volume))

    async def unpublish(self, target: bytes) -> None:
        """Remove the volume at `target`, if there is one. Raises Refusal."""
        await self._logged("unpublish", target, self._volumes.find(target), self._unpublish(target))

    async def stat(self, target: bytes) -> Stated:
        """Return the volume's usage. Raises Refusal: ENOENT if there is no volume, ETIMEDOUT if it does not answer."""
        volume = self._volumes.find(target)
        if not volume:
            raise Refusal(ENOENT, b"no volume is published there")
        start = StartStat(self._operations.seconds, target)
        async with self._operations.begin(b"cannot ask the volume", volume, start) as operation:
            return await operation.expect(Stated)

    def is_block(self, target: bytes) -> bool:
        """Return whether the volume at that target is a block volume."""
        volume = self._volumes.find(target)
        return volume is not None and volume.block

    def targets_of(self, id: bytes) -> list[bytes]:
        """Return the targets of the volume with that id."""
        return [volume.target for volume in self._volumes if volume.id == id]

    async def restore(self) -> None:
        """Publish again the volumes that the last front had published; forget those that are gone with their pods."""
        self.borrowing.resume()
        await asyncio.gather(*map(self._restore, self._volumes))

    async def _restore(self, volume: Volume) -> None:
        try:
            if volume.is_borrower and not (await self.stat(volume.target)).published:
                await self.unpublish(volume.target)  # the machine was booted, or the last front had just begun
            else:
                await self.publish(volume)
        except Refusal as refusal:
            if refusal.errno == ENOENT:
                with suppress(Refusal):  # it is logged, and kubelet will ask for the unpublish
                    await self.unpublish(volume.target)
        except Exception as error:
            self._front.log(log.ERROR, f"internal error: {error!r}")

    # Steps -----------------------------------------------------------------------------------------------------

    async def _publish(self, volume: Volume) -> str:
        """Publish the volume; return the result in a word. Raises Refusal."""
        policy.decide_eager_mount(b"", volume)  # find mistakes in its options now, not when its user mounts
        if volume.block:
            return await self.lending.publish(volume)
        if volume.keys:
            return await self.borrowing.publish(volume, partial(self._publish_here, volume))
        return await self._publish_here(volume, _LOOK_AGAIN)

    async def _publish_here(self, volume: Volume, pauses: Iterable[float]) -> str:
        """Publish a volume that a program of its own pod serves, as `_publish`; `pauses` as for `_make`."""
        return await self._establish(volume, lambda known, is_new: self._make(known, pauses if is_new else ()))

    async def _establish(self, volume: Volume, make: Make) -> str:
        """Record the volume and `make` it; forget and remove it again if that fails and it is new. Raises Refusal.

        Return the result in a word.
        """
        async with self._operations.lock(volume.target):
            known = self._volumes.find(volume.target)
            self._check_place(volume, known)
            if not known:
                self._write_down(volume)
            try:
                return "published" if await make(known or volume, not known) else "unchanged"
            except Refusal:
                if not known:
                    await self._give_up(volume)
                raise

    def _write_down(self, volume: Volume) -> None:
        """Record the volume before it is made, so that it is removed even if the front is killed. Raises Refusal."""
        try:
            self._volumes.add(volume)
        except NotWritten as error:
            raise Refusal(error.errno, b"cannot publish the volume: %b" % error.text.encode()) from None

    def _check_place(self, volume: Volume, known: Volume | None) -> None:
        """Raise Refusal if another volume has the target or socket of this one, or if another pod has this volume."""
        if known and known != volume:
            raise PublishedOtherwise(EEXIST, b"it is published there with other attributes, or another volume is")
        if other := self._volumes.at_other_target(volume):
            raise Refusal(
                EBUSY, b"only one pod may have the volume (ReadWriteOncePod), and pod %b has it" % other.pod.encode()
            )
        if other := self._volumes.with_same_socket(volume):
            raise Refusal(
                EEXIST,
                b"volume %b of the pod has its socket there, too: give one of them another fdPassingSocketName"
                % other.id,
            )

    async def _make(self, volume: Volume, pauses: Iterable[float]) -> bool:
        """Have the mounter make the missing parts of the volume, and serve it. Raises Refusal.

        Return whether anything was missing. While kubelet's directories for the volume don't exist yet, try again after
        each of `pauses`, in seconds.
        """
        known = self._served.get(volume.target)
        start = StartPublish(
            seconds=self._operations.publish_seconds,
            target=volume.target,
            directory=volume.directory,
            name=volume.name,
            old_clients=volume.old_clients,
            serving=known is not None,
            nonce=volume.nonce,
            shared=volume.share != b"",
        )
        descriptors = await self._sockets(volume, start, pauses)
        publication = known or Publication(volume, self._volumes)
        self._served[volume.target] = publication
        if descriptors:
            self._serve(publication, [socket.socket(fileno=each) for each in descriptors])
        if not publication.needs_filesystem:
            return bool(descriptors)
        await self._mount_eagerly(publication)
        return True

    async def _sockets(self, volume: Volume, start: StartPublish, pauses: Iterable[float]) -> list[int]:
        """Have the mounter make the volume, as `_make` does; return its new sockets. Backoff don't occupy a slot."""
        for pause in pauses:
            try:
                return await self._sockets(volume, start, ())
            except Refusal as refusal:
                if refusal.errno != ENOENT:
                    raise
            await asyncio.sleep(pause)
        async with self._operations.begin(b"cannot publish the volume", volume, start) as operation:
            _, descriptors = await operation.expect_with_descriptors(Published, _MOST_SOCKETS)
        return descriptors

    async def _give_up(self, volume: Volume) -> None:
        """Remove the parts already made of a volume that can't be published."""
        try:
            await self._take_away(volume.target, volume)
            self._volumes.remove(volume.target)
        except Refusal as refusal:
            known = _log_fields(volume.target, volume)
            self._front.log(log.ERROR, "can't remove an incomplete volume", **known, text=refusal.text)

    async def _unpublish(self, target: bytes) -> str:
        """Remove the volume at `target`; return the result in a word. Raises Refusal."""
        async with self._operations.lock(target):
            volume = self._volumes.find(target)
            self.borrowing.forget(target)
            self.lending.forget(target)
            await self._take_away(target, volume)
            self._volumes.remove(target)
            return "unpublished" if volume else "nothing there"

    async def _take_away(self, target: bytes, volume: Volume | None) -> None:
        """Stop serving the volume, and have the mounter remove it. Raises Refusal."""
        self.restored_containers.forget(target)
        self.unmounted_volumes.forget(target)
        if publication := self._served.pop(target, None):
            self._serve(publication, [])
            publication.end()
        socket = (volume.directory, volume.name, volume.nonce) if volume else (b"", b"", b"")
        borrowed = volume is None or volume.is_borrower  # what is not known may be others' filesystem, too
        start = StartUnpublish(self._operations.seconds, target, *socket, borrowed)
        async with self._operations.begin(b"cannot unpublish the volume", volume, start) as operation:
            operation.patience = _PATIENCE  # several steps, each with a time limit of its own
            await operation.expect(Unpublished)

    def _serve(self, publication: Publication, listeners: list[socket.socket]) -> None:
        """Serve the volume on `listeners` instead of its previous sockets."""
        for listener in publication.listeners:
            self._server.leave(listener)
            listener.close()
        publication.listeners = listeners
        for listener, begin in zip(listeners, self._begin, strict=False):
            self._server.listen(listener, partial(begin, self, publication))

    # Unserved filesystems --------------------------------------------------------------------------------------

    async def mount_now(self, publication: Publication) -> Unserved:
        """Have a filesystem owned by root mounted at the target; return it with a descriptor that has to be closed.

        Raises Refusal: EBUSY if a FUSE program serves the volume.
        """
        volume = publication.volume
        id = secrets.token_hex(4)
        plan = policy.decide_eager_mount(id.encode(), volume)
        seconds, before = self._operations.publish_seconds, former(self._front, volume.target)
        start = StartEager(seconds, volume.target, volume.group, before)
        async with self._operations.begin(b"mount failed", volume, start) as operation:
            operation.say(plan)
            mount = self._record(volume, id, plan, await operation.expect(Made))
            try:
                self._front.registry.add(mount)
            except NotWritten as error:
                await operation.let_go()
                raise Refusal(error.errno, b"mount failed: %b" % error.text.encode()) from None
            try:
                device = await self._attached(operation)
            except BaseException:
                self._front.registry.find(mount.device)  # drops its record if the mount is gone
                raise
        return Unserved(device, mount)

    async def _attached(self, operation: Operation) -> int:
        """Have the recorded mount attached; return its descriptor. Raises the errors of `operation`."""
        operation.say(Attach())
        _, (device,) = await operation.expect_with_descriptors(Mounted, 1)
        try:
            operation.say(Keep())
            await operation.expect(Kept)
        except BaseException:
            os.close(device)
            raise
        return device

    async def _mount_eagerly(self, publication: Publication) -> None:
        """Have a filesystem mounted, and keep it for a FUSE program; unless a program has one already. Raises Refusal.

        It has if it took one, and the last front ended before noting that. What no program took is about to be taken
        away by a child of the last front: kubelet asks again.
        """
        target = publication.volume.target
        try:
            publication.hold(await self.mount_now(publication))
        except Refusal as refusal:
            if refusal.errno != EBUSY or self._awaits_program(target):
                raise
            self._volumes.note_taken(target)

    def _awaits_program(self, target: bytes) -> bool:
        """Return whether the newest filesystem at that target was mounted for a FUSE program that has not come."""
        mounts = self._front.registry.mounts_of(target)
        return bool(mounts) and mounts[0].awaits_program

    def _record(self, volume: Volume, id: str, plan: MountPlan, made: Made) -> Mount:
        device = Device(made.device)
        return Mount(
            device=device,
            connection=self._front.registry.connection(device),
            namespace=MountNamespace(made.mount_namespace),
            uid=plan.uid,
            pid=0,
            command="",
            container="",
            mountpoint=b"",
            type=filesystem_type(plan.subtype),
            source=plan.source,
            mounted_at=time.time(),
            request_id=id,
            account=AccountName(""),
            volume=volume.target,
            mount_id=made.mount_id,
            share=volume.share,
        )

    # Utilities -------------------------------------------------------------------------------------------------

    async def _logged(
        self, operation: str, target: bytes, volume: Volume | None, work: Coroutine[Any, Any, str]
    ) -> None:
        """Await `work`, whose result is a word, and write its only log record. Raises Refusal."""
        begun = time.monotonic()

        def tell(priority: int, result: str, **fields: log.Value) -> None:
            took = time.monotonic() - begun
            self._front.requests[f"{operation} {result}"] += 1
            self._front.latency.labels(operation).observe(took)
            if result != "unchanged":  # kubelet asks again and again
                milliseconds = round(1000 * took, 2)
                known = _log_fields(target, volume)
                self._front.log(priority, f"{operation} {result}", milliseconds=milliseconds, **known, **fields)

        try:
            result = await work
        except Refusal as refusal:
            tell(log.NOTICE, "refused", errno=refusal.errno, text=refusal.text)
            raise
        tell(log.INFO, result)


def _log_fields(target: bytes, volume: Volume | None) -> dict[str, log.Value]:
    """Return the log fields that identify a volume."""
    return {"target": target, "volume": volume.id, "pod": volume.pod} if volume else {"target": target}
