"""Volumes that get the filesystem of a mount pod, with a mounter that the test plays."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from fusermount3_broker.front import borrowed_volumes, hung_connections, waiting_volumes
from fusermount3_broker.front.decisions.limits import AccountName
from fusermount3_broker.front.model import Device, Mount, MountNamespace, Volume
from fusermount3_broker.messages import mounter
from fusermount3_broker.service.channel import Channel
from tests.unit.front.test_published_volumes import FakeMounter, Scene, running
from tests.unit.samples import VOLUME

TRUSTED = b"fuse-mounts"
KEY, OF_IDENTITY = b"k" * 64, b"i" * 64
WELL = mounter.Stated(True, True, 0, 1, 2, 3, 4, 5)


def volume_of(pod: str, **changes: Any) -> Volume:
    """Return a volume of the only pod of that name."""
    return replace(
        VOLUME,
        target=f"pods/{pod}/volumes/kubernetes.io~csi/data/mount".encode(),
        id=pod.encode(),
        pod=pod,
        directory=f"pods/{pod}/volumes/kubernetes.io~empty-dir/sockets".encode(),
        name=f"{pod}.sock".encode(),
        **changes,
    )


SOURCE = volume_of("source", share=KEY, namespace=TRUSTED)
NEWER = volume_of("newer", share=KEY, namespace=TRUSTED)
APP = volume_of("app", namespace=b"shop", borrows=KEY + b"\n" + OF_IDENTITY + b"\n")
OTHER = volume_of("other", namespace=b"shop", borrows=APP.borrows, read_only=True)


class LendingMounter(FakeMounter):
    """Knows which emptyDirs there are, what each volume has, and which filesystems are served."""

    def __init__(self, directory: Path, connect: Callable[[int], int]) -> None:
        super().__init__(directory, connect)
        self.empty_dirs = {SOURCE.directory, NEWER.directory}
        self.has: dict[bytes, int] = {}
        """The device that each target has."""
        self.served: set[int] = set()
        self.hangs = False

    async def _do(self, start: Any, talk: Channel) -> None:
        if isinstance(start, mounter.StartPublish) and start.directory not in self.empty_dirs:
            talk.send(mounter.dump(mounter.Failed(errno.ENOENT, b"open the emptyDir")))
        elif isinstance(start, mounter.StartBorrow):
            talk.send(mounter.dump(self._borrow(start)))
        elif isinstance(start, mounter.StartStat):
            is_served = self.has.get(start.target) in self.served
            hung, dead = (WELL._replace(served=False, errno=each) for each in (errno.ETIMEDOUT, errno.ENOTCONN))
            published = start.target in self.published or start.target in self.has
            talk.send(mounter.dump((hung if self.hangs else WELL if is_served else dead)._replace(published=published)))
            while self.hangs:
                await asyncio.sleep(0.01)
                if not self.hangs:
                    talk.close()
        else:
            if isinstance(start, mounter.StartUnpublish):
                self.has.pop(start.target, None)
            await super()._do(start, talk)

    def _borrow(self, start: mounter.StartBorrow) -> mounter.Record:
        if self.has.get(start.source) != start.device:
            return mounter.Failed(errno.ENOENT, b"open the filesystem of the mount pod")
        if (there := self.has.get(start.target)) in self.served:
            assert there is not None
            return mounter.Borrowed(there, False)
        self.has[start.target] = start.device
        return mounter.Borrowed(start.device, True)


class LendingScene(Scene):
    lending: LendingMounter

    def _mounter(self) -> FakeMounter:
        self.front.mount_namespaces = frozenset({TRUSTED})
        self.lending = LendingMounter(self.sockets, self._connect)
        return self.lending

    def mount(self, source: Volume, device: int, *, answers: bool = True) -> Mount:
        """Have a FUSE program mount on the source and commit."""
        mount = Mount(
            device=Device(device),
            connection=self._connect(device),
            namespace=MountNamespace(7),
            uid=0,
            pid=11,
            command="s3fs",
            container="",
            mountpoint=b"/mnt",
            type="fuse",
            source=b"s3fs",
            mounted_at=1.0,
            request_id=f"{device}",
            account=AccountName("pod"),
            volume=source.target,
            share=source.share,
        )
        self.front.registry.add(mount)
        self.lending.has[source.target] = device
        if answers:
            self.lending.served.add(device)
        self.publications.borrowing.committed(source, mount)
        return mount

    def die(self, mount: Mount) -> None:
        """End the program; the filesystem stays, as it is still mounted."""
        self.lending.served.discard(mount.device)
        self.front.states.note_dead(mount.connection)
        self.front.shared_died(mount.share)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)

    def device(self, volume: Volume) -> int | None:
        return self.lending.has.get(volume.target)


Run = Callable[[Callable[[LendingScene], Awaitable[None]]], None]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(waiting_volumes, "LONGEST_WAIT", 0.3)
    monkeypatch.setattr(waiting_volumes, "LOOK_AGAIN", 0.1)
    monkeypatch.setattr(borrowed_volumes, "_LOOKS", [0.01])
    return cast(Run, running(lambda: LendingScene(tmp_path)))


async def refusal(scene: LendingScene, volume: Volume) -> tuple[int, bytes]:
    refused = await scene.refused(scene.publications.publish(volume))
    return refused.errno, refused.text


def not_ready(why: bytes) -> tuple[int, bytes]:
    return errno.EAGAIN, b"its mount pod is not ready: " + why


NONE = b"none on this node offers the volume"
NOT_MOUNTED = b"its FUSE program has not mounted the volume yet"
SILENT = b"its FUSE program does not answer"
RETIRES = b"it is about to end, and there is no other yet"


def test_all_that_use_a_volume_get_the_filesystem_of_its_mount_pod(run: Run) -> None:
    async def test(scene: LendingScene) -> None:
        await scene.publications.publish(SOURCE)
        mount = scene.mount(SOURCE, 5)
        for each in (APP, OTHER):
            await scene.publications.publish(each)
            assert scene.device(each) == 5
        assert list(scene.volumes) == [SOURCE, APP.as_borrower(), OTHER.as_borrower()]
        starts = [each for each in scene.mounter.started if isinstance(each, mounter.StartBorrow)]
        assert [each.read_only for each in starts] == [False, True]
        assert {(each.source, each.device, each.connection) for each in starts} == {
            (SOURCE.target, 5, mount.connection)
        }
        assert scene.front.borrowed == dict.fromkeys((APP.target, OTHER.target), mount.connection)
        await scene.publications.publish(APP)
        assert scene.mounter.targets(mounter.StartBorrow) == [APP.target, OTHER.target], "it has it"

    run(test)


def test_a_pod_waits_until_the_program_of_its_mount_pod_answers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_volumes, "LONGEST_WAIT", 20)
    monkeypatch.setattr(waiting_volumes, "LOOK_AGAIN", 20)

    async def test(scene: LendingScene) -> None:
        publishing = asyncio.create_task(scene.publications.publish(APP))
        await asyncio.sleep(0.1)
        await scene.publications.publish(SOURCE)
        mount = scene.mount(SOURCE, 5, answers=False)
        await asyncio.sleep(0.2)
        assert not publishing.done()
        assert scene.device(APP) is None
        scene.lending.served.add(mount.device)
        await publishing
        assert scene.device(APP) == 5

    run(test)


def test_a_pod_that_has_waited_too_long_is_told_why_and_leaves_nothing(run: Run) -> None:
    async def test(scene: LendingScene) -> None:
        assert await refusal(scene, APP) == not_ready(NONE)
        await scene.publications.publish(SOURCE)
        assert await refusal(scene, APP) == not_ready(NOT_MOUNTED)
        mount = scene.mount(SOURCE, 5, answers=False)
        assert await refusal(scene, APP) == not_ready(SILENT)
        scene.die(mount)
        assert await refusal(scene, APP) == not_ready(NOT_MOUNTED)
        assert (list(scene.volumes), scene.front.borrowed) == ([SOURCE], {})
        assert APP.target not in scene.mounter.published

    run(test)


def test_a_kubelet_that_is_started_again_and_asks_while_its_pods_emptydir_is_looked_for_waits(run: Run) -> None:
    async def test(scene: LendingScene) -> None:
        first = asyncio.create_task(refusal(scene, APP))
        await scene.until(lambda: scene.volumes.find(APP.target) is not None)
        assert await refusal(scene, APP) == await first == not_ready(NONE)

    run(test)


def test_a_hung_program_is_asked_once_and_offered_when_it_goes_on(run: Run) -> None:
    async def test(scene: LendingScene) -> None:
        await scene.publications.publish(SOURCE)
        scene.lending.hangs = True
        scene.mount(SOURCE, 5)
        assert await refusal(scene, APP) == not_ready(SILENT)
        assert scene.mounter.targets(mounter.StartStat) == [SOURCE.target]
        scene.lending.hangs = False
        await scene.publications.publish(APP)
        assert scene.device(APP) == 5

    run(test)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"share": OF_IDENTITY}, True),
        ({"namespace": b"shop"}, True),
        ({"namespace": b"another"}, False),
        ({"namespace": b""}, False),
        ({"share": b"x" * 64}, False),
    ],
)
def test_what_others_offer_is_not_believed(run: Run, changes: dict[str, Any], expected: bool) -> None:
    source = replace(SOURCE, **changes)

    async def test(scene: LendingScene) -> None:
        await scene.publications.publish(source)
        scene.mount(source, 5)
        if expected:
            await scene.publications.publish(APP)
        else:
            assert await refusal(scene, APP) == not_ready(NONE)
            assert scene.mounter.targets(mounter.StartBorrow) == []

    run(test)


def test_the_newest_that_is_served_is_given_and_a_mount_namespace_goes_first(run: Run) -> None:
    own = volume_of("own", share=KEY, namespace=b"shop")

    async def test(scene: LendingScene) -> None:
        scene.lending.empty_dirs.add(own.directory)
        await scene.publications.publish(own)
        scene.mount(own, 4)
        await scene.publications.publish(APP)
        assert scene.device(APP) == 4
        await scene.publications.unpublish(APP.target)
        await scene.publications.publish(SOURCE)
        scene.mount(SOURCE, 5)
        await scene.publications.publish(NEWER)
        await scene.publications.unpublish(own.target)
        await scene.publications.publish(own)
        scene.mount(own, 6)
        await scene.publications.publish(APP)
        assert scene.device(APP) == 5, "the newer one is not served"
        scene.mount(NEWER, 7)
        await scene.publications.publish(OTHER)
        assert (scene.device(APP), scene.device(OTHER)) == (5, 7), "who has one keeps it"

    run(test)


def test_a_pod_with_an_emptydir_for_the_socket_has_a_program_of_its_own(run: Run) -> None:
    async def test(scene: LendingScene) -> None:
        publishing = asyncio.create_task(scene.publications.publish(APP))
        await asyncio.sleep(0.15)
        scene.lending.empty_dirs.add(APP.directory)
        await publishing
        assert list(scene.volumes) == [APP]
        assert await scene.reached(APP) == APP.id
        await scene.publications.publish(SOURCE)
        scene.mount(SOURCE, 5)
        await scene.publications.publish(APP)
        assert scene.device(APP) is None

    run(test)


def test_who_has_a_dead_filesystem_gets_the_next_one(run: Run) -> None:
    async def test(scene: LendingScene) -> None:
        await scene.publications.publish(SOURCE)
        first = scene.mount(SOURCE, 5)
        for each in (APP, OTHER):
            await scene.publications.publish(each)
        scene.die(first)
        await scene.publications.publish(APP)
        assert scene.device(APP) == 5, "there is no other yet, and that is no reason for kubelet to complain"
        second = scene.mount(SOURCE, 6)
        await scene.until(lambda: (scene.device(APP), scene.device(OTHER)) == (6, 6))
        await scene.until(lambda: set(scene.front.borrowed.values()) == {second.connection})
        last = [each for each in scene.mounter.started if isinstance(each, mounter.StartBorrow)][-1]
        assert last.former == b"5 %d\n" % first.connection
        assert scene.behind.logged[-2:] == ["6 a volume has the filesystem of its mount pod again"] * 2

    run(test)


def test_a_program_that_is_back_before_its_end_was_noticed_is_given_too(run: Run) -> None:
    async def test(scene: LendingScene) -> None:
        await scene.publications.publish(SOURCE)
        first = scene.mount(SOURCE, 5)
        await scene.publications.publish(APP)
        scene.lending.served.discard(first.device)
        scene.mount(SOURCE, 6)
        await scene.until(lambda: scene.device(APP) == 6)
        assert scene.front.states.is_dead(first.connection)

    run(test)


def test_the_mount_pod_that_comes_after_one_that_is_gone_heals_its_volumes(run: Run) -> None:
    async def test(scene: LendingScene) -> None:
        await scene.publications.publish(SOURCE)
        first = scene.mount(SOURCE, 5)
        await scene.publications.publish(APP)
        await scene.publications.unpublish(SOURCE.target)
        await scene.publications.publish(APP)
        assert scene.device(APP) == 5, "its program still serves it"
        await scene.publications.publish(NEWER)
        scene.mount(NEWER, 6)
        await asyncio.sleep(0.1)
        assert scene.device(APP) == 5
        scene.die(first)
        await scene.until(lambda: scene.device(APP) == 6)

    run(test)


def test_only_the_removal_of_a_source_may_abort(run: Run) -> None:
    async def test(scene: LendingScene) -> None:
        await scene.publications.publish(SOURCE)
        scene.mount(SOURCE, 5)
        await scene.publications.publish(APP)
        await scene.publications.unpublish(APP.target)
        await scene.publications.unpublish(SOURCE.target)
        starts = [each for each in scene.mounter.started if isinstance(each, mounter.StartUnpublish)]
        ends = [(each.target, each.borrowed) for each in starts if each.target != APP.target or each.borrowed]
        assert ends == [(APP.target, True), (SOURCE.target, False)]
        await scene.publications.unpublish(b"unknown")
        assert scene.mounter.started[-1] == mounter.StartUnpublish(5, b"unknown", b"", b"", b"", borrowed=True)
        assert scene.front.borrowed == {}

    run(test)


def test_who_waits_when_it_is_unpublished_gets_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_volumes, "LONGEST_WAIT", 20)

    async def test(scene: LendingScene) -> None:
        publishing = asyncio.create_task(scene.publications.publish(APP))
        await asyncio.sleep(0.1)
        await scene.publications.unpublish(APP.target)
        refused = await scene.refused(publishing)
        assert refused.errno == errno.EAGAIN
        await scene.publications.publish(SOURCE)
        scene.mount(SOURCE, 5)
        await asyncio.sleep(0.1)
        assert list(scene.volumes) == [SOURCE]

    run(test)


def test_a_mount_pod_that_is_about_to_end_gets_no_new_users(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who needs its filesystem waits for another one; who has it keeps it."""

    async def test(scene: LendingScene) -> None:
        await scene.publications.publish(SOURCE)
        scene.mount(SOURCE, 5)
        await scene.publications.publish(APP)
        assert scene.publications.borrowing.retire(SOURCE) == 1
        assert await refusal(scene, OTHER) == not_ready(RETIRES)
        assert scene.device(APP) == 5
        monkeypatch.setattr(waiting_volumes, "LONGEST_WAIT", 20)
        waiting = asyncio.create_task(scene.publications.publish(OTHER))
        await asyncio.sleep(0.1)
        await scene.publications.publish(NEWER)
        scene.mount(NEWER, 6)
        await waiting
        assert (scene.device(APP), scene.device(OTHER)) == (5, 6)

    run(test)


def test_an_older_mount_pod_is_chosen_while_the_newest_is_about_to_end(run: Run) -> None:
    async def test(scene: LendingScene) -> None:
        for source, device in ((SOURCE, 5), (NEWER, 6)):
            await scene.publications.publish(source)
            scene.mount(source, device)
        await asyncio.sleep(0.1)
        scene.publications.borrowing.retire(NEWER)
        await scene.publications.publish(APP)
        assert scene.device(APP) == 5

    run(test)


def test_a_mount_pod_that_does_not_end_gets_users_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Because its program was only started again, or because it asks no more."""

    async def test(scene: LendingScene) -> None:
        await scene.publications.publish(SOURCE)
        first = scene.mount(SOURCE, 5)
        await asyncio.sleep(0.1)
        scene.publications.borrowing.retire(SOURCE)
        assert await refusal(scene, APP) == not_ready(RETIRES)
        scene.die(first)
        scene.mount(SOURCE, 6)
        await scene.publications.publish(APP)
        assert scene.device(APP) == 6
        monkeypatch.setattr(borrowed_volumes, "RETIRING", 0.1)
        scene.publications.borrowing.retire(SOURCE)
        await asyncio.sleep(0.15)
        await scene.publications.publish(OTHER)
        assert scene.device(OTHER) == 6

    run(test)


def test_who_is_about_to_get_a_filesystem_counts_as_its_user(run: Run) -> None:
    """The pod whose program is told that it is unused ends at once."""

    async def test(scene: LendingScene) -> None:
        await scene.publications.publish(SOURCE)
        scene.mount(SOURCE, 5)
        await asyncio.sleep(0.1)
        counted: list[int] = []
        borrow = scene.lending._borrow

        def counting(start: mounter.StartBorrow) -> mounter.Record:
            counted.append(scene.publications.borrowing.retire(SOURCE))
            return borrow(start)

        scene.lending._borrow = counting  # type: ignore[method-assign]
        await scene.publications.publish(APP)
        assert counted == [1]
        assert scene.publications.borrowing.retire(SOURCE) == 1

    run(test)


def test_a_mount_pod_is_unused_when_nobody_has_its_filesystem_any_more(run: Run) -> None:
    async def test(scene: LendingScene) -> None:
        users = scene.publications.borrowing.retire
        await scene.publications.publish(SOURCE)
        await scene.publications.publish(NEWER)
        assert users(SOURCE) == 0
        scene.mount(SOURCE, 5)
        for each in (APP, OTHER):
            await scene.publications.publish(each)
        assert users(SOURCE) == 2
        has, scene.front.borrowed = scene.front.borrowed, {}
        assert users(SOURCE) == 2, "a front that has just started does not know it yet"
        scene.front.borrowed = has
        await scene.publications.unpublish(APP.target)
        assert users(SOURCE) == 1
        scene.mount(NEWER, 6)
        await scene.publications.publish(APP)
        assert (users(SOURCE), users(NEWER)) == (1, 1)
        assert users(volume_of("without", namespace=TRUSTED)) == 0

    run(test)


def test_what_its_program_has_unmounted_ends_when_no_other_pod_has_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the program has ended: a filesystem that is dead can't be ended."""
    aborted: list[int] = []

    async def abort(_front: object, mount: Mount, _reason: str) -> None:
        aborted.append(mount.device)

    monkeypatch.setattr(hung_connections, "abort", abort)

    async def test(scene: LendingScene) -> None:
        borrowing = scene.publications.borrowing
        await scene.publications.publish(SOURCE)
        mount = scene.mount(SOURCE, 5)
        await scene.publications.publish(APP)
        borrowing.unmounted(SOURCE, mount)
        await scene.publications.unpublish(APP.target)
        scene.lending.served.discard(5)
        asked = len(scene.lending.started)
        borrowing.unmounted(SOURCE, mount)
        await scene.until(lambda: len(scene.lending.started) > asked and not borrowing._tasks)
        assert aborted == []
        scene.lending.served.add(5)
        borrowing.unmounted(SOURCE, mount)
        await scene.until(lambda: aborted == [5])
        await scene.publications.publish(NEWER)
        newer = scene.mount(NEWER, 6)
        await scene.publications.publish(APP)
        borrowing.unmounted(NEWER, newer)
        await scene.publications.unpublish(APP.target)
        assert borrowing.retire(NEWER) == 0
        await scene.until(lambda: aborted == [5, 6])

    run(test)


def test_a_later_front_knows_who_has_what(run: Run) -> None:
    async def test(scene: LendingScene) -> None:
        await scene.publications.publish(SOURCE)
        first = scene.mount(SOURCE, 5)
        await scene.publications.publish(APP)
        scene.lending.has.pop(OTHER.target, None)
        scene.volumes.add(OTHER.as_borrower())
        await scene.restart()
        scene.front.borrowed.clear()
        await scene.publications.restore()
        assert list(scene.volumes) == [SOURCE, APP.as_borrower()], "what the last front had only begun is forgotten"
        await scene.until(lambda: scene.front.borrowed == {APP.target: first.connection})
        scene.die(first)
        scene.mount(SOURCE, 6)
        await scene.until(lambda: scene.device(APP) == 6)

    run(test)
