"""The supervisor: a process that ends is started again, with what it needs; a good configuration counts at once."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from broker import log, orders, sandbox, supervisor
from broker.supervisor import Csi, Front, Mounter, Plugin, StartError
from tests.unit.fakes import all_descriptors, open_descriptors

CSI = Csi("unix:///csi/csi.sock", "node", "csi.example", Path("/var/lib/kubelet"))


class FakeProcess:
    """Stands for a process that was started with `sockets`: the test is what would run in it."""

    def __init__(self, module: str, descriptors: tuple[int, ...], fails: bool) -> None:
        self.sockets = [socket.socket(fileno=os.dup(each)) for each in descriptors]
        self.pid = 4711
        self.arguments: Sequence[str] = ()
        self.status: int | None = None
        if module == "broker.csi.plugin":
            pass  # it says nothing to its supervisor
        elif module == "broker.daemon":
            self.sockets[0].send(orders.dump(orders.Failed(b"no disk") if fails else orders.Ready()))
        elif fails:
            self.die(3)
        else:
            socket.send_fds(self.sockets[2], [b"ready"], [0, 1])

    def heard(self) -> list[tuple[orders.Order, int, bytes]]:
        """Return what was said to a front: each order, how many descriptors came, and what is in the first file."""
        found: list[tuple[orders.Order, int, bytes]] = []
        self.sockets[0].setblocking(False)
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.sockets[0], 10_000, 10)
            except BlockingIOError:
                return found
            order = orders.load(data)
            is_file = isinstance(order, orders.Configuration) and descriptors
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
    """The fake processes that were started; the next ones can't begin if `failing`."""

    failing = False

    def start(self, module: str, *descriptors: int, arguments: Sequence[str] = ()) -> FakeProcess:
        self.append(FakeProcess(module, descriptors, self.failing))
        self[-1].arguments = arguments
        return self[-1]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    started = Started()
    monkeypatch.setattr(supervisor, "_start", started.start)
    monkeypatch.setattr(supervisor, "_PAUSE", 0)
    yield started
    for each in started:
        each.die()


class Scene:
    """A supervisor's two processes, what it logged and what systemd was told."""

    def __init__(self, directory: Path, started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = directory / "broker.toml"
        self.started = started
        self.logged: list[tuple[int, str]] = []
        self.notified: list[str] = []
        monkeypatch.setattr("broker.supervisor.daemon.notify", self.notified.append)
        self.mounter = Mounter()
        self.front = Front(
            orders.Begin(bytes(directory / "state"), metrics=False, volumes=False), [*self.mounter.for_front, 2]
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
        supervisor._reload(self.file, self.front, self._log)

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
        (orders.Begin(bytes(tmp_path / "state"), metrics=False, volumes=False), 5, b""),
        (orders.Configuration(bytes(scene.file)), 1, b"mount_max = 7"),
        (orders.MounterStarted(4711, 0), 0, b""),
    ]


def test_a_front_that_cannot_begin_says_why(scene: Scene) -> None:
    scene.started.failing = True
    with pytest.raises(StartError, match="no disk"):
        scene.start()


def test_a_front_that_has_ended_is_replaced_by_one_that_knows_as_much(scene: Scene) -> None:
    scene.start("mount_max = 7")
    scene.mounter.restart()
    scene.file.write_text("a mistake")  # not yet loaded, and so none of its business
    first = scene.started[1]
    known = first.heard()
    first.die()
    assert scene.front.ended() == -9
    scene.front.restart(scene.mounter)
    assert scene.front.ended() is None
    assert scene.heard() == [*known[:-1], (orders.MounterStarted(4711, 1), 0, b"")]


def test_a_mounter_that_has_ended_is_replaced_and_the_conversation_goes_on(scene: Scene) -> None:
    scene.started[0].die()
    assert scene.mounter.ended() == -9
    os.write(scene.mounter.for_front[0], b"an operation that waits")
    scene.mounter.restart()
    assert scene.mounter.ended() is None
    assert scene.started[1].sockets[0].recv(100) == b"an operation that waits"
    assert scene.mounter.restarts == 1


def test_a_mounter_that_cannot_begin_is_told(started: Started) -> None:
    started.failing = True
    with pytest.raises(StartError, match="the mounter ended with status 3 when it was started"):
        Mounter()


# The CSI plugin


@pytest.fixture
def plugin(started: Started) -> Iterator[Plugin]:
    plugin = Plugin(CSI)
    plugin.start()
    yield plugin
    plugin.close()
    assert started[0].arguments == ["unix:///csi/csi.sock", "node", "csi.example", "/var/lib/kubelet"]


def test_a_front_hears_which_plugin_there_is(scene: Scene) -> None:
    plugin = Plugin(CSI)
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
    monkeypatch.setattr("broker.supervisor.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(supervisor, "_PAUSE", 0.05)
    pauses = []
    for _ in range(10):
        plugin.start()
        clock[0] += 1
        started[-1].die()
        assert plugin.ended() == -9
        assert plugin.ended() is None, "it is told once"
        assert plugin.due is not None and not plugin.is_due
        pauses.append(round(plugin.due - clock[0], 3))
        clock[0] = plugin.due
        assert plugin.is_due
    assert pauses[:4] == [0.05, 0.1, 0.2, 0.4]
    assert pauses[-1] == 5
    plugin.start()
    clock[0] += 6
    started[-1].die()
    plugin.ended()
    assert plugin.due == pytest.approx(clock[0] + 0.05), "it has served for some time"
    plugin.start()


def test_a_front_that_fails_at_once_is_heard_although_it_has_not_listened(scene: Scene) -> None:
    scene.start()
    scene.heard()
    process = scene.started[-1].sockets[0]
    process.send(b"why")
    scene.front.tell(orders.MounterStarted(1, 1))
    scene.started[-1].die()  # with what it was told unread, of which the kernel tells first
    assert scene.front._first_word() == b"why"


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
    assert message.startswith(f"configuration not loaded, the old one stays in force: {scene.file}: ")
    scene.reload("mount_max = 11")
    assert scene.heard() == [(orders.Configuration(bytes(scene.file)), 1, b"mount_max = 11")]


@pytest.mark.parametrize("text", ["mount_max = 9", "nonsense"])
def test_systemd_is_told_when_reloading_begins_and_ends(scene: Scene, text: str) -> None:
    scene.start()
    scene.reload(text)
    assert scene.notified == ["RELOADING=1", "READY=1"]


def test_the_state_directory_is_made_for_its_owner_only(tmp_path: Path) -> None:
    supervisor._prepare_state(tmp_path / "a/b")
    assert (tmp_path / "a/b").stat().st_mode & 0o777 == 0o700


def test_the_state_directory_and_its_files_are_the_fronts_but_not_what_is_linked_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "user", lambda: (4711, 4712))
    chowned: list[Path] = []

    def chown(what: Path | int, uid: int, gid: int) -> None:
        assert (uid, gid) == (4711, 4712)
        chowned.append(Path(f"/proc/self/fd/{what}").readlink() if isinstance(what, int) else what)

    monkeypatch.setattr("broker.supervisor.os.chown", chown)
    monkeypatch.setattr("broker.supervisor.os.fchown", chown)
    (tmp_path / "mounts.sqlite").touch()
    (tmp_path / "link").symlink_to("/etc/passwd")
    (tmp_path / "elsewhere").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "hard").touch()
    (tmp_path / "harder").hardlink_to(tmp_path / "hard")
    supervisor._prepare_state(tmp_path)
    assert chowned == [tmp_path, tmp_path / "mounts.sqlite"]
