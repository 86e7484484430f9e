"""Mounts that were kept without a front: the next one writes them down, once."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker import log, orphans, plan
from broker.config import Configuration
from broker.front import Front
from broker.limits import AccountName
from broker.operations import Mounter
from broker.registry import Device, Mount, MountNamespace, Registry
from tests.unit.fakes import FakeFusectl

ORPHAN = plan.Orphaned(
    device=5, mount_namespace=7, uid=1000, pid=0, request=b"1a2b3c4d", source=b"host:", subtype=b"sshfs", target=b""
)
MOUNT = Mount(
    device=Device(5),
    connection=0,
    namespace=MountNamespace(7),
    uid=0,
    pid=0,
    command="",
    container="",
    mountpoint=b"",
    type="fuse",
    source=b"/dev/fuse",
    mounted_at=1.0,
    request="ffff",
    account=AccountName(""),
)


class Scene:
    def __init__(self, directory: Path) -> None:
        self.fusectl = FakeFusectl(directory / "fusectl")
        self.registry = Registry(directory / "state", self.fusectl.descriptor)
        self.logged: list[str] = []
        self.control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours, self.child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mounter = Mounter(self.control, ours)
        self.proc = os.open("/proc", os.O_PATH)
        self.front = Front(Configuration(), mounter, self.registry, self._log, self.proc)

    def _log(self, priority: int, message: str, **_: Any) -> None:
        assert priority == log.NOTICE
        self.logged.append(message)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.registry.close()
    for each in (scene.control, scene.front.mounter.orphans, scene.child):
        each.close()
    os.close(scene.proc)
    os.close(scene.fusectl.descriptor)


def test_an_orphan_is_written_down_once(scene: Scene) -> None:
    scene.fusectl.connect(5)
    for _ in range(2):
        orphans.adopt(scene.front, ORPHAN)
    (mount,) = scene.registry
    assert (mount.device, mount.namespace, mount.uid, mount.request) == (5, 7, 1000, "1a2b3c4d")
    assert (mount.type, mount.source, mount.mountpoint) == ("fuse.sshfs", b"host:", b"")
    assert scene.logged == ["adopted a mount whose front was killed"]
    assert scene.registry.find(Device(5)) == mount


def test_a_program_that_has_come_to_an_eager_volume_is_written_down(scene: Scene) -> None:
    connection = scene.fusectl.connect(5)
    unserved = replace(MOUNT, connection=connection, volume=b"pods/1/mount", pid=0)
    scene.registry.add(unserved)
    orphans.adopt(scene.front, ORPHAN._replace(pid=os.getpid(), target=b"pods/another/mount"))
    assert list(scene.registry) == [unserved], "that is another's"
    orphans.adopt(scene.front, ORPHAN._replace(pid=os.getpid(), target=b"pods/1/mount"))
    (mount,) = scene.registry
    assert (mount.pid, mount.volume, mount.request) == (os.getpid(), b"pods/1/mount", "1a2b3c4d")


def test_an_orphan_is_not_taken_for_the_one_that_has_its_number_now(scene: Scene) -> None:
    scene.fusectl.connect(5)
    orphans.adopt(scene.front, ORPHAN)
    orphans.adopt(scene.front, ORPHAN._replace(uid=1001, request=b"5e6f7a8b"))
    (mount,) = scene.registry
    assert (mount.uid, mount.request) == (1000, "1a2b3c4d")


def test_an_orphan_that_died_meanwhile_is_forgotten(scene: Scene) -> None:
    orphans.adopt(scene.front, ORPHAN)
    assert scene.registry.find(Device(5)) is None


def test_orphans_that_wait_are_written_down_whatever_comes_between(scene: Scene) -> None:
    async def listen() -> None:
        orphans.expect(scene.front)
        for _ in range(2):  # the loop looks once what there is
            await asyncio.sleep(0)
        assert len(scene.registry) == 2, "all of them before anybody is served"
        scene.child.close()
        await asyncio.sleep(0.01)
        assert not asyncio.get_running_loop().remove_reader(scene.front.mounter.orphans), "the end is the end"

    for device in (5, 6):
        scene.fusectl.connect(device)
    scene.child.send(plan.dump(ORPHAN))
    scene.child.send(plan.dump(plan.Kept()))
    scene.child.send(plan.dump(ORPHAN._replace(device=6, request=b"5e6f7a8b")))
    asyncio.run(listen())
