"""When containers are looked at again for former filesystems of a volume, and for which."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fusermount3_broker.front import restored_containers
from fusermount3_broker.front.context import Front
from fusermount3_broker.front.decisions.limits import AccountName
from fusermount3_broker.front.model import Device, Mount, MountNamespace
from fusermount3_broker.front.mount_states import States
from fusermount3_broker.front.mounter_client import Operation
from fusermount3_broker.front.restored_containers import RestoredContainers, former
from fusermount3_broker.front.tables.mount_table import Registry
from fusermount3_broker.messages import mounter
from tests.unit.fakes import FakeFusectl
from tests.unit.samples import VOLUME

TARGET = b"pods/1/mount"
OWN, HOSTS = 7, 8


class Scene:
    """A front with a table of mounts, and a mounter that notes what it is told."""

    def __init__(self, directory: Path) -> None:
        self.fusectl = FakeFusectl(directory / "fusectl")
        self.registry = Registry(directory / "state", self.fusectl.descriptor)
        self.states = States()
        self.started: list[mounter.StartRestore] = []
        self.answers = True
        self.held: list[socket.socket] = []
        deadlines = SimpleNamespace(operation=5)
        self.front: Front = cast(
            "Front",
            SimpleNamespace(
                registry=self.registry,
                states=self.states,
                mounter=self,
                configuration=SimpleNamespace(deadlines=deadlines),
                log=lambda *_: None,
                is_live=lambda mount: Front.is_live(self.front, mount),
            ),
        )

    async def begin(self, start: mounter.StartRestore, _descriptors: list[int]) -> Operation:
        self.started.append(start)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if self.answers:
            theirs.send(mounter.dump(mounter.Restored()))
            theirs.close()
        else:
            self.held.append(theirs)
        return Operation(ours, 1)

    def mount(self, device: int, mountpoint: bytes = b"/mnt", volume: bytes = TARGET) -> Mount:
        mount = Mount(
            device=Device(device),
            connection=self.fusectl.connect(device),
            namespace=MountNamespace(OWN if mountpoint else HOSTS),
            uid=1000,
            pid=1,
            command="sshfs",
            container="",
            account=AccountName("a"),
            mountpoint=mountpoint,
            type="fuse.sshfs",
            source=b"s",
            mounted_at=0.0,
            request_id=f"{device:08x}",
            volume=volume,
        )
        self.registry.add(mount)
        return mount


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(restored_containers, "PAUSES", (0.01, 0.02, 0.03))
    return Scene(tmp_path)


def run(scene: Scene, body: Callable[[RestoredContainers], Coroutine[Any, Any, None]]) -> None:
    async def running() -> None:
        containers = RestoredContainers(scene.front)
        try:
            await body(containers)
        finally:
            containers.end()
            for each in scene.held:
                each.close()

    asyncio.run(running())


def test_former_filesystems_are_those_of_the_volume_that_still_exist(scene: Scene) -> None:
    first, gone, other, newest = scene.mount(1), scene.mount(2), scene.mount(3, volume=b"pods/2/mount"), scene.mount(4)
    scene.fusectl.disconnect(gone.device)
    lines = {each: b"%d %d\n" % (each.device, each.connection) for each in (first, newest, other)}
    assert former(scene.front, TARGET) == lines[newest] + lines[first]
    assert former(scene.front, TARGET, newest) == lines[first]
    assert former(scene.front, b"pods/3/mount") == b""


def test_there_are_at_most_as_many_as_fit_into_a_record(scene: Scene) -> None:
    for device in range(1, 100):
        scene.mount(device)
    lines = former(scene.front, TARGET).splitlines()
    assert (len(lines), lines[0].split()[0]) == (64, b"99")


@pytest.mark.parametrize(("mountpoint", "eager"), [(b"/mnt", False), (b"", False), (b"", True)])
def test_containers_are_looked_at_a_few_times(scene: Scene, mountpoint: bytes, eager: bool) -> None:
    first, mount = scene.mount(1), scene.mount(2, mountpoint)

    async def body(containers: RestoredContainers) -> None:
        containers.look_at(mount, replace(VOLUME, eager=eager))
        await asyncio.sleep(0.5)

    run(scene, body)
    line = b"1 %d\n" % first.connection
    but = OWN if mountpoint else 0  # it is left what it has mounted itself
    assert scene.started == [mounter.StartRestore(5, TARGET, 2, mount.connection, but, line, eager)] * 3


@pytest.mark.parametrize("end", ["dead", "gone", "unpublished", "next"])
def test_nothing_is_done_for_a_filesystem_that_is_not_the_volumes_any_more(scene: Scene, end: str) -> None:
    mount = scene.mount(1)

    async def body(containers: RestoredContainers) -> None:
        containers.look_at(mount, VOLUME)
        if end == "dead":
            scene.states.note_dead(mount.connection)
        elif end == "gone":
            scene.fusectl.disconnect(mount.device)
        elif end == "unpublished":
            containers.forget(TARGET)
        else:
            containers.look_at(scene.mount(2), VOLUME)
        await asyncio.sleep(0.3)

    run(scene, body)
    assert {each.device for each in scene.started} == ({2} if end == "next" else set())


async def look_at_another_while_one_hangs(scene: Scene, containers: RestoredContainers, pause: float) -> None:
    """Have the mounter answer again, after so many seconds without, for a volume of another pod."""
    await asyncio.sleep(pause)
    assert len(scene.started) == 1
    scene.answers = True
    containers.look_at(scene.mount(20, volume=b"pods/2/mount"), replace(VOLUME, pod="other"))
    await asyncio.sleep(0.3)


def test_volumes_of_one_pod_hold_one_slot_and_others_have_theirs(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restored_containers, "_PATIENCE", 0.1)
    scene.answers = False

    async def body(containers: RestoredContainers) -> None:
        for number in range(1, 11):
            containers.look_at(scene.mount(number, volume=b"target%d" % number), VOLUME)
        await look_at_another_while_one_hangs(scene, containers, 0.5)

    run(scene, body)
    assert [each.device for each in scene.started][1:] == [20, 20, 20]


def test_a_child_that_does_not_end_is_the_last_one_of_its_volume(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restored_containers, "_PATIENCE", 0.1)
    scene.answers = False

    async def body(containers: RestoredContainers) -> None:
        containers.look_at(scene.mount(1), VOLUME)
        await look_at_another_while_one_hangs(scene, containers, 1)

    run(scene, body)
    assert [each.device for each in scene.started] == [1, 20, 20, 20]
