"""How the front handles mounts whose server is unknown, with a mounter that the test plays."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from fusermount3_broker.front import connection_survey, control_socket, dead_mounts, hung_connections, mount_watch
from fusermount3_broker.front.context import Front
from fusermount3_broker.front.decisions.limits import AccountName, account_of
from fusermount3_broker.front.health import Health
from fusermount3_broker.front.model import Device, Mount, MountNamespace
from fusermount3_broker.front.mount_watch import Watch
from fusermount3_broker.front.mounter_client import Mounter, Operation
from fusermount3_broker.front.serving_processes import MOMENT
from fusermount3_broker.front.tables.mount_table import Registry
from fusermount3_broker.messages import mounter as messages
from fusermount3_broker.messages.mounter import (
    Asked,
    Failed,
    Found,
    NobodyThere,
    Reaped,
    StartReap,
    StartSearch,
    StartSurvey,
    StartTombstone,
    Surveyed,
    TombstonePut,
)
from fusermount3_broker.service.configuration import Configuration, Deadlines
from tests.unit.fakes import FakeFusectl

NAMESPACE = 7
TARGET, OTHER_TARGET = b"pods/1/mount", b"pods/2/mount"
CGROUP = b"0::/machine.slice/one\n"
ACCOUNT = account_of(CGROUP, os.getuid())
OTHER = AccountName("container /machine.slice/other")
PARENT = 4_194_300  # a pid that no process has
#: Seconds in which a child of the fake mounter answers, however busy the machine is.
PATIENCE = 10


class Kernel:
    """The mounts and processes, and a mounter whose children look at them.

    `servers` maps a device to the pid and the descriptor by which it is served, `waiting` to the number of requests
    that wait for it, and `answers` to the errno with which it answers a child; without one it is dead (ENOTCONN).
    `keeps` are the devices that are still mounted elsewhere when a child has unmounted them. `alive` are those that are
    not replaced by a tombstone: the mounter does not find them dead at the target.
    """

    def __init__(self, directory: Path) -> None:
        self.fusectl = FakeFusectl(directory / "fusectl")
        self.proc = directory / "proc"
        self.proc.mkdir()
        self.descriptor = os.open(self.proc, os.O_PATH)
        self.servers: dict[int, tuple[int, int]] = {}
        self.waiting: dict[int, int] = {}
        self.answers: dict[int, int] = {}
        self.alive: set[int] = set()
        self.keeps: set[int] = set()
        self.fails = self.fails_to_replace = False
        self.nobody_in: set[int] = set()
        self.started: list[messages.Record] = []
        self.children: list[asyncio.Task[None]] = []
        self.held: asyncio.Event | None = None
        self.blocks: dict[int, asyncio.Event] = {}
        self.asking = self.most_asking = 0
        self.seconds_of_reaping = 0.0

    def add_process(self, pid: int, cgroup: bytes = CGROUP) -> None:
        (self.proc / f"{pid}").mkdir()
        (self.proc / f"{pid}/cgroup").write_bytes(cgroup)
        (self.proc / f"{pid}/stat").write_text(f"{pid} (a) b) S {PARENT} 1")

    async def begin(self, start: messages.Start, descriptors: list[int]) -> Operation:
        assert descriptors == []
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.started.append(start)
        self.asking += isinstance(start, StartReap)
        self.most_asking = max(self.most_asking, self.asking)
        self.children.append(asyncio.create_task(self._be_child(start, theirs)))
        return Operation(ours, PATIENCE)

    async def _be_child(self, start: messages.Record, conversation: socket.socket) -> None:
        with conversation:
            if isinstance(start, StartReap):
                await asyncio.sleep(self.seconds_of_reaping)
                self.asking -= 1  # the front may begin another child as soon as it reads the last answer
            if isinstance(start, StartTombstone) and start.device in self.blocks:
                await self.blocks[start.device].wait()
                return
            for record in self._answer(start):
                conversation.send(messages.dump(record))
            if self.held and isinstance(start, StartReap):
                await self.held.wait()

    def _answer(self, start: messages.Record) -> Iterator[messages.Record]:
        if self.fails:
            yield Failed(errno.EIO, b"a step")
        elif isinstance(start, StartSurvey):
            yield Surveyed(b"".join(self._survey(*map(int, line.split())) for line in start.connections.splitlines()))
        elif isinstance(start, StartSearch):
            wanted, pids = (set(map(int, lines.splitlines())) for lines in (start.devices, start.pids))
            found = [(device, *each) for device, each in self.servers.items() if device in wanted and each[0] in pids]
            yield Found(b"".join(b"%d %d %d\n" % each for each in found))
        elif isinstance(start, StartReap):
            yield from self._reap(start)
        elif isinstance(start, StartTombstone):
            yield (
                Failed(errno.EIO, b"a step") if self.fails_to_replace else TombstonePut(start.device not in self.alive)
            )

    def _survey(self, device: int, _inode: int, pid: int, descriptor: int) -> bytes:
        served = self.servers.get(device) == (pid, descriptor)
        return b"%d %d %d\n" % (device, self.waiting.get(device, 0), served)

    def _reap(self, start: StartReap) -> Iterator[messages.Record]:
        if start.mount_namespace in self.nobody_in:
            yield NobodyThere()
            return
        for device in map(int, start.devices.splitlines()):
            answer = self.answers.get(device, errno.ENOTCONN)
            if answer == errno.ENOTCONN and start.unmount and device not in self.keeps:
                self.fusectl.disconnect(device)
            yield Asked(device, answer, int(start.unmount and answer == errno.ENOTCONN))
            if answer == errno.ETIMEDOUT:
                return
        yield Reaped()

    def asked(self) -> list[list[int]]:
        """Return the devices that each child was told to ask."""
        starts = [each for each in self.started if isinstance(each, StartReap)]
        return [list(map(int, start.devices.splitlines())) for start in starts]

    def replaced(self) -> list[tuple[bytes, int]]:
        """Return the targets and devices for which a child was told to put a tombstone."""
        return [(each.target, each.device) for each in self.started if isinstance(each, StartTombstone)]

    def count(self, kind: type[messages.Record]) -> int:
        return sum(isinstance(each, kind) for each in self.started)


class Scene:
    """A front that watches its mounts, and whose mounter, fusectl and /proc are the fake kernel's."""

    def __init__(self, directory: Path) -> None:
        self.kernel = Kernel(directory)
        self.registry = Registry(directory / "state", self.kernel.fusectl.descriptor)
        self.logged: list[str] = []
        configuration = Configuration(deadlines=Deadlines(operation=1), hung_seconds=1, dead_mounts_seconds=1)
        mounter = cast(Mounter, self.kernel)
        self.front = Front(configuration, mounter, self.registry, self._log, self.kernel.descriptor)

    def close(self) -> None:
        self.registry.close()
        os.close(self.kernel.fusectl.descriptor)
        os.close(self.kernel.descriptor)

    def _log(self, priority: int, message: str, **fields: Any) -> None:
        assert priority
        self.logged.append(f"{message} ({fields.get('request_id')})")

    def mount(self, device: int, account: AccountName = ACCOUNT, pid: int = PARENT - 1, **fields: Any) -> Mount:
        mount = Mount(
            device=Device(device),
            connection=self.kernel.fusectl.connect(device),
            namespace=MountNamespace(fields.pop("namespace", NAMESPACE)),
            uid=1000,
            pid=pid,
            command="sshfs",
            container="",
            account=account,
            mountpoint=b"/mnt",
            type="fuse.sshfs",
            source=b"s",
            mounted_at=0.0,
            request_id=f"{device:08x}",
            **fields,
        )
        self.registry.add(mount)
        return mount

    def state(self, mount: Mount) -> str:
        return self.front.state(mount)

    def watch(self, body: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `body` while the front watches its mounts."""

        async def watching() -> None:
            self.front.serving.news = asyncio.Event()
            task = asyncio.create_task(Watch(self.front).run())
            try:
                await body()
            finally:
                task.cancel()
                await asyncio.wait([task])
                await asyncio.gather(*self.kernel.children, *self.front.stuck)
                self.kernel.children.clear()

        asyncio.run(watching())

    def watch_until(self, true: Callable[[], object]) -> None:
        self.watch(lambda: until(true))


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.01)


def set_moment(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    for module in ("serving_processes", "dead_mounts"):
        monkeypatch.setattr(f"fusermount3_broker.front.{module}.MOMENT", seconds)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    set_moment(monkeypatch, 0.05)
    monkeypatch.setattr(mount_watch, "CALM", 1)
    scene = Scene(tmp_path)
    yield scene
    scene.close()


@pytest.fixture
def program() -> Iterator[subprocess.Popen[bytes]]:
    """A process that a test may name as the server of a mount."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def test_what_nobody_serves_and_says_that_it_is_dead_is_unmounted(scene: Scene) -> None:
    scene.mount(5)
    scene.watch_until(lambda: not list(scene.registry))
    assert scene.logged == ["unmounted a dead mount: its program is gone (00000005)"]
    assert scene.front.requests["reap unmounted"] == 1


def test_who_comes_to_unmount_a_mount_finds_it_for_a_moment(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    set_moment(monkeypatch, MOMENT)
    scene.mount(5)
    begun = time.monotonic()
    scene.watch_until(lambda: not list(scene.registry))
    assert time.monotonic() - begun >= MOMENT


@pytest.mark.parametrize("answer", [0, errno.EAGAIN, errno.ENOENT, errno.ENODATA, errno.EACCES])
def test_what_nobody_seems_to_serve_is_not_called_dead(scene: Scene, answer: int) -> None:
    mount = scene.mount(5)
    scene.kernel.answers[5] = answer
    scene.watch_until(lambda: scene.kernel.count(StartReap) >= 2)
    assert scene.state(mount) == "live"
    assert scene.logged == []


def test_a_mounter_that_fails_makes_nothing_dead(scene: Scene) -> None:
    mount = scene.mount(5)
    scene.kernel.fails = True
    scene.watch_until(lambda: scene.kernel.count(StartSurvey) >= 3)
    assert scene.state(mount) == "live"
    assert list(scene.registry) == [mount]
    assert scene.logged == []


def test_what_a_process_of_its_account_serves_is_not_asked(scene: Scene, program: subprocess.Popen[bytes]) -> None:
    mount = scene.mount(5)
    scene.kernel.add_process(program.pid)
    scene.kernel.servers[5] = program.pid, 3
    scene.watch_until(lambda: scene.front.serving.of(mount) == (program.pid, 3))
    scene.watch_until(lambda: scene.kernel.count(StartSurvey) >= 4)
    assert scene.kernel.asked() == []
    assert scene.kernel.count(StartSearch) == 2, "one for each time that it began to watch"


def test_the_processes_of_others_are_not_looked_at(scene: Scene, program: subprocess.Popen[bytes]) -> None:
    """However many descriptors they have."""
    scene.mount(5)
    scene.kernel.add_process(program.pid)
    for pid in range(10, 20):
        scene.kernel.add_process(pid, b"0::/machine.slice/other\n")
    scene.watch_until(lambda: not list(scene.registry))
    searched = [each.pids for each in scene.kernel.started if isinstance(each, StartSearch)]
    assert set(searched) == {b"%d\n" % program.pid}


def test_the_end_of_a_process_is_news(scene: Scene, program: subprocess.Popen[bytes]) -> None:
    """The front doesn't have to look for it: its looks are an hour apart."""
    scene.front.configuration = replace(scene.front.configuration, dead_mounts_seconds=3600, hung_seconds=0)
    mount = scene.mount(5)
    scene.kernel.add_process(program.pid)
    scene.kernel.servers[5] = program.pid, 3

    async def end() -> None:
        await until(lambda: scene.front.serving.of(mount) == (program.pid, 3))
        scene.kernel.servers.clear()
        program.kill()
        await until(lambda: not list(scene.registry))

    scene.watch(end)


def test_a_child_of_the_process_that_ended_is_found(scene: Scene, program: subprocess.Popen[bytes]) -> None:
    mount = scene.mount(5)
    scene.kernel.add_process(program.pid)
    scene.kernel.add_process(os.getpid())
    scene.kernel.servers[5] = program.pid, 3

    async def end() -> None:
        await until(lambda: scene.front.serving.of(mount) == (program.pid, 3))
        scene.kernel.servers[5] = os.getpid(), 4
        program.kill()
        await until(lambda: scene.front.serving.of(mount) == (os.getpid(), 4))

    scene.watch(end)
    assert scene.kernel.asked() == []


def test_who_has_closed_its_descriptor_and_lives_is_found_out(scene: Scene, program: subprocess.Popen[bytes]) -> None:
    mount = scene.mount(5)
    scene.kernel.add_process(program.pid)
    scene.kernel.servers[5] = program.pid, 3

    async def close() -> None:
        await until(lambda: scene.front.serving.of(mount) == (program.pid, 3))
        scene.kernel.servers.clear()
        await until(lambda: not list(scene.registry))

    scene.watch(close)


def test_the_parent_of_the_caller_is_believed_to_serve_at_first(scene: Scene, program: subprocess.Popen[bytes]) -> None:
    scene.kernel.add_process(600)
    (scene.kernel.proc / "600/stat").write_text(f"600 (fusermount3) S {program.pid} 1")

    async def mount() -> None:
        await asyncio.sleep(0)
        scene.kernel.servers[5] = program.pid, 3
        mount = scene.mount(5, pid=600)
        scene.front.serving.find_candidates(mount)
        await until(lambda: scene.front.serving.of(mount) == (program.pid, 3))

    scene.watch(mount)
    searched = [each.pids for each in scene.kernel.started if isinstance(each, StartSearch)]
    assert searched == [b"%d\n600\n" % program.pid] or searched == [b"600\n%d\n" % program.pid]


def test_where_that_is_switched_off_it_is_called_dead_and_stays(scene: Scene) -> None:
    scene.front.configuration = replace(scene.front.configuration, dead_mounts_seconds=0)
    mount = scene.mount(5)
    scene.watch_until(lambda: scene.state(mount) == "dead")
    assert list(scene.registry) == [mount]
    assert not any(each.unmount for each in scene.kernel.started if isinstance(each, StartReap))


def test_a_volume_that_is_dead_at_its_target_gets_a_tombstone_once(scene: Scene) -> None:
    """It is shown as dead for as long as it exists: containers may have it."""
    mount = scene.mount(5, volume=TARGET, namespace=scene.front.mount_namespace)
    scene.watch(lambda: replaced_for_good(scene))
    assert scene.kernel.replaced() == [(TARGET, 5)]
    assert not any(each.unmount for each in scene.kernel.started if isinstance(each, StartReap))
    assert scene.state(mount) == "dead"
    assert list(scene.registry) == [mount]
    assert scene.logged == ["put a tombstone in the place of a dead mount: its program is gone (00000005)"]
    assert scene.front.requests["reap replaced"] == 1
    assert scene.front.serving.suspects == {}


async def replaced_for_good(scene: Scene) -> None:
    """Wait for a tombstone, and for what the front does after that."""
    await until(scene.kernel.replaced)
    await asyncio.sleep(1.5)


def test_the_next_program_of_a_volume_gets_its_own_tombstone(scene: Scene) -> None:
    async def come_and_go() -> None:
        for device in (5, 6):
            scene.mount(device, volume=TARGET, namespace=scene.front.mount_namespace)
            await until(lambda device=device: (TARGET, device) in scene.kernel.replaced())  # type: ignore[misc]

    scene.watch(come_and_go)
    assert scene.kernel.replaced() == [(TARGET, 5), (TARGET, 6)]


def test_a_tombstone_that_a_mounter_could_not_put_is_put_later(scene: Scene) -> None:
    mount = scene.mount(5, volume=TARGET, namespace=scene.front.mount_namespace)
    scene.kernel.fails_to_replace = True
    scene.watch_until(lambda: len(scene.kernel.replaced()) >= 2)
    assert scene.logged == []
    scene.kernel.fails_to_replace = False
    scene.watch_until(lambda: scene.logged)
    assert scene.state(mount) == "dead"


def test_what_is_not_at_the_target_any_more_is_looked_for_a_few_times(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program has come back before the mounter looked. If that fails, the dead mount is at the target again."""
    monkeypatch.setattr(dead_mounts, "AGAIN", 0.05)
    mount = scene.mount(5, volume=TARGET, namespace=scene.front.mount_namespace)
    scene.kernel.alive = {5}
    scene.watch_until(lambda: scene.kernel.replaced() and not scene.front.serving.suspects)
    assert scene.kernel.replaced() == [(TARGET, 5)] * dead_mounts._MOST_TRIES
    assert scene.state(mount) == "dead"
    assert scene.logged == []


def test_a_dead_mount_that_containers_still_have_is_looked_for_no_more(scene: Scene) -> None:
    """It had a mountpoint of its own, in a container that is gone."""
    scene.kernel.nobody_in = {NAMESPACE}
    scene.mount(5, volume=TARGET)
    scene.watch(lambda: replaced_for_good(scene))
    assert scene.kernel.replaced() == [(TARGET, 5)]
    assert scene.kernel.count(StartReap) == 2
    assert scene.front.serving.suspects == {}


def test_a_child_that_blocks_at_a_volume_holds_up_only_its_account(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "PATIENCE", 0)
    scene.kernel.blocks = {5: asyncio.Event()}
    for device in (5, 6):
        scene.mount(device, volume=TARGET, namespace=scene.front.mount_namespace)
    scene.mount(7, volume=OTHER_TARGET, namespace=scene.front.mount_namespace, account=OTHER)
    monkeypatch.setattr(hung_connections, "leave", lambda *_: asyncio.ensure_future(scene.kernel.blocks[5].wait()))

    async def watch() -> None:
        await until(lambda: (OTHER_TARGET, 7) in scene.kernel.replaced())
        await asyncio.sleep(2)
        assert (TARGET, 6) not in scene.kernel.replaced()
        scene.kernel.blocks[5].set()
        await until(lambda: (TARGET, 6) in scene.kernel.replaced())

    scene.watch(watch)


def test_many_looks_at_a_mount_that_lives_do_no_harm(scene: Scene) -> None:
    mount = scene.mount(5, volume=TARGET, namespace=scene.front.mount_namespace)
    scene.kernel.answers[5] = errno.EAGAIN

    def tries() -> int:
        return scene.front.serving.suspects[mount.device].tries

    async def watch() -> None:
        await until(lambda: mount.device in scene.front.serving.suspects and tries() == 1)
        scene.front.serving.suspects[mount.device].tries = 5000
        await until(lambda: tries() == 5001)

    scene.watch(watch)
    assert scene.logged == []


def test_who_wants_no_dead_mount_unmounted_gets_no_tombstone(scene: Scene) -> None:
    scene.front.configuration = replace(scene.front.configuration, dead_mounts_seconds=0)
    mount = scene.mount(5, volume=TARGET, namespace=scene.front.mount_namespace)
    scene.watch_until(lambda: scene.state(mount) == "dead")
    assert scene.kernel.replaced() == []


def test_a_volume_whose_program_has_unmounted_it_is_replaced_at_the_target(scene: Scene) -> None:
    scene.mount(5, volume=TARGET)
    scene.kernel.keeps = {5}
    scene.watch_until(scene.kernel.replaced)
    reaps = [(each.mount_namespace, each.unmount) for each in scene.kernel.started if isinstance(each, StartReap)]
    assert reaps == [(NAMESPACE, True), (scene.front.mount_namespace, False)]


@pytest.mark.parametrize("answer", [0, errno.EAGAIN, errno.ENOENT, errno.ETIMEDOUT])
def test_what_may_be_served_gets_no_tombstone(scene: Scene, answer: int) -> None:
    scene.mount(5, volume=TARGET, namespace=scene.front.mount_namespace)
    scene.kernel.answers[5] = answer
    scene.watch_until(lambda: scene.kernel.count(StartReap) >= 3)
    assert scene.kernel.replaced() == []


def test_a_volume_that_says_nothing_outside_of_its_user_namespace_is_for_the_mounter_to_decide(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But only when the process that served it has ended: another may have its descriptor where nobody sees that."""
    monkeypatch.setattr(dead_mounts, "AGAIN", 0.05)
    mount = scene.mount(5, volume=TARGET, namespace=scene.front.mount_namespace)
    scene.kernel.answers[5] = errno.ENODATA
    scene.kernel.alive = {5}

    async def watch() -> None:
        await until(lambda: scene.kernel.count(StartReap) > 2)
        assert scene.kernel.replaced() == []
        scene.front.serving.lost(mount)
        await until(lambda: len(scene.kernel.replaced()) > dead_mounts._MOST_TRIES)
        assert scene.state(mount) == "live"
        scene.kernel.alive = set()
        await until(lambda: scene.state(mount) == "dead")

    scene.watch(watch)
    assert scene.front.requests["reap replaced"] == 1


def test_a_volume_whose_program_is_gone_with_its_namespace_is_asked_at_the_target(scene: Scene) -> None:
    scene.kernel.nobody_in = {NAMESPACE}
    mount = scene.mount(5, volume=TARGET)
    scene.watch_until(scene.kernel.replaced)
    assert scene.state(mount) == "dead"
    reaps = [(each.mount_namespace, each.unmount) for each in scene.kernel.started if isinstance(each, StartReap)]
    assert reaps == [(NAMESPACE, True), (scene.front.mount_namespace, False)]
    assert list(scene.registry) == [mount]


def test_what_was_aborted_is_unmounted_although_its_program_is_there(
    scene: Scene, program: subprocess.Popen[bytes]
) -> None:
    mount = scene.mount(5)
    scene.kernel.add_process(program.pid)
    scene.kernel.servers[5] = program.pid, 3

    async def abort() -> None:
        await until(lambda: scene.front.serving.of(mount) == (program.pid, 3))
        scene.front.states.note_dead(mount.connection)
        scene.front.serving.suspect(mount, time.monotonic())
        await until(lambda: not list(scene.registry))

    scene.watch(abort)


def test_a_mount_of_a_process_that_is_not_to_be_seen_is_not_asked(scene: Scene) -> None:
    mount = scene.mount(5, pid=0)
    scene.watch_until(lambda: scene.kernel.count(StartSurvey) >= 2)
    assert (scene.kernel.asked(), scene.state(mount)) == ([], "live")


def test_all_that_is_dead_in_a_namespace_is_unmounted_by_one_child(scene: Scene) -> None:
    for device in range(5, 205):
        scene.mount(device, namespace=NAMESPACE + device % 2)
    scene.watch_until(lambda: not list(scene.registry))
    asked = scene.kernel.asked()
    assert sum(map(len, asked)) == 200
    assert len(asked) <= 6, "a busy machine makes some more of them due later than others, but not each by itself"


def test_very_many_that_are_dead_in_a_namespace_are_unmounted_by_several_children_at_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_moment(monkeypatch, 0)  # all are due at once, and form one inquiry
    for device in range(5, 905):
        scene.mount(device)
    scene.watch_until(lambda: not list(scene.registry))
    asked = scene.kernel.asked()
    assert sum(map(len, asked)) == 900
    assert max(map(len, asked)) <= dead_mounts.MOST_OF_A_CHILD
    assert scene.kernel.most_asking == dead_mounts.CHILDREN_OF_AN_ACCOUNT


def test_children_that_ask_are_bounded_for_all_accounts_together(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    set_moment(monkeypatch, 0)  # all of an account are due at once, and form one inquiry
    scene.kernel.seconds_of_reaping = 0.2
    for account in range(4):
        for number in range(600):
            scene.mount(5 + 600 * account + number, account=AccountName(f"account {account}"))
    scene.watch_until(lambda: not list(scene.registry))
    assert scene.kernel.most_asking == dead_mounts.CHILDREN_AT_ONCE


def test_what_does_not_answer_comes_last_and_holds_up_nothing_else(scene: Scene) -> None:
    silent = [scene.mount(device) for device in range(5, 8)]
    scene.mount(8)
    scene.kernel.answers = {mount.device: errno.ETIMEDOUT for mount in silent}
    scene.watch_until(lambda: len(list(scene.registry)) == len(silent) and len(scene.kernel.asked()) >= 6)
    assert [len(devices) for devices in scene.kernel.asked()][:4] == [4, 3, 2, 1]
    assert {scene.state(mount) for mount in silent} == {"live"}


def test_an_account_has_one_inquiry_and_what_holds_it_holds_no_other_account(scene: Scene) -> None:
    scene.mount(5, OTHER)
    scene.mount(6, OTHER, namespace=NAMESPACE + 1)
    scene.kernel.answers = {5: errno.ETIMEDOUT}

    async def hold() -> None:
        scene.kernel.held = asyncio.Event()
        try:
            await until(lambda: scene.kernel.asked())
            scene.mount(7)
            await until(lambda: not scene.registry.find(Device(7)))
            assert scene.kernel.asked().count([5]) == 1
        finally:
            scene.kernel.held.set()

    scene.watch(hold)


def test_no_more_accounts_have_inquiries_than_there_is_room_for_and_all_have_their_turn(scene: Scene) -> None:
    for device in range(5, 35):
        scene.mount(device, AccountName(f"container /machine.slice/{device}"))
    most = 0

    async def count() -> None:
        nonlocal most
        while list(scene.registry):
            begun = sum(not child.done() for child in scene.kernel.children)
            most = max(most, begun)
            await asyncio.sleep(0)

    scene.watch(count)
    assert 1 <= most <= dead_mounts.AT_ONCE + 1, "and a survey"


def test_requests_that_do_not_move_make_a_mount_hung(scene: Scene, program: subprocess.Popen[bytes]) -> None:
    mount = scene.mount(5)
    scene.kernel.add_process(program.pid)
    scene.kernel.servers[5], scene.kernel.waiting[5] = (program.pid, 3), 2
    scene.watch_until(lambda: scene.state(mount) == "hung")
    scene.kernel.waiting[5] = 1
    scene.watch_until(lambda: scene.state(mount) == "live")


def test_who_asks_how_mounts_are_is_told_what_waits_now(scene: Scene) -> None:
    mounts = [scene.mount(device) for device in range(5, 8)]
    scene.kernel.waiting = {5: 1, 6: 2, 7: 3}
    health = Health(scene.front, asyncio.Event())
    told = asyncio.run(control_socket._answer(scene.front, health, "mounts"))
    assert [row["waiting"] for row in told] == [1, 2, 3]
    assert [scene.front.states.waiting(mount.connection) for mount in mounts] == [1, 2, 3]


def test_a_look_is_at_so_many_mounts_however_many_there_are(scene: Scene) -> None:
    for device in range(5, 30):
        scene.mount(device, pid=0)
    looker = Watch(scene.front)

    async def look() -> None:
        for _ in range(3):
            await looker.look(10)

    asyncio.run(look())
    lines = [each.connections.splitlines() for each in scene.kernel.started if isinstance(each, StartSurvey)]
    assert [len(each) for each in lines] == [10, 10, 5]
    assert len({line for each in lines for line in each}) == 25


def test_looks_are_rare_while_each_mount_has_its_process_and_no_request_waits(
    scene: Scene, program: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mount_watch, "CALM", 3600)
    mount = scene.mount(5)
    scene.kernel.add_process(program.pid)
    scene.kernel.servers[5] = program.pid, 3
    serving = scene.front.serving

    async def watch() -> None:
        await until(lambda: serving.of(mount) == (program.pid, 3) and not serving.unconfirmed)
        looks = scene.kernel.count(StartSurvey)
        await asyncio.sleep(3.5)  # in which there would be three
        assert scene.kernel.count(StartSurvey) == looks
        other = scene.mount(6)
        scene.kernel.servers[6] = program.pid, 4
        await until(lambda: serving.of(other) == (program.pid, 4) and not serving.unconfirmed)
        assert scene.kernel.count(StartSurvey) > looks, "a process that was just found is looked at again"

    scene.watch(watch)


def test_while_requests_wait_looks_are_frequent(
    scene: Scene, program: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mount_watch, "CALM", 3600)
    mount = scene.mount(5)
    scene.kernel.add_process(program.pid)
    scene.kernel.servers[5], scene.kernel.waiting[5] = (program.pid, 3), 1
    scene.watch_until(lambda: scene.state(mount) == "hung" and scene.kernel.count(StartSurvey) >= 4)


def test_while_the_end_of_a_process_is_no_event_looks_are_frequent(
    scene: Scene, program: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mount_watch, "CALM", 3600)
    scene.front.serving.most_pidfds = 0
    mount = scene.mount(5)
    scene.kernel.add_process(program.pid)
    scene.kernel.servers[5] = program.pid, 3

    async def end() -> None:
        await until(lambda: scene.front.serving.of(mount) == (program.pid, 3) and not scene.front.serving.unconfirmed)
        scene.kernel.servers.clear()
        await until(lambda: not list(scene.registry))
        assert scene.front.serving.without_pidfd == 0

    scene.watch(end)


def test_a_look_after_a_long_time_is_at_no_more_mounts_than_fit_into_a_record(scene: Scene) -> None:
    for device in range(5, 1105):
        scene.mount(device, pid=0)
    asyncio.run(Watch(scene.front).look(3600))
    (survey,) = [each for each in scene.kernel.started if isinstance(each, StartSurvey)]
    assert len(survey.connections.splitlines()) == connection_survey.MOST_SURVEYED


def test_the_lines_of_the_longest_records_fit() -> None:
    line = b"%d %d %d %d\n" % (2**32 - 1, 2**32 - 1, 2**22, 2**20)
    messages.dump(StartSurvey(5, line * connection_survey.MOST_SURVEYED))
    messages.dump(Surveyed(line * connection_survey.MOST_SURVEYED))
    devices = b"%d\n" % (2**32 - 1) * dead_mounts.MOST_AT_ONCE
    messages.dump(StartSearch(5, devices, b"%d\n" % 2**22 * dead_mounts.MOST_PROCESSES))
    messages.dump(Found(b"%d %d %d\n" % (2**32 - 1, 2**22, 2**20) * dead_mounts.MOST_AT_ONCE))
    messages.dump(StartReap(5, 2**32 - 1, True, devices))
