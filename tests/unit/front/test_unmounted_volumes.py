"""Filesystems that their FUSE programs have unmounted: when they end. The mounter is the test."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest

from fusermount3_broker.front import unmounted_volumes
from fusermount3_broker.front.mounter_client import Mounter, Operation
from fusermount3_broker.front.unmounted_volumes import UnmountedVolumes
from fusermount3_broker.front.volume_operations import VolumeOperations
from fusermount3_broker.messages import mounter
from tests.unit.fronts import FrontWithoutMounter
from tests.unit.samples import VOLUME

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

DEVICE = 12


class Scene:
    """A volume whose FUSE program has unmounted; `answers` is what the mounter finds in containers, look by look."""

    def __init__(self, directory: Path) -> None:
        self.behind = FrontWithoutMounter(directory)
        self.front = self.behind.front
        self.front.mounter = cast(Mounter, self)
        mount = self.front.registry.find(self.behind.mount(DEVICE))
        assert mount
        self.mount = replace(mount, volume=VOLUME.target, type="fuse.x", source=b"s")
        self.front.registry.add(self.mount)
        self.answers: list[bytes | None] = []
        self.started: list[Any] = []
        self.volumes = UnmountedVolumes(self.front, VolumeOperations(self.front))

    async def begin(self, start: Any, _descriptors: list[int]) -> Operation:
        self.started.append(start)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            if isinstance(start, mounter.StartAbort):
                theirs.send(mounter.dump(mounter.Aborted()))
            elif (answer := self.answers.pop(0)) is not None:
                theirs.send(mounter.dump(mounter.Recognized(answer)))
        return Operation(ours, 1)

    def looks(self) -> list[Any]:
        return [each for each in self.started if isinstance(each, mounter.StartFindInContainers)]

    def is_aborted(self) -> bool:
        return any(isinstance(each, mounter.StartAbort) for each in self.started)

    async def over(self) -> None:
        while len(self.volumes):
            await asyncio.sleep(0.01)


def run(directory: Path, body: Callable[[Scene], Awaitable[None]]) -> None:
    async def running() -> None:
        scene = Scene(directory)
        async with asyncio.timeout(30):
            await body(scene)
            scene.volumes.end()
            await asyncio.sleep(0.1)
        scene.front.registry.close()
        os.close(scene.behind.fusectl.descriptor)

    asyncio.run(running())


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unmounted_volumes, "_SOON", (0.0, 0.01))
    monkeypatch.setattr(unmounted_volumes, "_LATER", 0.02)


def test_the_filesystem_ends_as_soon_as_no_container_has_it(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        scene.answers = [b"12\n", None, b"12\n", b"12\n", b""]
        scene.volumes.unmounted(VOLUME, scene.mount)
        await scene.over()
        start = mounter.StartFindInContainers(5, VOLUME.target, DEVICE, b"fuse.x", b"s", scene.mount.namespace)
        assert scene.looks() == [start] * 5
        assert scene.started[-1] == mounter.StartAbort(5, DEVICE, scene.mount.connection, 0)
        assert scene.front.states.is_dead(scene.mount.connection)

    run(tmp_path, body)


@pytest.mark.parametrize("end", ["dead", "gone", "forgotten"])
def test_nothing_is_done_when_it_has_ended_or_the_volume_has_another(tmp_path: Path, end: str) -> None:
    async def body(scene: Scene) -> None:
        scene.answers = [b"12\n"] * 1000
        scene.volumes.unmounted(VOLUME, scene.mount)
        while not scene.looks():
            await asyncio.sleep(0.01)
        if end == "dead":
            scene.front.states.note_dead(scene.mount.connection)
        elif end == "gone":
            scene.behind.fusectl.disconnect(DEVICE)
        else:
            scene.volumes.forget(VOLUME.target)
        await scene.over()
        assert not scene.is_aborted()

    run(tmp_path, body)
