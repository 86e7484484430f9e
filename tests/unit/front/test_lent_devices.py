"""Block volumes that get the device of a mount pod, with a mounter that the test plays."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from fusermount3_broker.front import lent_devices, waiting_volumes
from fusermount3_broker.front.decisions.limits import AccountName
from fusermount3_broker.front.lent_devices import Offer
from fusermount3_broker.front.model import Volume
from fusermount3_broker.front.mounter_client import Operation
from fusermount3_broker.messages import mounter
from fusermount3_broker.service.channel import Channel
from tests.unit.fakes import open_descriptors
from tests.unit.front.test_borrowed_volumes import KEY, NONE, RETIRES, TRUSTED, not_ready, volume_of
from tests.unit.front.test_published_volumes import FakeMounter, Scene, running

SOURCE = volume_of("source", share=KEY, namespace=TRUSTED, capacity=1024)
APP = volume_of("app", namespace=b"shop", borrows=KEY + b"\n", block=True)
READER = volume_of("reader", namespace=b"shop", borrows=KEY + b"\n", block=True, read_only=True)
DISK = 1792


class LendingMounter(FakeMounter):
    """Knows which device each volume has."""

    def __init__(self, directory: Path, connect: Callable[[int], int]) -> None:
        super().__init__(directory, connect)
        self.has: dict[bytes, int] = {}
        self.gone: set[int] = set()
        """The devices that are others now."""
        self._node = -1

    async def begin(self, start: Any, descriptors: list[int]) -> Operation:
        if isinstance(start, mounter.StartLend):
            (self._node,) = descriptors
            descriptors = []
        return await super().begin(start, descriptors)

    async def _do(self, start: Any, talk: Channel) -> None:
        if isinstance(start, mounter.StartLend):
            os.fstat(self._node)
            self.has[start.target] = DISK
            talk.send(mounter.dump(mounter.Lent()))
        elif isinstance(start, mounter.StartStat):
            has = self.has.get(start.target)
            problem = errno.ENODEV if has in self.gone else 0
            said = mounter.Stated(has is not None, has is not None and not problem, problem, 5, 0, 0, 0, 0)
            talk.send(mounter.dump(said))
        else:
            if isinstance(start, mounter.StartUnpublish):
                self.has.pop(start.target, None)
            await super()._do(start, talk)


class LendingScene(Scene):
    lending: LendingMounter

    def _mounter(self) -> FakeMounter:
        self.front.mount_namespaces = frozenset({TRUSTED})
        self.lending = LendingMounter(self.sockets, self._connect)
        return self.lending

    def offer(self, source: Volume = SOURCE, *, read_only: bool = False) -> socket.socket:
        """Have a program offer the device; return its end of the connection."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        node = os.open("/dev/null", os.O_PATH)
        said = mounter.Offered(DISK, 1024, read_only)
        self.publications.lending.offer(Offer(source, said, node, Channel(theirs), AccountName("pod")))
        return ours

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)

    async def problem(self, volume: Volume) -> tuple[int, bytes]:
        refused = await self.refused(self.publications.publish(volume))
        return refused.errno, refused.text


Run = Callable[[Callable[[LendingScene], Awaitable[None]]], None]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(waiting_volumes, "LONGEST_WAIT", 0.3)
    return cast(Run, running(lambda: LendingScene(tmp_path)))


NO_DEVICE = b"it offers no device yet"


def test_a_volume_gets_the_device_while_it_is_offered(run: Run) -> None:
    async def test(scene: LendingScene) -> None:
        assert await scene.problem(APP) == not_ready(NONE)
        await scene.publications.publish(SOURCE)
        assert await scene.problem(APP) == not_ready(NO_DEVICE)
        before = open_descriptors()
        with scene.offer():
            assert scene.publications.lending.is_offered(SOURCE.target)
            await scene.publications.publish(APP)
            await scene.publications.publish(APP)
            assert scene.mounter.targets(mounter.StartLend) == [APP.target], "it has it"
        assert not scene.publications.lending.is_offered(SOURCE.target)
        await scene.until(lambda: open_descriptors() == before)
        await scene.publications.publish(APP)
        assert await scene.problem(READER) == not_ready(NO_DEVICE)
        assert (scene.lending.has, scene.publications.borrowing.retire(SOURCE)) == ({APP.target: DISK}, 1)
        await scene.publications.unpublish(APP.target)
        assert (scene.lending.has, scene.publications.borrowing.retire(SOURCE)) == ({}, 0)

    run(test)


def test_a_mount_pod_that_is_about_to_end_lends_its_device_to_nobody_else(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(scene: LendingScene) -> None:
        await scene.publications.publish(SOURCE)
        with scene.offer():
            assert scene.publications.lending.retire(SOURCE.target) == 0
            assert await scene.problem(APP) == not_ready(RETIRES)
            monkeypatch.setattr(lent_devices, "RETIRING", 0)
            scene.publications.lending.retire(SOURCE.target)
            await scene.publications.publish(APP)

    run(test)


def test_who_waits_gets_it_as_soon_as_it_is_offered(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_volumes, "LONGEST_WAIT", 20)
    monkeypatch.setattr(waiting_volumes, "LOOK_AGAIN", 20)

    async def test(scene: LendingScene) -> None:
        await scene.publications.publish(SOURCE)
        publishing = asyncio.create_task(scene.publications.publish(APP))
        await asyncio.sleep(0.05)
        with scene.offer():
            await publishing
            assert scene.lending.has == {APP.target: DISK}
            await scene.publications.unpublish(SOURCE.target)
            assert not scene.publications.lending.is_offered(SOURCE.target)

    run(test)


def test_who_waits_when_it_is_unpublished_gets_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_volumes, "LONGEST_WAIT", 20)

    async def test(scene: LendingScene) -> None:
        await scene.publications.publish(SOURCE)
        publishing = asyncio.create_task(scene.problem(APP))
        await asyncio.sleep(0.05)
        await scene.publications.unpublish(APP.target)
        assert await publishing == not_ready(NO_DEVICE)

    run(test)


def test_a_device_for_readers_is_for_readers_only(run: Run) -> None:
    async def test(scene: LendingScene) -> None:
        await scene.publications.publish(SOURCE)
        with scene.offer(read_only=True):
            assert (await scene.problem(APP))[0] == errno.EROFS
            await scene.publications.publish(READER)
            assert scene.lending.has == {READER.target: DISK}
            assert list(scene.volumes) == [SOURCE, READER.as_borrower()]

    run(test)


def test_what_others_offer_is_not_believed(run: Run) -> None:
    foreign = replace(SOURCE, namespace=b"another")

    async def test(scene: LendingScene) -> None:
        await scene.publications.publish(foreign)
        with scene.offer(foreign):
            assert await scene.problem(APP) == not_ready(NONE)

    run(test)


def test_a_device_that_is_another_one_now_is_taken_away(run: Run) -> None:
    async def test(scene: LendingScene) -> None:
        await scene.publications.publish(SOURCE)
        with scene.offer():
            await scene.publications.publish(APP)
        scene.lending.gone.add(DISK)
        assert await scene.problem(APP) == not_ready(b"the device that it had offered is gone")
        assert scene.lending.has == {}
        scene.lending.gone.clear()
        with scene.offer():
            await scene.publications.publish(APP)
        assert scene.lending.has == {APP.target: DISK}

    run(test)
