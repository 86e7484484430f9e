"""The supervisor: it restarts a process that ends, with what the process needs, and applies a good configuration at
once.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusermount3_broker.messages import supervisor as orders
from fusermount3_broker.messages.csi_settings import Csi
from fusermount3_broker.service import log, sandbox
from fusermount3_broker.supervisor import daemon, processes, restarts
from fusermount3_broker.supervisor.daemon import StartError
from fusermount3_broker.supervisor.processes import Front, LaunchedFront, Mounter, Plugin
from fusermount3_broker.supervisor.restarts import NotBegun
from tests.unit.fakes import all_descriptors, open_descriptors

CSI = Csi("unix:///csi/csi.sock", "node", "csi.example", Path("/var/lib/kubelet"), "fuse-mounts")


class FakeProcess:
    """Stands in for a process that was started with `sockets`; the test plays what would run in it."""

    def __init__(self, module: str, descriptors: tuple[int, ...], fails: bool, dies: bool) -> None:
        self.sockets = [socket.socket(fileno=os.dup(each)) for each in descriptors]
        self.pid = 4711
        self.arguments: Sequence[str] = ()
        self.status: int | None = None
        if module == "fusermount3_broker.csi.plugin":
            pass  # it sends its supervisor nothing
        elif dies:
            self.die(-9)
        elif module == "fusermount3_broker.front.daemon":
            self.sockets[0].send(orders.dump(orders.Failed(b"no disk") if fails else orders.Ready()))
        elif fails:
            self.die(3)
        else:
            socket.send_fds(self.sockets[3], [orders.dump(orders.MounterReady(True, True))], [0, 1])

    def heard(self) -> list[tuple[orders.Order, int, bytes]]:
        """Return the orders to a front, each with its number of descriptors and the content of its first file."""
        found: list[tuple[orders.Order, int, bytes]] = []
        self.sockets[0].setblocking(False)
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.sockets[0], 10_000, 10)
            except BlockingIOError:
                return found
            order = orders.load(data)
            is_file = isinstance(order, orders.Configuration | orders.SubordinateIds) and descriptors
            found.append((order, len(descriptors), os.pread(descriptors[0], 1000, 0) if is_file else b""))
            for each in descriptors:
                os.close(each)

    def die(self, status: int = -9) -> None:
        self.status = status
        for each in self.sockets:
            each.close()

    def poll(self) -> int | None:
        return self.status

    def wait(self, _: float | None = None) -> int:
        return self.status or 0

    def kill(self) -> None:
        assert self.status is not None, "it ends by itself"


class Started(list[FakeProcess]):
    """The fake processes that were started; the next ones can't begin if `failing`, and the next `dying` are killed."""

    failing = False
    dying = 0

    def start(self, module: str, *descriptors: int, arguments: Sequence[str] = ()) -> FakeProcess:
        if self.dying < 0:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        dies = self.dying > 0 and module != "fusermount3_broker.csi.plugin"
        self.dying -= dies
        self.append(FakeProcess(module, descriptors, self.failing, dies))
        self[-1].arguments = arguments
        return self[-1]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    started = Started()
    monkeypatch.setattr(restarts, "start", started.start)
    monkeypatch.setattr(restarts, "_PAUSE", 0.001)
    yield started
    for each in started:
        each.die()


class Scene:
    """A supervisor's two processes, its log, and its messages to systemd."""

    def __init__(self, directory: Path, started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = directory / "broker.toml"
        self.started = started
        self.left: list[int] = []
        monkeypatch.setattr(
            "fusermount3_broker.supervisor.daemon.orphans.of", lambda *_: [os.dup(each) for each in self.left]
        )
        self.logged: list[tuple[int, str]] = []
        self.notified: list[str] = []
        monkeypatch.setattr("fusermount3_broker.supervisor.daemon.daemon.notify", self.notified.append)
        self.subuid = directory / "subuid"
        self.subuid.write_text("user:100000:65536\n")
        monkeypatch.setattr(processes, "_SUBORDINATE_IDS", (self.subuid, directory / "none"))
        self.mounter = Mounter()
        self.mounter.start()
        self.front = Front(
            orders.Begin(bytes(directory / "state"), b"json", metrics=False, volumes=False, keeps_fusectl=False),
            [*self.mounter.for_front, 2],
        )

    def start(self, text: str = "mount_max = 7") -> None:
        self.file.write_text(text)
        self.front.configure(self.file)
        self.front.start(self.mounter)

    def reload(self, text: str | bytes | None) -> None:
        if text is None:
            self.file.unlink()
        else:
            self.file.write_bytes(text.encode() if isinstance(text, str) else text)
        daemon._reload(self.file, self.front, self._log)

    def heard(self) -> list[tuple[orders.Order, int, bytes]]:
        return self.started[-1].heard()

    def _log(self, priority: int, message: str, **_: Any) -> None:
        self.logged.append((priority, message))

    def close(self) -> None:
        self.front.close()
        self.mounter.close()


@pytest.fixture
def scene(tmp_path: Path, started: Started, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    before = open_descriptors()
    scene = Scene(tmp_path, started, monkeypatch)
    yield scene
    scene.close()
    for each in started:
        each.die()
    assert all_descriptors() == before


def test_a_front_begins_with_all_that_it_works_with(scene: Scene, tmp_path: Path) -> None:
    scene.start("mount_max = 7")
    assert scene.heard() == [
        (orders.Begin(bytes(tmp_path / "state"), b"json", metrics=False, volumes=False, keeps_fusectl=False), 6, b""),
        (orders.Configuration(bytes(scene.file)), 1, b"mount_max = 7"),
        (orders.SubordinateIds(), 2, b"user:100000:65536\n"),
        (orders.MounterStarted(4711, 0, True), 0, b""),
    ]


def test_a_front_that_cannot_begin_says_why(scene: Scene) -> None:
    scene.started.failing = True
    with pytest.raises(NotBegun, match="no disk") as raised:
        scene.start()
    assert not raised.value.killed, "it has said so itself"


def test_a_front_that_has_ended_is_replaced_by_one_that_knows_as_much(scene: Scene) -> None:
    scene.start("mount_max = 7")
    scene.mounter.restart()
    scene.file.write_text("a mistake")  # not loaded yet, and so not for the next front
    first = scene.started[1]
    known = first.heard()
    first.die()
    assert scene.front.ended() == -9
    scene.front.start(scene.mounter)
    assert scene.front.ended() is None
    assert scene.heard() == [*known[:-1], (orders.MounterStarted(4711, 1, True), 0, b"")]


def test_a_front_launched_in_advance_is_the_first_one(scene: Scene) -> None:
    begin = orders.Begin(bytes(scene.file.parent), b"json", metrics=False, volumes=False, keeps_fusectl=False)
    launched = LaunchedFront()
    assert scene.started[-1].heard() == []
    scene.front = Front(begin, [2], launched)
    scene.start()
    assert len(scene.started) == 2, "the mounter and the front"
    assert scene.heard()[0] == (begin, 1, b"")
    scene.started[1].die()
    assert scene.front.ended() == -9
    scene.front.start(scene.mounter)
    assert len(scene.started) == 3
    assert scene.heard()[0] == (begin, 1, b"")


@pytest.mark.parametrize("orders_sent", [[], [b"kind=Nonsense\0"]], ids=["none", "malformed"])
def test_a_front_without_orders_ends_without_a_word_but_not_with_wrong_ones(orders_sent: list[bytes]) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        for each in orders_sent:
            ours.send(each)
        command = [sys.executable, "-m", "fusermount3_broker.front.daemon", f"{theirs.fileno()}"]
        front = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
    said = front.communicate(timeout=60)[1]
    assert (front.returncode == 0, said == b"") == (not orders_sent, not orders_sent)


def test_a_mounter_that_has_ended_is_replaced_and_the_conversation_goes_on(scene: Scene) -> None:
    scene.started[0].die()
    assert scene.mounter.ended() == -9
    os.write(scene.mounter.for_front[0], b"an operation that waits")
    scene.mounter.restart()
    assert scene.mounter.ended() is None
    assert scene.started[1].sockets[0].recv(100) == b"an operation that waits"
    assert scene.mounter.restarts == 1


def test_who_comes_next_is_told_of_the_children_that_have_not_ended(scene: Scene) -> None:
    scene.start()
    scene.started[0].die()
    scene.left = scene.mounter.for_front[:2]
    scene.mounter.restart()
    assert len(scene.started[-1].sockets) == 4 + 2
    assert scene.started[-1].arguments == ["64", "0"]
    scene.front.restart(scene.mounter)
    assert scene.heard()[-1] == (orders.ChildrenLeft(), 2, b"")


def test_a_mounter_that_cannot_begin_is_told(started: Started) -> None:
    started.failing = True
    mounter = Mounter()
    with pytest.raises(NotBegun, match="the mounter ended with status 3 when it was started") as raised:
        mounter.start()
    assert not raised.value.killed
    mounter.close()


# Processes that end while they begin


def begins(start: Any, pauses: restarts.Backoff) -> tuple[bool, list[str]]:
    """Begin as the broker does at its start; return whether it did, and the log messages."""
    logged: list[str] = []

    def write_log(priority: int, message: str, **_: Any) -> None:
        assert priority == log.ERROR
        logged.append(message)

    return daemon._begins(start, pauses, write_log), logged


def test_a_process_that_is_killed_while_it_begins_is_started_again(scene: Scene) -> None:
    scene.front.configure(None)
    scene.started.dying = 3
    begun, logged = begins(lambda: scene.front.start(scene.mounter), scene.front.pauses)
    assert begun
    assert logged == ["the front ended with status -9 when it was started, another is started"] * 3
    assert scene.front.ended() is None
    mounter = Mounter()
    scene.started.dying = 2
    begun, logged = begins(mounter.start, mounter.pauses)
    assert begun
    assert logged == ["the mounter ended with status -9 when it was started, another is started"] * 2
    mounter.close()


def test_a_broker_whose_front_says_why_it_cannot_begin_does_not_go_on_trying(scene: Scene) -> None:
    scene.front.configure(None)
    scene.started.failing = True
    with pytest.raises(StartError, match="no disk"):
        begins(lambda: scene.front.start(scene.mounter), scene.front.pauses)


def test_who_ends_the_broker_does_not_wait_for_a_process_that_is_killed_each_time(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    def sigtimedwait(signals: Sequence[int], seconds: float) -> object:
        assert signal.SIGTERM in signals
        waited.append(seconds)
        return None if len(waited) < 7 else object()

    monkeypatch.setattr("fusermount3_broker.supervisor.daemon.signal.sigtimedwait", sigtimedwait)
    monkeypatch.setattr(restarts, "time", SimpleNamespace(monotonic=lambda: sum(waited)))
    monkeypatch.setattr(restarts, "_PAUSE", 0.05)
    scene.front.configure(None)
    scene.started.dying = 100
    begun, logged = begins(lambda: scene.front.start(scene.mounter), scene.front.pauses)
    assert (begun, len(logged)) == (False, 7)
    assert waited == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
    scene.started.dying = 0


@pytest.mark.parametrize("how", ["killed", "can't be forked", "has a reason"])
def test_a_running_broker_goes_on_trying_whatever_its_processes_end_of(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    scene.start()
    attempts = 0

    def next_signal(all_pauses: Sequence[restarts.Backoff]) -> int | None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            scene.mounter._process.die()  # type: ignore[union-attr]  # a fake
            scene.front._process.die()  # type: ignore[union-attr]
            scene.started.dying = {"killed": 100, "can't be forked": -1}.get(how, 0)
            scene.started.failing = how == "has a reason"
        elif attempts == 20:
            scene.started.dying, scene.started.failing = 0, False
        for pauses in all_pauses:
            if pauses.due is not None:
                pauses.due = 0.0
        over = attempts > 20 and all(pauses.due is None for pauses in all_pauses)
        return signal.SIGTERM if over else signal.SIGCHLD

    monkeypatch.setattr(daemon, "_next_signal", next_signal)
    daemon._supervise(scene.file, scene.mounter, scene.front, None, scene._log)
    assert scene.mounter.ended() is None
    assert scene.front.ended() is None
    assert "the front has ended with status -9, another is started" in [message for _, message in scene.logged]


# The CSI plugin


@pytest.fixture
def plugin(started: Started) -> Iterator[Plugin]:
    plugin = Plugin(CSI, "json")
    plugin.start()
    yield plugin
    plugin.close()
    assert started[0].arguments == ["json", "unix:///csi/csi.sock", "node", "csi.example", "/var/lib/kubelet"]


def test_a_front_hears_which_plugin_there_is(scene: Scene) -> None:
    plugin = Plugin(CSI, "json")
    plugin.start()
    scene.front.configure(None)
    scene.front.start(scene.mounter, plugin)
    assert scene.heard()[-1] == (orders.PluginStarted(4711, 0), 0, b"")
    plugin.close()


def test_what_kubelet_asked_waits_for_the_next_plugin_and_the_next_front(plugin: Plugin, started: Started) -> None:
    os.write(started[0].sockets[0].fileno(), b"a request")
    plugin.for_front.send(b"an answer")
    started[0].die()
    assert plugin.ended() == -9
    plugin.start()
    assert started[1].sockets[0].recv(100) == b"an answer"
    assert plugin.for_front.recv(100) == b"a request"
    assert plugin.started == orders.PluginStarted(4711, 1)


def test_a_plugin_that_ends_again_and_again_is_started_less_and_less_often(
    plugin: Plugin, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr("fusermount3_broker.supervisor.processes.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(restarts, "_PAUSE", 0.05)
    pauses = []
    for _ in range(10):
        plugin.start()
        clock[0] += 1
        started[-1].die()
        assert plugin.ended() == -9
        assert plugin.ended() is None, "it is told once"
        assert plugin.pauses.due is not None and not plugin.pauses.are_over
        pauses.append(round(plugin.pauses.due - clock[0], 3))
        clock[0] = plugin.pauses.due
        assert plugin.pauses.are_over
    assert pauses[:4] == [0.05, 0.1, 0.2, 0.4]
    assert pauses[-1] == 5
    plugin.start()
    clock[0] += 6
    started[-1].die()
    plugin.ended()
    assert plugin.pauses.due == pytest.approx(clock[0] + 0.05), "it has served for some time"
    plugin.start()


def test_a_front_that_fails_at_once_is_heard_although_it_has_not_listened(scene: Scene) -> None:
    scene.start()
    scene.heard()
    process = scene.started[-1].sockets[0]
    process.send(b"why")
    scene.front.tell(orders.MounterStarted(1, 1, True))
    scene.started[-1].die()  # with an order unread: the kernel reports that first
    assert scene.front._conversation
    assert scene.front._first_word(scene.front._conversation) == b"why"


def test_a_good_file_comes_into_force(scene: Scene) -> None:
    scene.start()
    scene.heard()
    scene.reload("mount_max = 9")
    assert scene.heard() == [(orders.Configuration(bytes(scene.file)), 1, b"mount_max = 9")]
    assert scene.logged == []


@pytest.mark.parametrize("text", ["mount_maxx = 9", "mount_max = 'x'", "mount_max =", b"# \xff", None])
def test_a_mistake_leaves_the_old_one_in_force_and_is_logged(scene: Scene, text: str | bytes | None) -> None:
    scene.start()
    scene.heard()
    scene.reload(text)
    assert scene.heard() == []
    ((priority, message),) = scene.logged
    assert priority == log.ERROR
    assert re.match(f"configuration not loaded, the old one stays in force: {scene.file}:(1:)? ", message)
    scene.reload("mount_max = 11")
    assert scene.heard() == [(orders.Configuration(bytes(scene.file)), 1, b"mount_max = 11")]


@pytest.mark.parametrize("text", ["mount_max = 9", "nonsense"])
def test_systemd_is_told_when_reloading_begins_and_ends(scene: Scene, text: str) -> None:
    scene.start()
    scene.reload(text)
    assert scene.notified == ["RELOADING=1", "READY=1"]


def test_the_state_directory_is_made_for_its_owner_only(tmp_path: Path) -> None:
    daemon._prepare_state(tmp_path / "a/b", log.to_stderr)
    assert (tmp_path / "a/b").stat().st_mode & 0o777 == 0o700


class Logged(list[tuple[int, str]]):
    """A log: the priority and the message of each record."""

    def __call__(self, priority: int, message: str, **_: log.Value) -> None:
        self.append((priority, message))


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as held:
        yield held


def test_a_broker_waits_until_another_with_its_state_directory_has_ended(
    tmp_path: Path, held: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = Logged()
    with ExitStack() as others:
        assert daemon._becomes_only_broker(tmp_path / "state", others, log.to_stderr)
        waits = [None, lambda: others.close()]

        def sigtimedwait(numbers: Sequence[int], _: float) -> None:
            assert set(numbers) == {signal.SIGTERM, signal.SIGINT}
            if then := waits.pop(0):
                then()

        monkeypatch.setattr("fusermount3_broker.supervisor.daemon.signal.sigtimedwait", sigtimedwait)
        assert daemon._becomes_only_broker(tmp_path / "state", held, logged)
    assert waits == []
    assert logged == [(log.WARNING, f"another broker uses '{tmp_path / 'state'}', this one waits until it has ended")]


def test_a_broker_does_not_start_beside_another_that_stays(
    tmp_path: Path, held: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "_OTHER_ENDS_IN", 0.05)
    monkeypatch.setattr(daemon, "_LOOK_FOR_OTHER", 0.01)
    with ExitStack() as others:
        assert daemon._becomes_only_broker(tmp_path, others, log.to_stderr)
        before = open_descriptors()
        with held, pytest.raises(StartError, match=f"another broker uses '{tmp_path}', and has not ended in 0.05 sec"):
            daemon._becomes_only_broker(tmp_path, held, log.to_stderr)
        assert open_descriptors() == before


def test_a_broker_that_waits_for_another_ends_by_a_signal(
    tmp_path: Path, held: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    received = SimpleNamespace(si_signo=signal.SIGTERM)
    monkeypatch.setattr("fusermount3_broker.supervisor.daemon.signal.sigtimedwait", lambda *_: received)
    assert daemon._becomes_only_broker(tmp_path, held, log.to_stderr)
    assert not daemon._becomes_only_broker(tmp_path, held, log.to_stderr)


def test_a_broker_starts_though_its_state_directory_can_not_be_locked(
    tmp_path: Path, held: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: int) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))  # as on NFS

    logged = Logged()
    monkeypatch.setattr("fusermount3_broker.service.state_directory.fcntl.flock", flock)
    assert daemon._becomes_only_broker(tmp_path, held, logged)
    assert logged == [(log.WARNING, f"'{tmp_path}' can't be locked, so do not start two brokers: Bad file descriptor")]


def test_the_state_directory_and_its_files_are_the_fronts_but_not_what_is_linked_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "user", lambda: (4711, 4712))
    chowned: list[Path] = []

    def chown(what: Path | int, uid: int, gid: int) -> None:
        assert (uid, gid) == (4711, 4712)
        chowned.append(Path(f"/proc/self/fd/{what}").readlink() if isinstance(what, int) else what)

    monkeypatch.setattr("fusermount3_broker.supervisor.daemon.os.chown", chown)
    monkeypatch.setattr("fusermount3_broker.supervisor.daemon.os.fchown", chown)
    (tmp_path / "mounts.sqlite").touch()
    (tmp_path / "link").symlink_to("/etc/passwd")
    (tmp_path / "elsewhere").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "hard").touch()
    (tmp_path / "harder").hardlink_to(tmp_path / "hard")
    daemon._prepare_state(tmp_path, log.to_stderr)
    assert chowned == [tmp_path, tmp_path / "mounts.sqlite"]


def test_a_configuration_that_nests_deeply_leaves_the_old_one_in_force(scene: Scene) -> None:
    scene.start("mount_max = 7")
    scene.heard()
    scene.reload("mount_max = " + "[" * 2000)
    assert scene.heard() == []
    ((priority, message),) = scene.logged
    assert priority == log.ERROR
    assert message.endswith(": lists or tables are nested too deeply")


def test_a_fifo_in_place_of_the_configuration_holds_nobody_up(scene: Scene) -> None:
    scene.start()
    scene.file.unlink()
    os.mkfifo(scene.file)
    daemon._reload(scene.file, scene.front, scene._log)
    ((_, message),) = scene.logged
    assert message.endswith(": not a regular file")


def test_a_front_hears_when_a_user_has_been_given_uids(scene: Scene) -> None:
    scene.start()
    scene.heard()
    scene.front.renew_subordinate_ids()
    assert scene.heard() == []
    scene.subuid.write_text("other:200000:65536\n")
    scene.front.renew_subordinate_ids()
    scene.front.renew_subordinate_ids()
    assert scene.heard() == [(orders.SubordinateIds(), 2, b"other:200000:65536\n")]


def test_what_says_whose_uids_are_is_read_only_if_it_is_a_file(scene: Scene) -> None:
    scene.subuid.unlink()
    os.mkfifo(scene.subuid)
    scene.start()
    assert (orders.SubordinateIds(), 2, b"") in scene.heard()


def test_the_supervisor_looks_again_when_no_signal_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "_LOOK_AGAIN", 0.01)
    assert daemon._next_signal([]) is None


def make_directory(path: Path) -> None:
    path.mkdir()
    (path / "something").touch()


def make_dangling_link(path: Path) -> None:
    path.symlink_to("/nowhere")


def make_link(path: Path) -> None:
    (path.parent / "elsewhere").touch()
    path.symlink_to(path.parent / "elsewhere")


def make_hard_link(path: Path) -> None:
    (path.parent / "elsewhere").touch()
    path.hardlink_to(path.parent / "elsewhere")


@pytest.mark.parametrize("make", [make_directory, os.mkfifo, make_dangling_link, make_link, make_hard_link])
@pytest.mark.parametrize("name", ["mounts.sqlite", "mounts.sqlite-wal", "mounts.sqlite-shm", "volumes.sqlite"])
def test_what_can_be_no_table_is_put_aside(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    logged: list[str] = []

    def write_log(priority: int, message: str, **_: log.Value) -> None:
        assert priority == log.ERROR
        logged.append(message)

    directory = tmp_path / "state"
    directory.mkdir()
    (directory / "README").touch()
    make(directory / name)
    before = (directory / name).lstat()
    daemon._prepare_state(directory, write_log)
    (message,) = logged
    assert message.startswith("a file in place of a table was moved aside: ")
    assert not os.path.lexists(directory / name)
    (aside,) = directory.glob(f"{name}.damaged-*")
    assert str(aside) in message
    assert (aside.lstat().st_ino, aside.lstat().st_mode) == (before.st_ino, before.st_mode)
    daemon._prepare_state(directory, write_log)
    assert len(logged) == 1
    assert (directory / "README").exists()
