"""The volumes that are published now: made and taken away by children of the mounter, as kubelet wants it.

A volume has its place in kubelet's directory, and a socket in the pod; what is asked there is `volume_call`'s. All that
is asked for one target happens one after the other; others are not held up by it. Limits are not for kubelet, but
whoever's filesystem holds a child of the mounter has only so many of them.

A socket has to be there as long as its volume, whatever happens to the broker: so each is made again when a front
begins, and whenever kubelet asks for its volume again and it is gone. The descriptor of an eager volume's filesystem,
which nobody serves yet, is kept here until a FUSE program has it. If the front is killed before, the next one has
another filesystem mounted in its place.
"""

import asyncio
import os
import secrets
import select
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from errno import EAGAIN, EBUSY, EEXIST, EIO, ENOENT, ETIMEDOUT
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from broker import log, policy
from broker.call import Call
from broker.channel import Channel
from broker.front import Front
from broker.limits import AccountName
from broker.operations import MounterFailed, Operation, OperationEnded, OperationFailed, OperationRefused
from broker.options import Refusal
from broker.places import Places
from broker.plan import (
    Keep,
    Kept,
    Mounted,
    MountPlan,
    Published,
    Start,
    StartEager,
    StartPublish,
    StartStat,
    StartUnpublish,
    Stated,
    Unpublished,
    filesystem_type,
)
from broker.registry import Device, Mount, MountNamespace
from broker.server import Server
from broker.volumes import Volume, Volumes

#: What the mounter does for kubelet at the same time, for all pods and for one of them.
_AT_ONCE, _FOR_A_POD = 32, 8
#: As many sockets come with `Published`.
_MOST_SOCKETS = 2
#: Seconds for which a pod's operations wait for each other, and for which all that an unpublish takes is waited for.
_PATIENCE = 60
#: Seconds between looks for the emptyDir of a new volume, about two and a half in all: kubelet makes it at the same
#: time as it has the volume published.
_LOOK_AGAIN = [0.01 * 2**number for number in range(8)]


class PublishedOtherwise(Refusal):
    """At its target, the volume is published with other attributes, or another volume is."""


class Unserved(NamedTuple):
    """A filesystem at a volume's target that nobody serves yet: the descriptor of its /dev/fuse, and its record."""

    device: int
    mount: Mount


class Publication:
    """A volume that is published, with its sockets, and what nobody serves yet of an eager one."""

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
        """Keep the filesystem that is at the target for a FUSE program."""
        self._held = filesystem

    def lend(self) -> Unserved | None:
        """Return what is held, for one FUSE program at a time, until `take_back` or `hand_over`; None if there is none.

        The descriptor stays the property of this.
        """
        self._drop_what_was_begun()
        if self._held is None or self._is_lent:
            return None
        self._is_lent = True
        return self._held

    def take_back(self) -> None:
        """The program to which it was lent has not said that it serves."""
        self._is_lent = False
        if self._is_unwanted:
            self._let_go()
        self._drop_what_was_begun()

    def _drop_what_was_begun(self) -> None:
        """Let go of what no program can serve any more: one has begun, and has ended, or the connection was aborted."""
        if self._held and not self._is_lent and not _has_unread(self._held.device):
            self._let_go()
            self._volumes.note_taken(self.volume.target)

    def hand_over(self) -> None:
        """A FUSE program serves the filesystem from now on."""
        self._is_lent = False
        self._let_go()
        self._volumes.note_taken(self.volume.target)

    def end(self) -> None:
        """Let go of what is held, as soon as it is not lent any more."""
        self._is_unwanted = True
        if not self._is_lent:
            self._let_go()

    def _let_go(self) -> None:
        if self._held:
            os.close(self._held.device)
            self._held = None


def _has_unread(device: int) -> bool:
    """Whether a request waits in a /dev/fuse, where nobody has read any as long as the first one does."""
    waiting = select.poll()
    waiting.register(device, select.POLLIN)
    return any(events & select.POLLIN for _, events in waiting.poll(0))


#: Makes the call of who has connected to a volume's socket.
BeginIn = Callable[["Publications", Publication, Front, Channel], Call]


class Publications:
    """Publishes the volumes of the table `volumes`, and has `server` serve their sockets.

    Calls on those are begun by `begin`, and by `begin_old` on those of old clients.
    """

    def __init__(self, front: Front, volumes: Volumes, server: Server, begin: BeginIn, begin_old: BeginIn) -> None:
        self._front = front
        self._volumes = volumes
        self._server = server
        self._begin = (begin, begin_old)
        self._served: dict[bytes, Publication] = {}
        self._places = Places(_AT_ONCE, _FOR_A_POD)
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    def close(self) -> None:
        """Let go of all that is served; it stays published."""
        for publication in self._served.values():
            publication.end()
            for listener in publication.listeners:
                listener.close()

    # What is asked ---------------------------------------------------------------------------------------------

    async def publish(self, volume: Volume) -> None:
        """Make the volume available, or see to it that it still is. Raises Refusal; then it is as it was before."""
        await self._told("publish", volume.target, volume, self._publish(volume))

    async def unpublish(self, target: bytes) -> None:
        """Take away whatever volume is at `target`, if there is one. Raises Refusal."""
        await self._told("unpublish", target, self._volumes.find(target), self._unpublish(target))

    async def stat(self, target: bytes) -> Stated:
        """Return how full the volume is. Raises Refusal: ENOENT if there is none, ETIMEDOUT if it does not answer."""
        volume = self._volumes.find(target)
        if not volume:
            raise Refusal(ENOENT, b"no volume is published there")
        start = StartStat(self._seconds, target)
        async with self._operation(b"cannot ask the volume", volume, start) as operation:
            return await operation.expect(Stated)

    def targets_of(self, id: bytes) -> list[bytes]:
        """Return where the volume of that id is published."""
        return [volume.target for volume in self._volumes if volume.id == id]

    async def restore(self) -> None:
        """Publish again what was published when the last front ended; forget what is gone with its pod."""
        await asyncio.gather(*map(self._restore, self._volumes))

    async def _restore(self, volume: Volume) -> None:
        try:
            await self.publish(volume)
        except Refusal as refusal:
            if refusal.errno == ENOENT:
                with suppress(Refusal):  # it is in the log, and kubelet will ask for it
                    await self.unpublish(volume.target)
        except Exception as error:
            self._front.log(log.ERROR, f"internal error: {error!r}")

    # How it is done --------------------------------------------------------------------------------------------

    async def _publish(self, volume: Volume) -> str:
        """Return in a word what has been done. Raises Refusal."""
        policy.decide_eager_mount(b"", volume)  # a mistake in its options is not to be found out only by its user
        async with self._lock(volume.target):
            known = self._volumes.find(volume.target)
            self._check_place(volume, known)
            if not known:
                self._volumes.add(volume)  # before it is made: it has to be taken away even if this is killed now
            try:
                return "published" if await self._make(known or volume, () if known else _LOOK_AGAIN) else "unchanged"
            except Refusal:
                if not known:
                    await self._give_up(volume)
                raise

    def _check_place(self, volume: Volume, known: Volume | None) -> None:
        """Raise Refusal if another volume is where this one wants to be."""
        if known and known != volume:
            raise PublishedOtherwise(EEXIST, b"it is published there with other attributes, or another volume is")
        if twin := self._volumes.twin_of(volume):
            raise Refusal(
                EBUSY, b"only one pod may have the volume (ReadWriteOncePod), and pod %b has it" % twin.pod.encode()
            )
        if rival := self._volumes.rival_of(volume):
            raise Refusal(
                EEXIST,
                b"volume %b of the pod has its socket there, too: give one of them another fdPassingSocketName"
                % rival.id,
            )

    async def _make(self, volume: Volume, pauses: Iterable[float]) -> bool:
        """Have the mounter make what is missing of the volume, and serve it; whether anything was. Raises Refusal.

        Where kubelet's directories for it are not there yet, it is tried again after each of these pauses, in seconds.
        """
        known = self._served.get(volume.target)
        start = StartPublish(
            seconds=self._seconds,
            target=volume.target,
            directory=volume.directory,
            name=volume.name,
            old_clients=volume.old_clients,
            serving=known is not None,
            nonce=volume.nonce,
        )
        descriptors = await self._sockets(volume, start, pauses)
        publication = known or Publication(volume, self._volumes)
        self._served[volume.target] = publication
        if descriptors:
            await self._serve(publication, [socket.socket(fileno=each) for each in descriptors])
        if not publication.needs_filesystem:
            return bool(descriptors)
        await self._mount_eagerly(publication)
        return True

    async def _sockets(self, volume: Volume, start: StartPublish, pauses: Iterable[float]) -> list[int]:
        """Have the mounter make the volume, as `_make`; return its new sockets. While it pauses, this has no place of
        the mounter's."""
        for pause in pauses:
            try:
                return await self._sockets(volume, start, ())
            except Refusal as refusal:
                if refusal.errno != ENOENT:
                    raise
            await asyncio.sleep(pause)
        async with self._operation(b"cannot publish the volume", volume, start) as operation:
            _, descriptors = await operation.expect_with_descriptors(Published, _MOST_SOCKETS)
        return descriptors

    async def _give_up(self, volume: Volume) -> None:
        """Take away what has been made of a volume that can't be published."""
        try:
            await self._take_away(volume.target, volume)
            self._volumes.remove(volume.target)
        except Refusal as refusal:
            self._front.log(log.ERROR, "what was made of a volume can't be removed", **_named(volume.target, volume))
            self._front.log(log.ERROR, refusal.text.decode("utf-8", "replace"))

    async def _unpublish(self, target: bytes) -> str:
        """Return in a word what has been done. Raises Refusal."""
        async with self._lock(target):
            volume = self._volumes.find(target)
            await self._take_away(target, volume)
            self._volumes.remove(target)
            return "unpublished" if volume else "nothing there"

    async def _take_away(self, target: bytes, volume: Volume | None) -> None:
        """Serve the volume no more, and have the mounter remove it. Raises Refusal."""
        if publication := self._served.pop(target, None):
            await self._serve(publication, [])
            publication.end()
        socket = (volume.directory, volume.name, volume.nonce) if volume else (b"", b"", b"")
        start = StartUnpublish(self._seconds, target, *socket)
        async with self._operation(b"cannot unpublish the volume", volume, start) as operation:
            operation.patience = _PATIENCE  # several steps, each of which is bounded
            await operation.expect(Unpublished)

    async def _serve(self, publication: Publication, listeners: list[socket.socket]) -> None:
        """Serve the volume by these sockets, instead of those that it had."""
        for listener in publication.listeners:
            await self._server.leave(listener)
            listener.close()
        publication.listeners = listeners
        for listener, begin in zip(listeners, self._begin, strict=False):
            self._server.listen(listener, partial(begin, self, publication))

    # Filesystems that nobody serves yet ------------------------------------------------------------------------

    async def mount_now(self, publication: Publication) -> Unserved:
        """Have a filesystem of root's mounted at the target; its descriptor is the taker's to close.

        Raises Refusal: EBUSY if a FUSE program serves the volume.
        """
        volume = publication.volume
        id = secrets.token_hex(4)
        plan = policy.decide_eager_mount(id.encode(), volume)
        start = StartEager(self._seconds, volume.target, volume.group)
        async with self._operation(b"mount failed", volume, start) as operation:
            operation.say(plan)
            mounted, (device,) = await operation.expect_with_descriptors(Mounted, 1)
            try:
                operation.say(Keep())
                await operation.expect(Kept)
            except BaseException:
                os.close(device)
                raise
        mount = self._record(volume, id, plan, mounted)
        self._front.registry.add(mount)
        return Unserved(device, mount)

    async def _mount_eagerly(self, publication: Publication) -> None:
        try:
            publication.hold(await self.mount_now(publication))
        except Refusal as refusal:
            if refusal.errno != EBUSY:  # then a program has taken it that the last front did not live to note
                raise
            self._volumes.note_taken(publication.volume.target)

    def _record(self, volume: Volume, id: str, plan: MountPlan, mounted: Mounted) -> Mount:
        device = Device(mounted.device)
        return Mount(
            device=device,
            connection=self._front.registry.connection(device),
            namespace=MountNamespace(mounted.mount_namespace),
            uid=plan.uid,
            pid=0,
            command="",
            container="",
            mountpoint=b"",
            type=filesystem_type(plan.subtype),
            source=plan.source,
            mounted_at=time.time(),
            request=id,
            account=AccountName(""),
            volume=volume.target,
            mount_id=mounted.mount_id,
        )

    # Around it -------------------------------------------------------------------------------------------------

    @property
    def _seconds(self) -> int:
        return self._front.configuration.deadlines.operation

    def _lock(self, target: bytes) -> asyncio.Lock:
        """Return the lock of that target, which lives as long as somebody has it."""
        return self._locks.setdefault(target, asyncio.Lock())

    @asynccontextmanager
    async def _operation(self, prefix: bytes, volume: Volume | None, start: Start) -> AsyncIterator[Operation]:
        """Have a child of the mounter begin, when there is a place. What goes wrong then is a Refusal with `prefix`."""
        account = AccountName(f"pod {volume.pod}" if volume else "pod")
        try:
            await self._places.take(account, _PATIENCE)
        except TimeoutError:
            raise Refusal(EAGAIN, b"%b: too many operations of this pod are under way" % prefix) from None
        try:
            operation = await self._begin_in_place(start, account)
        except MounterFailed as error:
            self._front.log(log.ERROR, str(error))
            raise Refusal(EAGAIN, b"%b: the broker's mounter takes no requests" % prefix) from None
        begun = time.monotonic()
        try:
            yield operation
        except OperationFailed as error:
            text = f"{error.step}: {os.strerror(error.errno)}".encode()
            raise Refusal(error.errno, b"%b: %b" % (prefix, text)) from None
        except (OperationEnded, OperationRefused):
            late = time.monotonic() - begun > 0.9  # ended by its alarm, if it took that long
            problem = ETIMEDOUT if late else EIO
            raise Refusal(problem, b"%b: %b" % (prefix, os.strerror(problem).encode())) from None
        finally:
            self._places.give_back_after(account, operation)

    async def _begin_in_place(self, start: Start, account: AccountName) -> Operation:
        """Have a child begin in the account's place, which is given back if none does. Raises MounterFailed."""
        try:
            return await self._front.mounter.begin(start, [])
        except BaseException:
            self._places.give_back(account)
            raise

    async def _told(self, operation: str, target: bytes, volume: Volume | None, work: Coroutine[Any, Any, str]) -> None:
        """Have `work` done, whose result is a word; write the one record of it. Raises Refusal."""
        begun = time.monotonic()

        def tell(priority: int, result: str, **fields: log.Value) -> None:
            took = time.monotonic() - begun
            self._front.requests[f"{operation} {result}"] += 1
            self._front.latency.labels(operation).observe(took)
            if result != "unchanged":  # kubelet asks again and again
                milliseconds = round(1000 * took, 2)
                known = _named(target, volume)
                self._front.log(priority, f"{operation} {result}", milliseconds=milliseconds, **known, **fields)

        try:
            result = await work
        except Refusal as refusal:
            tell(log.NOTICE, "refused", errno=refusal.errno, text=refusal.text)
            raise
        tell(log.INFO, result)


def _named(target: bytes, volume: Volume | None) -> dict[str, log.Value]:
    """Return how the log calls a volume."""
    return {"target": target, "volume": volume.id, "pod": volume.pod} if volume else {"target": target}
