"""How the front handles FUSE programs that hang or are gone, with a mounter that the test plays."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from fusermount3_broker.front import control_socket, hung_connections
from fusermount3_broker.front.context import Front
from fusermount3_broker.front.decisions.limits import AccountName
from fusermount3_broker.front.health import Health
from fusermount3_broker.front.model import Device, Mount, MountNamespace
from fusermount3_broker.front.mounter_client import Mounter, Operation, OperationEnded
from fusermount3_broker.front.tables.mount_table import Registry
from fusermount3_broker.messages import mounter
from fusermount3_broker.messages.mounter import Aborted, Entering, Failed, StartAbort, Unmounted
from fusermount3_broker.service.configuration import Configuration, Deadlines
from tests.unit.fakes import FakeFusectl

NAMESPACE = 7
#: Seconds in which a child of the fake mounter answers, however busy the machine is.
PATIENCE = 10
Child = Coroutine[Any, Any, None]
Answer = Callable[[mounter.Record, socket.socket], Child]


class FakeMounter:
    """Records the operations that begin, and lets `answer` play the child."""

    def __init__(self) -> None:
        self.started: list[mounter.Record] = []
        self.answer: Answer = say_nothing
        self.children: list[asyncio.Task[None]] = []

    async def begin(self, start: mounter.Start, descriptors: list[int]) -> Operation:
        assert descriptors == []
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.started.append(start)
        self.children.append(asyncio.create_task(self._be_child(start, theirs)))
        return Operation(ours, PATIENCE)

    async def _be_child(self, start: mounter.Record, conversation: socket.socket) -> None:
        conversation.setblocking(False)
        with conversation:
            await self.answer(start, conversation)


async def say_nothing(_: mounter.Record, conversation: socket.socket) -> None:
    """Play a child that does nothing until the front hangs up."""
    await asyncio.get_running_loop().sock_recv(conversation, 100)


def says(*records: mounter.Record) -> Answer:
    async def answer(_: mounter.Record, conversation: socket.socket) -> None:
        for record in records:
            conversation.send(mounter.dump(record))

    return answer


class Scene:
    """A front with some mounts, a fake mounter and a fake fusectl."""

    def __init__(self, directory: Path) -> None:
        self.fusectl = FakeFusectl(directory / "fusectl")
        self.registry = Registry(directory / "state", self.fusectl.descriptor)
        self.mounter = FakeMounter()
        self.logged: list[str] = []
        configuration = Configuration(deadlines=Deadlines(operation=1), hung_seconds=1)
        self.front = Front(configuration, cast(Mounter, self.mounter), self.registry, self._log, 0)

    def _log(self, priority: int, message: str, **fields: Any) -> None:
        assert priority
        self.logged.append(f"{message} ({fields['request_id']})")

    def mount(self, device: int = 5, request: str = "1a2b3c4d", uid: int = 1000, pid: int = 77) -> Mount:
        inode = self.fusectl.connect(device)
        mount = Mount(
            device=Device(device),
            connection=inode,
            namespace=MountNamespace(NAMESPACE),
            uid=uid,
            pid=pid,
            command="sshfs",
            container="",
            account=AccountName("uid 1000"),
            mountpoint=b"/mnt",
            type="fuse.sshfs",
            source=b"s",
            mounted_at=0.0,
            request_id=request,
        )
        self.registry.add(mount)
        return mount

    def state(self, mount: Mount) -> str:
        (row,) = (row for row in self.ask("mounts") if row["request_id"] == mount.request_id)
        return str(row["state"])

    def ask(self, question: str) -> Any:
        health = Health(self.front, asyncio.Event())
        return asyncio.run(control_socket._answer(self.front, health, question))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.registry.close()
    os.close(scene.fusectl.descriptor)


# Unmounts


def unmount(scene: Scene, mount: Mount, child: Callable[[socket.socket], Child], patience: int = PATIENCE) -> None:
    """Wait for an unmount whose child is played by `child`."""

    async def wait() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setblocking(False)
        with Operation(ours, patience) as operation, theirs:
            playing = asyncio.create_task(child(theirs))
            try:
                await hung_connections.unmounted(scene.front, operation, mount)
            finally:
                await playing
        await asyncio.gather(*scene.mounter.children)

    asyncio.run(wait())


def test_an_unmount_that_does_not_block_needs_nobody_else(scene: Scene) -> None:
    async def child(conversation: socket.socket) -> None:
        conversation.send(mounter.dump(Unmounted()))

    unmount(scene, scene.mount(), child)
    assert scene.mounter.started == []


def test_an_unmount_that_blocks_has_the_connection_aborted(scene: Scene) -> None:
    mount = scene.mount()
    aborted = asyncio.Event()

    async def abort(_: mounter.Record, conversation: socket.socket) -> None:
        aborted.set()
        conversation.send(mounter.dump(Aborted()))

    async def child(conversation: socket.socket) -> None:
        await aborted.wait()
        conversation.send(mounter.dump(Unmounted()))

    scene.mounter.answer = abort
    unmount(scene, mount, child)
    assert scene.mounter.started == [StartAbort(1, 5, mount.connection, unmoved=1)]
    assert scene.logged == ["aborted a FUSE connection: its FUSE program hangs, and a process waits for it (1a2b3c4d)"]
    assert scene.state(mount) == "dead"


def test_what_was_aborted_is_told_although_the_unmount_was_done_by_then(scene: Scene) -> None:
    async def abort(start: mounter.Record, conversation: socket.socket) -> None:
        await say_nothing(start, conversation)
        conversation.send(mounter.dump(Aborted()))

    async def child(conversation: socket.socket) -> None:
        await asyncio.sleep(hung_connections.GRACE + 0.1)
        conversation.send(mounter.dump(Unmounted()))

    scene.mounter.answer = abort
    unmount(scene, scene.mount(), child)
    assert len(scene.logged) == 1


def test_a_slow_unmount_is_waited_for_longer_than_a_deadline(scene: Scene) -> None:
    async def child(conversation: socket.socket) -> None:
        await asyncio.sleep(hung_connections.GRACE + 1.5)
        conversation.send(mounter.dump(Unmounted()))

    unmount(scene, scene.mount(), child)
    assert len(scene.mounter.started) == 1
    assert scene.logged == []


def test_a_child_whose_alarm_came_when_the_kernel_was_done_has_unmounted(scene: Scene) -> None:
    mount = scene.mount()

    async def child(conversation: socket.socket) -> None:
        scene.fusectl.disconnect(mount.device)
        conversation.close()

    unmount(scene, mount, child)


def test_a_child_that_was_killed_before_has_not(scene: Scene) -> None:
    async def child(conversation: socket.socket) -> None:
        conversation.close()

    with pytest.raises(OperationEnded):
        unmount(scene, scene.mount(), child)


def test_an_unmount_that_blocks_all_the_same_is_not_waited_for(scene: Scene) -> None:
    scene.mounter.answer = says(Aborted())

    async def child(_: socket.socket) -> None:
        pass

    with pytest.raises(OperationEnded):
        unmount(scene, scene.mount(), child, patience=0)


# Stuck children


@pytest.mark.parametrize("ours", [True, False])
def test_a_child_that_is_stuck_is_waited_for_and_freed_if_it_is_known_how(scene: Scene, ours: bool) -> None:
    mount = scene.mount()
    freed = asyncio.Event()

    async def abort(_: mounter.Record, conversation: socket.socket) -> None:
        conversation.send(mounter.dump(Aborted()))
        freed.set()

    async def wait() -> None:
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with Operation(ends[0], PATIENCE) as operation:
            hung_connections.leave(scene.front, operation, mount if ours else None)
        if ours:
            await asyncio.wait_for(freed.wait(), 10)
        else:
            await asyncio.sleep(0.1)
            assert not freed.is_set()
        assert len(scene.front.stuck) == 1
        ends[1].close()
        await asyncio.gather(*scene.front.stuck)
        assert not scene.front.stuck

    scene.mounter.answer = abort
    asyncio.run(wait())
    assert len(scene.logged) == ours


@pytest.mark.parametrize(
    ("uid", "namespace", "device", "own"),
    [
        (1000, NAMESPACE, 5, True),
        (0, NAMESPACE, 5, True),
        (1001, NAMESPACE, 5, False),
        (1000, NAMESPACE + 1, 5, False),
        (0, NAMESPACE + 1, 5, False),
        (1000, NAMESPACE, 6, False),
    ],
)
def test_a_caller_is_freed_only_of_what_it_might_unmount(
    scene: Scene, uid: int, namespace: int, device: int, own: bool
) -> None:
    mount = scene.mount()
    assert hung_connections.own(scene.front, Entering(device, uid, namespace)) == (mount if own else None)
    assert hung_connections.own(scene.front, None) is None
    scene.fusectl.reconnect(5)
    assert hung_connections.own(scene.front, Entering(device, uid, namespace)) is None, "the number is another's now"


# Requests of an administrator


def test_an_administrator_aborts_a_mount_by_its_id(scene: Scene) -> None:
    mount = scene.mount()
    scene.mount(6, "1affffff")
    scene.mounter.answer = says(Aborted())
    answer = scene.ask("abort 1a2b3c4d")
    assert (answer["request_id"], answer["mountpoint"]) == ("1a2b3c4d", "/mnt")
    assert scene.mounter.started == [StartAbort(1, 5, mount.connection, unmoved=0)]
    assert scene.logged == ["aborted a FUSE connection: an administrator asked for it (1a2b3c4d)"]
    assert scene.state(mount) == "dead"


@pytest.mark.parametrize(
    ("question", "answer", "error"),
    [
        ("abort 2", says(), "no live mount has the id '2'"),
        ("abort 1a2b3c4", says(Aborted()), "no live mount has the id '1a2b3c4'"),
        ("abort 1a2b3c4d", says(Failed(errno.ENOENT, b"abort")), "'1a2b3c4d' can't be aborted: it is already gone"),
        ("abort 1a2b3c4d", says(Failed(errno.EACCES, b"abort")), "'1a2b3c4d' can't be aborted: Permission denied"),
        ("abort 1a2b3c4d", says(), "'1a2b3c4d' can't be aborted: the mounter doesn't answer"),
        ("abort", says(), "abort takes the request ID of one mount"),
        ("abort 1a2 1af", says(), "abort takes the request ID of one mount"),
    ],
)
def test_what_cannot_be_aborted_is_told(scene: Scene, question: str, answer: Answer, error: str) -> None:
    scene.mount()
    scene.mount(6, "1affffff")
    scene.mounter.answer = answer
    assert scene.ask(question) == {"error": error}
    assert scene.logged == []
