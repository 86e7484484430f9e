"""Volumes that kubelet publishes and unpublishes, with a mounter that the test plays."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from fusermount3_broker.front.call import Call
from fusermount3_broker.front.context import Front
from fusermount3_broker.front.decisions.limits import AccountName
from fusermount3_broker.front.model import Volume
from fusermount3_broker.front.mounter_client import Mounter, MounterFailed, Operation
from fusermount3_broker.front.published_volumes import Publication, Publications, PublishedOtherwise
from fusermount3_broker.front.server import Server
from fusermount3_broker.front.tables.volume_table import Volumes
from fusermount3_broker.messages import mounter
from fusermount3_broker.messages.refusal import Refusal
from fusermount3_broker.service.channel import Channel, HungUp
from tests.unit.fakes import full_disk, open_descriptors
from tests.unit.fronts import FrontWithoutMounter
from tests.unit.samples import VOLUME

EAGER = replace(VOLUME, eager=True)
DEVICE = 12


class FakeMounter:
    """Acts like the mounter's children, in a directory that is not kubelet's."""

    restarts = 0

    def __init__(self, directory: Path, connect: Callable[[int], int]) -> None:
        self.directory = directory
        self.started: list[mounter.Start] = []
        self.published: set[bytes] = set()
        self.let_go: list[bytes] = []
        """Targets of filesystems that were created and must not be attached."""
        self.busy: set[bytes] = set()
        """Targets on which a FUSE program serves."""
        self.failure: mounter.Failed | None = None
        self.silent: type | None = None
        """A child that is started with one of these records does not answer."""
        self.stalled: asyncio.Event | None = None
        """Until it is set, a child does not tell that it has attached a filesystem; the front waits only a moment."""
        self.slowly = asyncio.Event()
        """Until it is set, all children wait."""
        self.slowly.set()
        self.under_way: list[bytes] = []
        self.changing: set[bytes] = set()
        """Targets of children that are not only asking."""
        self.most_at_once = 0
        self._connect = connect
        self._children: set[asyncio.Task[None]] = set()

    async def begin(self, start: Any, descriptors: list[int]) -> Operation:
        assert not descriptors
        if self.failure and self.failure.step == b"begin":
            raise MounterFailed("no")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.started.append(start)
        child = asyncio.create_task(self._serve(start, Channel(theirs)))
        self._children.add(child)
        child.add_done_callback(self._children.discard)
        operation = Operation(ours, start.seconds)
        if self.stalled:
            operation.patience = 0.1
        return operation

    async def _serve(self, start: Any, talk: Channel) -> None:
        with talk:
            self.under_way.append(start.target)
            self.most_at_once = max(self.most_at_once, len(self.under_way))
            if not isinstance(start, mounter.StartStat):
                assert start.target not in self.changing, "one after the other"
                self.changing.add(start.target)
            await self.slowly.wait()
            await asyncio.sleep(0.01)  # time in which others might begin
            self.under_way.remove(start.target)
            if not isinstance(start, mounter.StartStat):
                self.changing.remove(start.target)
            if type(start) is self.silent:
                return
            if self.failure and not isinstance(start, mounter.StartUnpublish):
                talk.send(mounter.dump(self.failure))
                return
            await self._do(start, talk)
            await talk.closed()

    async def _do(self, start: Any, talk: Channel) -> None:
        if isinstance(start, mounter.StartPublish):
            self.published.add(start.target)
            sockets = self._listen(start)
            socket.send_fds(talk.socket, [mounter.dump(mounter.Published())], [each.fileno() for each in sockets])
            for each in sockets:
                each.close()
        elif isinstance(start, mounter.StartUnpublish):
            self.published.discard(start.target)
            talk.send(mounter.dump(mounter.Unpublished()))
        elif isinstance(start, mounter.StartEager):
            await self._mount(start, talk)
        else:
            talk.send(mounter.dump(mounter.Stated(start.target in self.published, True, 0, 1, 2, 3, 4, 5)))

    def _listen(self, start: mounter.StartPublish) -> list[socket.socket]:
        path = self.directory / start.name.decode()
        if start.serving and path.exists():
            return []
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(bytes(path))
        listener.listen()
        return [listener]

    async def _mount(self, start: mounter.StartEager, talk: Channel) -> None:
        wanted = mounter.load(await talk.receive())
        assert isinstance(wanted, mounter.MountPlan)
        if start.target in self.busy:
            talk.send(mounter.dump(mounter.Failed(errno.EBUSY, b"mount")))
            return
        self._connect(DEVICE)
        talk.send(mounter.dump(mounter.Made(DEVICE, 7, True)))
        if isinstance(mounter.load(await talk.receive()), mounter.LetGo):
            self.let_go.append(start.target)
            talk.send(mounter.dump(mounter.HasLetGo()))
            return
        if self.stalled:
            self.busy.add(start.target)
            await self.stalled.wait()
            with pytest.raises(HungUp):
                await talk.receive()
            self.busy.remove(start.target)
            return
        reading, writing = os.pipe()
        os.write(writing, b"FUSE_INIT")
        socket.send_fds(talk.socket, [mounter.dump(mounter.Mounted())], [reading])
        os.close(reading)
        os.close(writing)
        assert isinstance(mounter.load(await talk.receive()), mounter.Keep)
        talk.send(mounter.dump(mounter.Kept()))

    def targets(self, kind: type) -> list[bytes]:
        return [cast(Any, each).target for each in self.started if isinstance(each, kind)]


class SilentCall(Call):
    """Sends its caller the ID of the volume that the caller has reached."""

    def __init__(self, publication: Publication, front: Front, channel: Channel) -> None:
        super().__init__(front, channel)
        self._id = publication.volume.id

    async def serve(self) -> None:
        self._channel.send(self._id)


class Scene:
    """Publications and their dependencies; `restart` does what happens when the front is killed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.behind = FrontWithoutMounter(directory)
        self.front = self.behind.front
        self.sockets = directory / "sockets"
        self.sockets.mkdir()
        self.mounter = self._mounter()
        self.front.mounter = cast(Mounter, self.mounter)
        self._begin_front()

    def _mounter(self) -> FakeMounter:
        return FakeMounter(self.sockets, self._connect)

    def _connect(self, device: int) -> int:
        known = self.behind.fusectl.path / str(device)
        return self.behind.fusectl.reconnect(device) if known.exists() else self.behind.fusectl.connect(device)

    async def restart(self) -> None:
        for listener in list(self.server._listeners):
            self.server.leave(listener)
        self.publications.close()
        self.volumes.close()
        self._begin_front()

    def _begin_front(self) -> None:
        self.front.volumes = Volumes(self.directory / "state")
        self.server = Server(self.front)
        self.publications = Publications(self.front, self.front.volumes, self.server, self._begin, self._begin)

    def _begin(self, _: Publications, publication: Publication, front: Front, channel: Channel) -> Call:
        return SilentCall(publication, front, channel)

    @property
    def volumes(self) -> Volumes:
        assert self.front.volumes is not None
        return self.front.volumes

    async def reached(self, volume: Volume = VOLUME) -> bytes:
        """Return the ID of the volume behind the socket that has this volume's name."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(bytes(self.sockets / volume.name.decode()))
            return await Channel(connection).receive()

    async def refused(self, work: Awaitable[object]) -> Refusal:
        with pytest.raises(Refusal) as caught:
            await work
        return caught.value

    def held(self, volume: Volume = EAGER) -> Publication:
        return self.publications._served[volume.target]


Run = Callable[[Callable[[Scene], Awaitable[None]]], None]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return running(lambda: Scene(tmp_path))


def running(make: Callable[[], Scene]) -> Run:
    """Return a function that runs a test in an event loop, with a scene, and leaves nothing open."""

    @asynccontextmanager
    async def scene() -> AsyncIterator[Scene]:
        scene = make()
        yield scene
        for target in [volume.target for volume in scene.volumes]:
            scene.mounter.failure = scene.mounter.silent = None
            await scene.publications.unpublish(target)
        scene.publications.close()
        scene.volumes.close()
        scene.front.registry.close()
        os.close(scene.behind.fusectl.descriptor)
        while asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.sleep(0.01)

    def run_in_scene(test: Callable[[Scene], Awaitable[None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(30), scene() as made:
                await test(made)

        before = open_descriptors()
        asyncio.run(main())
        assert open_descriptors() == before

    return run_in_scene


def test_a_published_volume_is_written_down_and_served(run: Run) -> None:
    async def test(scene: Scene) -> None:
        await scene.publications.publish(VOLUME)
        assert list(scene.volumes) == [VOLUME]
        assert await scene.reached() == VOLUME.id
        assert scene.behind.logged == ["6 publish published"]

    run(test)


def test_a_volume_that_cannot_be_written_down_is_not_made(run: Run) -> None:
    async def test(scene: Scene) -> None:
        with full_disk():
            refusal = await scene.refused(scene.publications.publish(VOLUME))
        state = scene.directory / "state"
        text = f"the broker can't write its table of volumes in {state}: No space left on device"
        assert (refusal.errno, refusal.text) == (errno.ENOSPC, f"cannot publish the volume: {text}".encode())
        assert (list(scene.volumes), scene.mounter.started) == ([], [])
        assert scene.volumes.table.problem == text
        await scene.publications.publish(VOLUME)
        assert await scene.reached() == VOLUME.id

    run(test)


def test_a_volume_is_taken_away_although_that_cannot_be_written_down(run: Run) -> None:
    async def test(scene: Scene) -> None:
        await scene.publications.publish(VOLUME)
        with full_disk():
            await scene.publications.unpublish(VOLUME.target)
            assert list(scene.volumes) == []
            assert scene.mounter.published == set()
            scene.volumes.table.retry()
            assert scene.volumes.table.problem
        scene.volumes.table.retry()
        assert not scene.volumes.table.problem
        await scene.restart()
        assert list(scene.volumes) == []

    run(test)


def test_the_filesystem_of_an_eager_volume_is_not_mounted_if_it_cannot_be_written_down(run: Run) -> None:
    async def test(scene: Scene) -> None:
        scene.volumes.add(EAGER)
        with full_disk():
            refusal = await scene.refused(scene.publications.publish(EAGER))
        assert refusal.errno == errno.ENOSPC
        assert b"table of mounts" in refusal.text
        assert scene.mounter.let_go == [EAGER.target]
        assert len(scene.front.registry) == 0
        await scene.publications.publish(EAGER)
        assert len(scene.front.registry) == 1

    run(test)


def test_that_a_program_has_an_eager_volume_is_known_although_it_cannot_be_written_down(run: Run) -> None:
    async def test(scene: Scene) -> None:
        await scene.publications.publish(EAGER)
        assert scene.held().lend()
        with full_disk():
            scene.held().hand_over()
        assert scene.volumes.is_taken(EAGER.target)
        scene.volumes.table.retry()
        await scene.restart()
        assert scene.volumes.is_taken(EAGER.target)

    run(test)


def test_what_is_published_and_served_is_looked_at_and_left_alone(run: Run) -> None:
    async def test(scene: Scene) -> None:
        for _ in range(3):
            await scene.publications.publish(VOLUME)
        assert [cast(Any, each).serving for each in scene.mounter.started] == [False, True, True]
        assert await scene.reached() == VOLUME.id
        assert scene.behind.logged == ["6 publish published"], "kubelet asks all the time"
        assert scene.front.requests["publish unchanged"] == 2

    run(test)


def test_a_socket_that_is_gone_is_made_again_when_kubelet_asks(run: Run) -> None:
    async def test(scene: Scene) -> None:
        await scene.publications.publish(VOLUME)
        (scene.sockets / "fuse.sock").unlink()
        await scene.publications.publish(VOLUME)
        assert await scene.reached() == VOLUME.id
        assert scene.front.requests["publish published"] == 2

    run(test)


def test_a_volume_waits_a_little_for_what_kubelet_makes_at_the_same_time(run: Run) -> None:
    async def test(scene: Scene) -> None:
        scene.mounter.failure = mounter.Failed(errno.ENOENT, b"open the emptyDir")
        publishing = asyncio.create_task(scene.publications.publish(VOLUME))
        while len(scene.mounter.started) < 4:
            await asyncio.sleep(0.01)
        while scene.publications._operations._slots.taken(AccountName(f"pod {VOLUME.pod}")):
            await asyncio.sleep(0.001)
        assert not publishing.done(), "it waits without a place of the mounter's"
        scene.mounter.failure = None
        await publishing
        assert await scene.reached() == VOLUME.id
        assert scene.behind.logged[-1] == "6 publish published"
        assert scene.mounter.targets(mounter.StartUnpublish) == []

    run(test)


def test_nothing_is_left_of_a_volume_that_cannot_be_published(run: Run) -> None:
    async def test(scene: Scene) -> None:
        scene.mounter.failure = mounter.Failed(errno.ENOENT, b"open the emptyDir")
        refusal = await scene.refused(scene.publications.publish(VOLUME))
        assert refusal.errno == errno.ENOENT
        assert refusal.text == b"cannot publish the volume: open the emptyDir: No such file or directory"
        assert list(scene.volumes) == []
        assert scene.mounter.targets(mounter.StartUnpublish) == [VOLUME.target]
        assert len(scene.mounter.targets(mounter.StartPublish)) > 1

    run(test)


@pytest.mark.parametrize("silent", [mounter.StartPublish, mounter.StartEager])
def test_what_a_child_made_that_was_killed_is_taken_away(run: Run, silent: type) -> None:
    async def test(scene: Scene) -> None:
        scene.mounter.silent = silent
        assert (await scene.refused(scene.publications.publish(EAGER))).errno == errno.EIO
        assert list(scene.volumes) == []
        assert scene.mounter.published == set()
        with pytest.raises(OSError, match=r"refused|No such file"):
            await scene.reached()

    run(test)


def test_what_is_published_stays_if_it_cannot_be_looked_at(run: Run) -> None:
    async def test(scene: Scene) -> None:
        await scene.publications.publish(VOLUME)
        scene.mounter.failure = mounter.Failed(errno.EIO, b"make the target")
        await scene.refused(scene.publications.publish(VOLUME))
        assert list(scene.volumes) == [VOLUME]
        assert scene.mounter.targets(mounter.StartUnpublish) == []
        assert await scene.reached() == VOLUME.id

    run(test)


def test_a_volume_with_other_attributes_is_another_one(run: Run) -> None:
    async def test(scene: Scene) -> None:
        await scene.publications.publish(VOLUME)
        for other in (replace(VOLUME, id=b"csi-2"), replace(VOLUME, read_only=True)):
            assert isinstance(await scene.refused(scene.publications.publish(other)), PublishedOtherwise)
        assert list(scene.volumes) == [VOLUME]

    run(test)


def test_a_volume_does_not_take_anothers_socket(run: Run) -> None:
    async def test(scene: Scene) -> None:
        await scene.publications.publish(VOLUME)
        refusal = await scene.refused(scene.publications.publish(replace(VOLUME, target=b"second", id=b"csi-2")))
        assert b"volume csi-1" in refusal.text and b"fdPassingSocketName" in refusal.text
        assert await scene.reached() == VOLUME.id

    run(test)


def test_a_volume_that_is_to_be_alone_waits_until_the_other_pod_has_it_no_more(run: Run) -> None:
    async def test(scene: Scene) -> None:
        alone = replace(VOLUME, alone=True)
        of_another_pod = replace(alone, target=b"other", directory=b"elsewhere", name=b"other.sock")
        await scene.publications.publish(alone)
        await scene.publications.publish(alone)
        refusal = await scene.refused(scene.publications.publish(of_another_pod))
        assert (refusal.errno, VOLUME.pod.encode() in refusal.text) == (errno.EBUSY, True)
        await scene.publications.unpublish(alone.target)
        await scene.publications.publish(of_another_pod)
        assert list(scene.volumes) == [of_another_pod]

    run(test)


def test_a_mistake_in_the_options_is_told_before_anything_is_made(run: Run) -> None:
    async def test(scene: Scene) -> None:
        refusal = await scene.refused(scene.publications.publish(replace(VOLUME, options=b"nonsense")))
        assert refusal.errno == errno.EINVAL
        assert scene.mounter.started == []

    run(test)


def test_nobody_is_served_on_a_volume_that_is_gone(run: Run) -> None:
    async def test(scene: Scene) -> None:
        await scene.publications.publish(VOLUME)
        await scene.publications.unpublish(VOLUME.target)
        assert list(scene.volumes) == []
        with pytest.raises(ConnectionRefusedError):
            await scene.reached()
        await scene.publications.unpublish(VOLUME.target)
        assert scene.behind.logged[-2:] == ["6 unpublish unpublished", "6 unpublish nothing there"]

    run(test)


def test_what_is_not_known_is_looked_for_all_the_same(run: Run) -> None:
    async def test(scene: Scene) -> None:
        await scene.publications.unpublish(b"a/target")
        assert scene.mounter.started == [mounter.StartUnpublish(5, b"a/target", b"", b"", b"", borrowed=True)]

    run(test)


def test_what_cannot_be_taken_away_is_not_forgotten(run: Run) -> None:
    async def test(scene: Scene) -> None:
        await scene.publications.publish(VOLUME)
        scene.mounter.silent = mounter.StartUnpublish
        assert (await scene.refused(scene.publications.unpublish(VOLUME.target))).errno == errno.EIO
        assert list(scene.volumes) == [VOLUME]

    run(test)


def test_a_hundred_are_published_at_once_and_those_of_one_target_in_turn(run: Run) -> None:
    async def test(scene: Scene) -> None:
        pods = [
            replace(VOLUME, target=b"t%d" % number, directory=b"d%d" % number, name=b"s%d" % number, pod=f"pod{number}")
            for number in range(100)
        ]
        await asyncio.gather(*(scene.publications.publish(each) for each in pods for _ in range(2)))
        assert len(scene.volumes) == 100
        assert 1 < scene.mounter.most_at_once <= 32
        await asyncio.gather(*(scene.publications.unpublish(each.target) for each in pods for _ in range(2)))
        assert len(scene.volumes) == 0

    run(test)


def test_a_pod_that_holds_its_children_leaves_slots_to_others(run: Run) -> None:
    async def test(scene: Scene) -> None:
        scene.mounter.slowly.clear()
        greedy = [replace(VOLUME, target=b"t%d" % number, name=b"s%d" % number) for number in range(20)]
        publishing = [asyncio.create_task(scene.publications.publish(each)) for each in greedy]
        other = asyncio.create_task(scene.publications.publish(replace(VOLUME, target=b"other", pod="b", name=b"o")))
        while b"other" not in scene.mounter.under_way:
            await asyncio.sleep(0.01)
        assert scene.mounter.most_at_once < 20
        scene.mounter.slowly.set()
        await asyncio.gather(*publishing, other)

    run(test)


def test_a_mounter_that_takes_nothing_is_told_to_kubelet(run: Run) -> None:
    async def test(scene: Scene) -> None:
        scene.mounter.failure = mounter.Failed(errno.EIO, b"begin")
        assert (await scene.refused(scene.publications.publish(VOLUME))).errno == errno.EAGAIN
        assert "3 no" in scene.behind.logged
        scene.mounter.failure = None
        await scene.publications.publish(VOLUME)

    run(test)


def test_a_volume_is_asked_how_full_it_is(run: Run) -> None:
    async def test(scene: Scene) -> None:
        assert (await scene.refused(scene.publications.stat(VOLUME.target))).errno == errno.ENOENT
        await scene.publications.publish(VOLUME)
        assert (await scene.publications.stat(VOLUME.target)).total_bytes == 1

    run(test)


# After a front has ended


def test_the_next_front_serves_what_was_published(run: Run) -> None:
    async def test(scene: Scene) -> None:
        other = replace(VOLUME, target=b"other", name=b"other.sock", id=b"csi-2")
        for volume in (VOLUME, other):
            await scene.publications.publish(volume)
        await scene.restart()
        await scene.publications.restore()
        assert (await scene.reached(VOLUME), await scene.reached(other)) == (b"csi-1", b"csi-2")

    run(test)


def test_what_is_gone_with_its_pod_is_forgotten(run: Run) -> None:
    async def test(scene: Scene) -> None:
        await scene.publications.publish(VOLUME)
        await scene.restart()
        scene.mounter.failure = mounter.Failed(errno.ENOENT, b"open the emptyDir")
        await scene.publications.restore()
        assert list(scene.volumes) == []
        assert scene.mounter.targets(mounter.StartPublish) == [VOLUME.target] * 2, "it is not waited for"
        assert scene.mounter.targets(mounter.StartUnpublish) == [VOLUME.target]

    run(test)


def test_what_cannot_be_restored_now_is_left_as_it_is(run: Run) -> None:
    async def test(scene: Scene) -> None:
        await scene.publications.publish(VOLUME)
        await scene.restart()
        scene.mounter.failure = mounter.Failed(errno.EIO, b"make the target")
        await scene.publications.restore()
        assert list(scene.volumes) == [VOLUME]
        assert scene.mounter.targets(mounter.StartUnpublish) == [], "a program may serve it"

    run(test)


# Eager volumes


def test_an_eager_volume_has_a_filesystem_before_anybody_connects(run: Run) -> None:
    async def test(scene: Scene) -> None:
        await scene.publications.publish(EAGER)
        (mount,) = scene.front.registry
        assert (mount.device, mount.volume, mount.pid) == (DEVICE, EAGER.target, 0)
        await scene.publications.publish(EAGER)
        assert len(scene.mounter.targets(mounter.StartEager)) == 1

    run(test)


def test_its_filesystem_is_for_one_program_at_a_time(run: Run) -> None:
    async def test(scene: Scene) -> None:
        await scene.publications.publish(EAGER)
        publication = scene.held()
        lent = publication.lend()
        assert lent and os.fstat(lent.device)
        assert publication.lend() is None
        publication.take_back()
        assert publication.lend() == lent, "nobody has read from it"
        publication.hand_over()
        assert publication.lend() is None
        assert scene.volumes.is_taken(EAGER.target)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(lent.device)

    run(test)


def test_what_a_program_has_begun_to_serve_is_not_given_to_another(run: Run) -> None:
    async def test(scene: Scene) -> None:
        await scene.publications.publish(EAGER)
        lent = scene.held().lend()
        assert lent
        os.read(lent.device, 100)
        scene.held().take_back()
        assert scene.held().lend() is None
        assert scene.volumes.is_taken(EAGER.target)

    run(test)


def test_a_volume_that_ends_while_its_filesystem_is_lent_closes_it_afterwards(run: Run) -> None:
    async def test(scene: Scene) -> None:
        await scene.publications.publish(EAGER)
        publication = scene.held()
        lent = publication.lend()
        assert lent
        await scene.publications.unpublish(EAGER.target)
        os.fstat(lent.device)
        publication.take_back()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(lent.device)

    run(test)


def test_what_a_slow_child_has_attached_is_gone_before_kubelet_asks_again(run: Run) -> None:
    async def test(scene: Scene) -> None:
        scene.mounter.stalled = asyncio.Event()
        first = asyncio.create_task(scene.publications.publish(EAGER))
        while not scene.mounter.busy:
            await asyncio.sleep(0.01)
        second = asyncio.create_task(scene.publications.publish(EAGER))
        await asyncio.sleep(0.3)  # the front has given up waiting for the child
        assert scene.mounter.targets(mounter.StartEager) == [EAGER.target]
        scene.mounter.stalled.set()
        assert (await scene.refused(first)).errno == errno.EIO
        scene.mounter.stalled = None
        await second
        assert not scene.volumes.is_taken(EAGER.target)
        assert scene.held().lend()
        scene.held().take_back()

    run(test)


def test_what_a_child_of_a_killed_front_is_about_to_take_away_is_no_programs(run: Run) -> None:
    async def test(scene: Scene) -> None:
        await scene.publications.publish(EAGER)
        scene.mounter.busy.add(EAGER.target)
        await scene.restart()
        await scene.publications.restore()
        assert not scene.volumes.is_taken(EAGER.target)
        scene.mounter.busy.clear()
        await scene.publications.publish(EAGER)
        assert scene.held().lend()
        scene.held().take_back()

    run(test)


@pytest.mark.parametrize(("taken", "busy", "mounted"), [(False, False, 2), (True, False, 1), (False, True, 2)])
def test_what_a_killed_front_held_is_mounted_again_unless_a_program_has_it(
    run: Run, taken: bool, busy: bool, mounted: int
) -> None:
    async def test(scene: Scene) -> None:
        await scene.publications.publish(EAGER)
        if taken:
            scene.volumes.note_taken(EAGER.target)
        if busy:
            scene.mounter.busy.add(EAGER.target)
            (mount,) = scene.front.registry
            scene.front.registry.add(replace(mount, pid=1))
        await scene.restart()
        await scene.publications.restore()
        assert len(scene.mounter.targets(mounter.StartEager)) == mounted
        assert scene.volumes.is_taken(EAGER.target) == (taken or busy)
        assert await scene.reached(EAGER) == EAGER.id
        scene.mounter.busy.clear()

    run(test)
