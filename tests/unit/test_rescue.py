"""What the front does about FUSE programs that hang or are gone, with a mounter that is played by the test."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from broker import control, plan, rescue, watch
from broker.config import Configuration, Deadlines
from broker.front import Front
from broker.health import Health
from broker.limits import AccountName
from broker.operations import Mounter, Operation, OperationEnded
from broker.plan import (
    Aborted,
    Entering,
    Failed,
    Reaped,
    StartAbort,
    StartReap,
    StartSurvey,
    Surveyed,
    Unmounted,
)
from broker.registry import Device, Mount, MountNamespace, Registry
from broker.watch import Watch
from tests.unit.fakes import FakeFusectl

NAMESPACE = 7
Child = Coroutine[Any, Any, None]
Answer = Callable[[plan.Record, socket.socket], Child]


class FakeMounter:
    """Notes what it is asked, and lets `answer` be the child."""

    def __init__(self) -> None:
        self.started: list[plan.Record] = []
        self.answer: Answer = say_nothing
        self.children: list[asyncio.Task[None]] = []

    async def begin(self, start: plan.Start, descriptors: list[int]) -> Operation:
        assert descriptors == []
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.started.append(start)
        self.children.append(asyncio.create_task(self._be_child(start, theirs)))
        return Operation(ours, 0)

    async def _be_child(self, start: plan.Record, conversation: socket.socket) -> None:
        conversation.setblocking(False)
        with conversation:
            await self.answer(start, conversation)


async def say_nothing(_: plan.Record, conversation: socket.socket) -> None:
    """Be a child that does nothing until the front hangs up."""
    await asyncio.get_running_loop().sock_recv(conversation, 100)


def says(*records: plan.Record) -> Answer:
    async def answer(_: plan.Record, conversation: socket.socket) -> None:
        for record in records:
            conversation.send(plan.dump(record))

    return answer


class Scene:
    """A front with some mounts, whose mounter and fusectl are fakes."""

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
            request=request,
        )
        self.registry.add(mount)
        return mount

    def state(self, mount: Mount) -> str:
        (row,) = (row for row in self.ask("mounts") if row["request"] == mount.request)
        return str(row["state"])

    def ask(self, question: str) -> Any:
        health = Health(self.front.mounter, asyncio.Event())
        return asyncio.run(control._answer(self.front, health, question))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.registry.close()
    os.close(scene.fusectl.descriptor)


# Who unmounts


def unmount(scene: Scene, mount: Mount, child: Callable[[socket.socket], Child]) -> None:
    """Wait for an unmount whose child is played by `child`."""

    async def wait() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setblocking(False)
        with Operation(ours, 0) as operation, theirs:
            playing = asyncio.create_task(child(theirs))
            try:
                await rescue.unmounted(scene.front, operation, mount)
            finally:
                await playing
        await asyncio.gather(*scene.mounter.children)

    asyncio.run(wait())


def test_an_unmount_that_does_not_block_needs_nobody_else(scene: Scene) -> None:
    async def child(conversation: socket.socket) -> None:
        conversation.send(plan.dump(Unmounted()))

    unmount(scene, scene.mount(), child)
    assert scene.mounter.started == []


def test_an_unmount_that_blocks_has_the_connection_aborted(scene: Scene) -> None:
    mount = scene.mount()
    aborted = asyncio.Event()

    async def abort(_: plan.Record, conversation: socket.socket) -> None:
        aborted.set()
        conversation.send(plan.dump(Aborted()))

    async def child(conversation: socket.socket) -> None:
        await aborted.wait()
        conversation.send(plan.dump(Unmounted()))

    scene.mounter.answer = abort
    unmount(scene, mount, child)
    assert scene.mounter.started == [StartAbort(1, 5, mount.connection, unmoved=1)]
    assert scene.logged == ["aborted a FUSE connection: its program hangs, and somebody waits for it (1a2b3c4d)"]
    assert scene.state(mount) == "dead"


def test_what_was_aborted_is_told_although_the_unmount_was_done_by_then(scene: Scene) -> None:
    async def abort(start: plan.Record, conversation: socket.socket) -> None:
        await say_nothing(start, conversation)
        conversation.send(plan.dump(Aborted()))

    async def child(conversation: socket.socket) -> None:
        await asyncio.sleep(rescue.GRACE + 0.1)
        conversation.send(plan.dump(Unmounted()))

    scene.mounter.answer = abort
    unmount(scene, scene.mount(), child)
    assert len(scene.logged) == 1


def test_a_slow_unmount_is_waited_for_longer_than_a_deadline(scene: Scene) -> None:
    async def child(conversation: socket.socket) -> None:
        await asyncio.sleep(rescue.GRACE + 1.5)
        conversation.send(plan.dump(Unmounted()))

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
        unmount(scene, scene.mount(), child)


# Who is stuck


@pytest.mark.parametrize("ours", [True, False])
def test_a_child_that_is_stuck_is_waited_for_and_freed_if_it_is_known_how(scene: Scene, ours: bool) -> None:
    mount = scene.mount()
    freed = asyncio.Event()

    async def abort(_: plan.Record, conversation: socket.socket) -> None:
        conversation.send(plan.dump(Aborted()))
        freed.set()

    async def wait() -> None:
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with Operation(ends[0], 0) as operation:
            rescue.leave(scene.front, operation, mount if ours else None)
        await asyncio.sleep(0.1)
        assert len(scene.front.stuck) == 1
        assert freed.is_set() == ours
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
    assert rescue.own(scene.front, Entering(device, uid, namespace)) == (mount if own else None)
    assert rescue.own(scene.front, None) is None
    scene.fusectl.reconnect(5)
    assert rescue.own(scene.front, Entering(device, uid, namespace)) is None, "the number is another's now"


# An administrator


def test_an_administrator_aborts_a_mount_by_its_id_or_the_beginning_of_it(scene: Scene) -> None:
    mount = scene.mount()
    scene.mount(6, "1affffff")
    scene.mounter.answer = says(Aborted())
    answer = scene.ask("abort 1a2")
    assert (answer["request"], answer["mountpoint"]) == ("1a2b3c4d", "/mnt")
    assert scene.mounter.started == [StartAbort(1, 5, mount.connection, unmoved=0)]
    assert scene.logged == ["aborted a FUSE connection: an administrator said so (1a2b3c4d)"]
    assert scene.state(mount) == "dead"


@pytest.mark.parametrize(
    ("question", "answer", "error"),
    [
        ("abort 2", says(), "no live mount has the id '2'"),
        ("abort 1a", says(), "'1a' is ambiguous: 1a2b3c4d, 1affffff"),
        ("abort 1a2", says(Failed(errno.ENOENT, b"abort")), "'1a2b3c4d' can't be aborted: it is already gone"),
        ("abort 1a2", says(Failed(errno.EACCES, b"abort")), "'1a2b3c4d' can't be aborted: Permission denied"),
        ("abort 1a2", says(), "'1a2b3c4d' can't be aborted: the mounter doesn't answer"),
        ("abort", says(), "unknown command 'abort'"),
        ("abort 1a2 1af", says(), "unknown command 'abort 1a2 1af'"),
    ],
)
def test_what_cannot_be_aborted_is_told(scene: Scene, question: str, answer: Answer, error: str) -> None:
    scene.mount()
    scene.mount(6, "1affffff")
    scene.mounter.answer = answer
    assert scene.ask(question) == {"error": error}
    assert scene.logged == []


# Surveys


class FakeKernel:
    """Answers surveys, from `waiting` by device and `served` likewise; what is reaped is noted in `reaped`."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.waiting: dict[int, int] = {}
        self.served: dict[int, tuple[int, int]] = {}
        self.searches = 0
        scene.mounter.answer = self.answer

    async def answer(self, start: plan.Record, conversation: socket.socket) -> None:
        if isinstance(start, StartReap):
            assert start.mount_namespace == NAMESPACE
            self.scene.fusectl.disconnect(start.device)
            conversation.send(plan.dump(Reaped(1)))
        if isinstance(start, StartSurvey):
            self.searches += start.search
            told = [self._tell(start.search, *map(int, line.split())) for line in start.connections.splitlines()]
            conversation.send(plan.dump(Surveyed(b"".join(told))))

    def _tell(self, search: bool, device: int, inode: int, *known: int) -> bytes:
        mount = self.scene.registry.find(Device(device))
        assert mount is not None
        assert inode == mount.connection
        served = self.served.get(device, (0, 0))
        found = served if search or served == known else (0, 0)
        return b"%d %d %d %d\n" % (device, self.waiting.get(device, 0), *found)

    def look(self, watch: Watch, times: int = 1) -> None:
        async def look() -> None:
            for _ in range(times):
                await watch.look()

        asyncio.run(look())


@pytest.fixture
def kernel(scene: Scene) -> FakeKernel:
    return FakeKernel(scene)


def test_processes_are_searched_only_when_somebody_serves_no_more(scene: Scene, kernel: FakeKernel) -> None:
    mount = scene.mount()
    kernel.served[5] = (700, 3)
    looker = Watch(scene.front)
    kernel.look(looker, 5)
    assert kernel.searches == 1
    kernel.served[5] = (701, 3)
    kernel.look(looker, 5)
    assert kernel.searches == 2
    assert scene.state(mount) == "live"


def test_what_nobody_serves_is_reaped_after_a_moment(
    scene: Scene, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr("broker.watch.time.monotonic", lambda: now)
    mount = scene.mount()
    looker = Watch(scene.front)
    for _ in range(3):
        kernel.look(looker)
        assert scene.state(mount) == "dead", "and whoever comes to unmount it finds it there"
    now += watch.MOMENT
    kernel.look(looker)
    assert list(scene.registry) == []
    assert scene.logged == ["unmounted a dead mount: its program is gone (1a2b3c4d)"]


def test_where_that_is_switched_off_it_is_called_dead_and_stays(scene: Scene, kernel: FakeKernel) -> None:
    scene.front.configuration = replace(scene.front.configuration, dead_mounts_seconds=0)
    mount = scene.mount()
    kernel.look(Watch(scene.front))
    assert scene.state(mount) == "dead"
    assert not [each for each in scene.mounter.started if isinstance(each, StartReap)]


def test_what_was_aborted_is_reaped_although_its_program_is_there(scene: Scene, kernel: FakeKernel) -> None:
    mount = scene.mount()
    kernel.served[5] = (700, 3)
    looker = Watch(scene.front)
    kernel.look(looker)
    scene.front.states.note_aborted(mount.connection)
    kernel.look(looker)
    assert list(scene.registry) == []


def test_a_mount_of_a_process_that_is_not_to_be_seen_is_not_called_dead(scene: Scene, kernel: FakeKernel) -> None:
    mount = scene.mount(pid=0)
    kernel.look(Watch(scene.front))
    assert (kernel.searches, scene.state(mount)) == (0, "live")


def test_requests_that_do_not_move_make_a_mount_hung(scene: Scene, kernel: FakeKernel) -> None:
    mount = scene.mount()
    kernel.served[5], kernel.waiting[5] = (700, 3), 2
    looker = Watch(scene.front)
    kernel.look(looker)
    assert scene.state(mount) == "live"
    scene.front.states._seen[mount.connection].since -= 1
    kernel.look(looker)
    assert scene.state(mount) == "hung"
    assert scene.ask("mounts")[0]["waiting"] == 2
    kernel.waiting[5] = 1
    kernel.look(looker)
    assert scene.state(mount) == "live"


def test_many_connections_are_surveyed_in_records_that_fit(
    scene: Scene, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "MOST_SURVEYED", 2)
    mounts = [scene.mount(device, f"{device:08x}") for device in range(5, 10)]
    for device in range(5, 10):
        kernel.served[device], kernel.waiting[device] = (700 + device, 3), device
    kernel.look(Watch(scene.front))
    assert [start.connections.count(b"\n") for start in scene.mounter.started if isinstance(start, StartSurvey)] == [
        2,
        2,
        1,
    ] * 2
    assert [scene.front.states.waiting(mount.connection) for mount in mounts] == [5, 6, 7, 8, 9]


def test_the_lines_of_the_longest_survey_fit_into_a_record() -> None:
    line = b"%d %d %d %d\n" % (2**32 - 1, 2**32 - 1, 2**22, 2**20)
    plan.dump(StartSurvey(5, False, line * watch.MOST_SURVEYED))
    plan.dump(Surveyed(line * watch.MOST_SURVEYED))


def test_a_mounter_that_fails_leaves_everything_as_it_was(scene: Scene) -> None:
    mount = scene.mount()
    for answer in (says(), says(Failed(errno.EIO, b"survey")), says(Unmounted())):
        scene.mounter.answer = answer
        asyncio.run(Watch(scene.front).look())
    assert scene.state(mount) == "live"
    assert scene.logged == []


def test_a_filesystem_that_never_answers_is_left_alone(
    scene: Scene, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "MOMENT", 0)
    scene.mount()

    async def answer(start: plan.Record, conversation: socket.socket) -> None:
        if isinstance(start, StartReap):
            conversation.send(plan.dump(Failed(errno.ETIMEDOUT, b"unmount")))
        else:
            await kernel.answer(start, conversation)

    scene.mounter.answer = answer
    looker = Watch(scene.front)
    for _ in range(6):
        looker._not_before.clear()
        kernel.look(looker)
    reaps = [each for each in scene.mounter.started if isinstance(each, StartReap)]
    assert len(reaps) == watch.MOST_UNANSWERED
