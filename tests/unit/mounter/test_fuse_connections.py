"""FUSE connections as a child of the mounter sees them, in directories that stand in for fusectl and /proc."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.mounter import fuse_connections
from fusermount3_broker.mounter.fuse_connections import Connection, Served
from tests.unit.fakes import FakeFusectl, all_descriptors, open_descriptors

DEVICE = 51


class FakeProc:
    """A directory with processes and their descriptors. `descriptor` is the mounter's descriptor of the directory."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        (path / "self").mkdir()
        (path / "cmdline").touch()
        self.path = path
        self.descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY)

    def add(self, pid: int, descriptor: int, target: str = "/dev/fuse", info: str = "") -> None:
        """Give the process that descriptor."""
        for name in ("fd", "fdinfo", "ns"):
            (self.path / f"{pid}" / name).mkdir(parents=True, exist_ok=True)
        (self.path / f"{pid}/fd/{descriptor}").symlink_to(target)
        (self.path / f"{pid}/fdinfo/{descriptor}").write_text(f"pos:\t0\nflags:\t02\n{info}")

    def serve(self, pid: int, descriptor: int, device: int) -> None:
        self.add(pid, descriptor, info=f"fuse_connection:\t{device}\n")


@pytest.fixture
def fusectl(tmp_path: Path) -> Iterator[FakeFusectl]:
    fusectl = FakeFusectl(tmp_path / "fusectl")
    yield fusectl
    os.close(fusectl.descriptor)


@pytest.fixture
def proc(tmp_path: Path) -> Iterator[FakeProc]:
    proc = FakeProc(tmp_path / "proc")
    yield proc
    os.close(proc.descriptor)


def connect(fusectl: FakeFusectl, waiting: int = 0, device: int = DEVICE) -> int:
    """Make a connection in which `waiting` requests wait; return its inode."""
    inode = fusectl.connect(device)
    set_waiting(fusectl, waiting, device)
    (fusectl.path / f"{device}/abort").write_text("")
    return inode


def set_waiting(fusectl: FakeFusectl, waiting: int, device: int = DEVICE) -> None:
    (fusectl.path / f"{device}/waiting").write_text(f"{waiting}\n")


# One connection


def test_a_connection_tells_how_many_requests_wait(fusectl: FakeFusectl) -> None:
    with Connection(fusectl.descriptor, DEVICE, connect(fusectl, 12)) as connection:
        assert connection.waiting() == 12
        set_waiting(fusectl, 0)
        assert connection.waiting() == 0
        (fusectl.path / f"{DEVICE}/waiting").write_text("")  # the file was opened before the connection ended
        with pytest.raises(FileNotFoundError):
            connection.waiting()


def test_a_connection_is_aborted_with_the_rights_of_its_user(
    fusectl: FakeFusectl, monkeypatch: pytest.MonkeyPatch
) -> None:
    became: list[tuple[int, int]] = []
    monkeypatch.setattr(syscalls, "setfsids", lambda uid, gid: became.append((uid, gid)))
    with Connection(fusectl.descriptor, DEVICE, connect(fusectl)) as connection:
        connection.abort()
    abort = fusectl.path / f"{DEVICE}/abort"
    assert abort.read_text() == "1"
    assert became == [(abort.stat().st_uid, abort.stat().st_gid)]


def test_another_connection_of_the_same_number_is_not_the_one_that_is_meant(fusectl: FakeFusectl) -> None:
    inode = connect(fusectl)
    before = open_descriptors()
    for entry in (fusectl.path / f"{DEVICE}").iterdir():
        entry.unlink()
    fusectl.reconnect(DEVICE)
    with pytest.raises(FileNotFoundError):
        Connection(fusectl.descriptor, DEVICE, inode)
    fusectl.disconnect(DEVICE)
    with pytest.raises(FileNotFoundError):
        Connection(fusectl.descriptor, DEVICE, inode)
    assert all_descriptors() == before


def test_what_has_a_directory_there_is_fuse(fusectl: FakeFusectl) -> None:
    connect(fusectl)
    assert fuse_connections.exists(fusectl.descriptor, DEVICE)
    assert not fuse_connections.exists(fusectl.descriptor, 8 << 20 | DEVICE)


def test_the_connection_of_an_own_descriptor_is_aborted(fusectl: FakeFusectl, proc: FakeProc) -> None:
    connect(fusectl)
    (proc.path / "self/fdinfo").mkdir()
    (proc.path / "self/fdinfo/7").write_text(f"fuse_connection:\t{DEVICE}\n")
    (proc.path / "self/fdinfo/8").write_text("pos:\t0\n")
    with pytest.raises(FileNotFoundError):
        fuse_connections.abort_own(fusectl.descriptor, proc.descriptor, 8)
    assert (fusectl.path / f"{DEVICE}/abort").read_text() == ""
    fuse_connections.abort_own(fusectl.descriptor, proc.descriptor, 7)
    assert (fusectl.path / f"{DEVICE}/abort").read_text() == "1"


# Hangs


class FakeClock:
    """Time that passes only between two looks, and the events of that time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, happens: Callable[[int], bool]) -> None:
        """`happens` takes the number of the look, and returns whether the wait is called off."""
        self.now = 1000.0
        self.looks = 0
        self._happens = happens
        monkeypatch.setattr("fusermount3_broker.mounter.fuse_connections.time.monotonic", lambda: self.now)

    def called_off(self, seconds: float) -> bool:
        self.now += seconds
        self.looks += 1
        return self._happens(self.looks)


def hangs(fusectl: FakeFusectl, clock: FakeClock) -> bool:
    with Connection(fusectl.descriptor, DEVICE, (fusectl.path / f"{DEVICE}").stat().st_ino) as connection:
        return fuse_connections.hangs(connection, 1, clock.called_off)


def test_a_number_that_does_not_move_is_that_of_a_program_that_hangs(
    fusectl: FakeFusectl, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(fusectl, 3)
    clock = FakeClock(monkeypatch, lambda _: False)
    assert hangs(fusectl, clock)
    assert clock.now == pytest.approx(1001, abs=0.01)


def test_a_program_that_is_slow_is_waited_for(fusectl: FakeFusectl, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers each request after 0.8 s, and gets another one at once: one look in 400 finds one request less."""
    connect(fusectl, 1)

    def happens(look: int) -> bool:
        set_waiting(fusectl, 0 if look % 400 == 0 else 1)
        return look == 4000

    assert not hangs(fusectl, FakeClock(monkeypatch, happens))


def test_where_nobody_waits_nothing_hangs(fusectl: FakeFusectl, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(fusectl, 0)
    assert not hangs(fusectl, FakeClock(monkeypatch, lambda look: look == 4000))


def test_a_connection_that_ends_is_not_waited_for(fusectl: FakeFusectl, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(fusectl, 1)

    def happens(look: int) -> bool:
        if look == 2:
            (fusectl.path / f"{DEVICE}/waiting").unlink()
        return False

    with pytest.raises(FileNotFoundError):
        hangs(fusectl, FakeClock(monkeypatch, happens))


# Life

OTHER = 52


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What happens before each look but the first, last first; nothing if the list is empty. Time passes then only."""
    happens: list[Callable[[], object]] = []
    clock = FakeClock(monkeypatch, lambda _: False)

    def sleep(seconds: float) -> None:
        clock.called_off(seconds)
        if happens:
            happens.pop()()

    monkeypatch.setattr("fusermount3_broker.mounter.fuse_connections.time.sleep", sleep)
    return happens


def test_a_connection_in_which_requests_wait_all_the_time_is_alive(
    fusectl: FakeFusectl, looks: list[Callable[[], object]]
) -> None:
    connect(fusectl, 1)
    connect(fusectl, 0, OTHER)
    looks.append(lambda: set_waiting(fusectl, 7))
    assert fuse_connections.alive(fusectl.descriptor, [DEVICE, OTHER]) == {DEVICE}


def test_a_connection_in_which_a_request_waited_for_a_moment_is_not_known_to_be_alive(
    fusectl: FakeFusectl, looks: list[Callable[[], object]]
) -> None:
    connect(fusectl, 1)
    connect(fusectl, 3, OTHER)
    looks[:] = [lambda: set_waiting(fusectl, 0), lambda: None, lambda: None]
    assert fuse_connections.alive(fusectl.descriptor, [DEVICE, OTHER]) == {OTHER}


def test_a_connection_that_ends_meanwhile_is_not_known_to_be_alive(
    fusectl: FakeFusectl, looks: list[Callable[[], object]]
) -> None:
    connect(fusectl, 1)
    looks.append(lambda: (fusectl.path / f"{DEVICE}/waiting").unlink())
    assert fuse_connections.alive(fusectl.descriptor, [DEVICE, OTHER]) == set()


# Surveys


def test_a_survey_tells_what_waits_and_whether_it_is_served_as_before(fusectl: FakeFusectl, proc: FakeProc) -> None:
    first, second = connect(fusectl, 5, 51), connect(fusectl, 0, 52)
    proc.serve(700, 3, 51)
    lines = b"51 %d 700 3\n52 %d 700 3\n" % (first, second)
    assert fuse_connections.survey(fusectl.descriptor, proc.descriptor, lines) == b"51 5 1\n52 0 0\n"


def test_a_survey_looks_at_no_other_process(fusectl: FakeFusectl, proc: FakeProc) -> None:
    inode = connect(fusectl)
    proc.serve(700, 3, DEVICE)
    for server in (b"650 9", b"0 0"):
        line = b"%d %d %b\n" % (DEVICE, inode, server)
        assert fuse_connections.survey(fusectl.descriptor, proc.descriptor, line) == b"%d 0 0\n" % DEVICE


def test_a_survey_leaves_out_what_has_ended_or_is_another(fusectl: FakeFusectl, proc: FakeProc) -> None:
    inode = connect(fusectl)
    lines = b"%d %d 0 0\n77 1 0 0\n" % (DEVICE, inode + 1)
    assert fuse_connections.survey(fusectl.descriptor, proc.descriptor, lines) == b""


# Searches


def is_connected(_server: Served, _device: int) -> bool:
    return True


def test_a_search_finds_what_the_processes_serve_that_it_is_told(proc: FakeProc) -> None:
    proc.add(600, 4, target="/dev/null", info="fuse_connection:\t51\n")
    proc.add(600, 5)  # has only opened /dev/fuse
    proc.serve(700, 3, 51)
    proc.serve(700, 4, 52)
    proc.serve(701, 3, 53)
    proc.serve(702, 3, 54)
    (proc.path / "703").mkdir()  # ends just now
    told = fuse_connections.search(proc.descriptor, b"51\n53\n54\n55\n", b"703\n701\n700\n600\n", 60, is_connected)
    assert told == b"53 701 3\n51 700 3\n"


def test_a_search_passes_over_a_connection_that_has_ended(proc: FakeProc) -> None:
    proc.serve(700, 3, 51)
    proc.serve(701, 3, 51)

    def is_connected(server: Served, device: int) -> bool:
        return (server, device) != (Served(701, 3), 51)

    assert fuse_connections.search(proc.descriptor, b"51\n", b"701\n700\n", 60, is_connected) == b"51 700 3\n"


def test_a_search_ends_in_time_with_what_it_has_found(proc: FakeProc, monkeypatch: pytest.MonkeyPatch) -> None:
    for descriptor in range(3, 10):
        proc.serve(700, descriptor, descriptor)
    now = iter(range(100))
    monkeypatch.setattr("fusermount3_broker.mounter.fuse_connections.time.monotonic", lambda: next(now))
    told = fuse_connections.search(proc.descriptor, b"3\n9\n8\n", b"700\n", 2, is_connected)
    assert told == b"9 700 9\n8 700 8\n", "what was opened last comes first"


def test_nobody_serves_what_only_others_serve(proc: FakeProc) -> None:
    proc.serve(700, 3, DEVICE)
    assert fuse_connections.may_serve(proc.descriptor, DEVICE, [600, 700]) == Served(700, 3)
    assert fuse_connections.may_serve(proc.descriptor, DEVICE, [600]) is None
    assert fuse_connections.may_serve(proc.descriptor, DEVICE, [600, 700], lambda _: False) is None


def test_who_serves_something_else_does_not_serve_it_but_who_serves_nothing_visible_may(proc: FakeProc) -> None:
    """Before Linux 6.16, no connection is visible."""
    proc.serve(600, 3, OTHER)
    proc.add(600, 4, "/dev/null")
    assert fuse_connections.may_serve(proc.descriptor, DEVICE, [600]) is None
    proc.add(650, 5)
    assert fuse_connections.may_serve(proc.descriptor, DEVICE, [600, 650]) == Served(650, 5)
    proc.serve(700, 6, DEVICE)
    assert fuse_connections.may_serve(proc.descriptor, DEVICE, [600, 650, 700]) == Served(700, 6)


# Mount namespaces


def test_a_mount_namespace_is_found_by_a_process_in_it() -> None:
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    try:
        own = Path("/proc/self/ns/mnt").stat().st_ino
        namespace = fuse_connections.mount_namespace(proc, own)
        assert os.fstat(namespace).st_ino == own
        os.close(namespace)
        with pytest.raises(ProcessLookupError) as raised:
            fuse_connections.mount_namespace(proc, 1)
        assert raised.value.errno == errno.ESRCH
    finally:
        os.close(proc)


def test_a_process_that_ends_while_it_is_looked_at_leaves_its_namespace_to_its_child(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child did not exist yet when the processes were listed."""
    (proc.path / "701/ns").mkdir(parents=True)
    (proc.path / "701/ns/mnt").touch()
    listed = iter(([700], [701]))
    monkeypatch.setattr("fusermount3_broker.mounter.fuse_connections.processes", lambda _: next(listed))
    inode = (proc.path / "701/ns/mnt").stat().st_ino
    os.close(fuse_connections.mount_namespace(proc.descriptor, inode))
