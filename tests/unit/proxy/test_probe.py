"""--wait-mounted without a filesystem: how long it checks, what it reports, and that it does not wait for a hung child.

tests/e2e/test_other_names.py tests it with real filesystems.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fusermount3_proxy import probe, programs
from fusermount3_proxy.failure import Failure
from tests.unit.fakes import FakeClock, open_descriptors

LONG = 60.0


def failure(path: bytes = b"/mnt", timeout: float = 0) -> str:
    with pytest.raises(Failure) as caught:
        probe.wait(path, timeout, lambda _: None)
    return caught.value.text.decode()


def never(text: bytes) -> None:
    pytest.fail(f"told without need: {text!r}")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give children all the time that they may need on a busy machine."""
    monkeypatch.setattr(probe, "ANSWER", LONG)
    monkeypatch.setattr(probe, "LATE", LONG)
    monkeypatch.setattr(probe, "LONGEST_LOOK", LONG)


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], bytes]], None]:
    """Return a function that replaces the child's check with a fake."""

    def fake(answer: Callable[[], bytes]) -> None:
        monkeypatch.setattr(probe, "_state", lambda *_: answer())

    return fake


def test_what_is_served_is_enough(state: Callable[[Callable[[], bytes]], None]) -> None:
    state(lambda: probe._SERVED)
    before = open_descriptors()
    probe.wait(b"/mnt", 0, never)
    assert open_descriptors() == before


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOENT, "No such file or directory"),
        (errno.EACCES, "Permission denied"),
        (errno.ENOTCONN, "its FUSE program is gone"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_an_error_is_told(number: int, said: str, state: Callable[[Callable[[], bytes]], None]) -> None:
    def fail() -> bytes:
        raise OSError(number, "")

    state(fail)
    assert failure() == f"/mnt: {said}"


def test_it_looks_again_until_the_time_is_over(
    state: Callable[[Callable[[], bytes]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeClock(monkeypatch, probe)
    looks = tmp_path / "looks"

    def count() -> bytes:
        with looks.open("a") as file:
            file.write("x")
        return b"not yet"

    state(count)
    assert failure(timeout=0) == "/mnt: not yet"
    assert looks.read_text() == "x"
    assert failure(timeout=0.35) == "/mnt: not yet, waited 0.35 seconds"
    assert looks.read_text() == "x" * (1 + 4)


def test_one_second_is_singular(state: Callable[[Callable[[], bytes]], None], monkeypatch: pytest.MonkeyPatch) -> None:
    FakeClock(monkeypatch, probe)
    state(lambda: b"not yet")
    assert failure(timeout=1) == "/mnt: not yet, waited 1 second"


@pytest.mark.parametrize(
    "words",
    [
        [b"--wait-mounted", b"-h"],
        [b"--wait-mounted", b"--help"],
        [b"-h", b"--wait-mounted"],
        [b"--wait-mounted", b"/mnt", b"--timeout", b"-h"],
    ],
)
def test_help_is_told_wherever_it_is_asked_for(words: list[bytes], capfd: pytest.CaptureFixture[str]) -> None:
    assert probe.main(b"fusermount3-proxy", words) == 0
    assert capfd.readouterr() == (probe.USAGE.decode(), "")


def test_it_ends_as_soon_as_it_is_there(state: Callable[[Callable[[], bytes]], None], tmp_path: Path) -> None:
    def second_time() -> bytes:
        if (tmp_path / "looked").exists():
            return probe._SERVED
        (tmp_path / "looked").touch()
        return b"not yet"

    state(second_time)
    begun = time.monotonic()
    probe.wait(b"/mnt", LONG, never)
    assert time.monotonic() - begun < LONG / 2


def test_a_look_that_hangs_is_given_up_and_its_child_killed(
    state: Callable[[Callable[[], bytes]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "ANSWER", 0.2)
    children: list[int] = []

    def fork() -> int:
        children.append(os.fork())
        return children[-1]

    def hang() -> bytes:
        time.sleep(LONG)
        return probe._SERVED

    monkeypatch.setattr(probe, "fork", fork)
    state(hang)
    begun = time.monotonic()
    assert failure() == "/mnt: the filesystem does not answer"
    assert time.monotonic() - begun < LONG / 2
    with pytest.raises(ChildProcessError):  # it was reaped by the probe, or is by the first call
        os.waitpid(children[0], 0)
        os.waitpid(children[0], 0)


def hang(_: bytes, asker: socket.socket) -> bytes:
    """Stand in for a query that gets no answer; ends with the process that waits for it."""
    asker.send(probe._ASKING)
    waiting = os.getppid()
    while os.getppid() == waiting:
        time.sleep(0.01)
    return b""


def test_a_probe_that_is_killed_while_it_waits_for_an_answer_has_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is with its container, when the FUSE program ends that has not answered yet."""
    monkeypatch.setattr(probe, "LATE", 0.1)
    monkeypatch.setattr(probe, "_state", hang)
    assert said_before_it_is_killed(b"/mnt") == b"probe: /mnt: the filesystem does not answer\n"


def test_a_probe_that_is_killed_while_it_waits_for_a_mount_has_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "LATE", 0.1)
    expected = b"probe: /proc: not a mountpoint of a FUSE filesystem\n"
    assert said_before_it_is_killed(b"/proc", b"--timeout", str(LONG).encode()) == expected


def said_before_it_is_killed(path: bytes, *more: bytes) -> bytes:
    """Return what the probe writes to stderr until it is killed, which is when it has written something."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(writer, 2)
            probe.main(b"probe", [b"--wait-mounted", path, *more])
        finally:
            os._exit(0)
    os.close(writer)
    try:
        ready, _, _ = select.select([reader], [], [], LONG / 2)
        os.kill(child, 9)
        _, status = os.waitpid(child, 0)
        assert ready and os.waitstatus_to_exitcode(status) == -9
        return os.read(reader, 1000)
    finally:
        os.close(reader)


@pytest.mark.parametrize("late", [0.1, LONG])
def test_what_is_wrong_is_said_once(
    late: float,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(probe, "LATE", late)
    monkeypatch.setattr(probe, "ANSWER", 0.3)
    monkeypatch.setattr(probe, "_state", hang)
    assert programs.run(b"probe", probe.main, [b"--wait-mounted", b"/mnt"], 1) == 1
    assert capfd.readouterr().err == "probe: /mnt: the filesystem does not answer\n"


def test_the_child_holds_no_stream_of_the_probe(state: Callable[[Callable[[], bytes]], None], tmp_path: Path) -> None:
    """The program that executes a probe reads its streams to their end; a hung child must not delay that."""

    def list_descriptors() -> bytes:
        (tmp_path / "open").write_text(" ".join(str(path.resolve()) for path in Path("/proc/self/fd").iterdir()))
        return probe._SERVED

    state(list_descriptors)
    probe.wait(b"/mnt", 0, never)
    kinds = [each.rpartition("/")[2].partition(":")[0] for each in (tmp_path / "open").read_text().split()]
    assert kinds.count("socket") == 1
    assert len(kinds) <= 3, kinds  # the socket, and the file and the directory that this fake opened


def test_a_child_that_ends_without_an_answer_is_told(state: Callable[[Callable[[], bytes]], None]) -> None:
    state(lambda: os._exit(1))
    assert failure() == "/mnt: the check could not run"


def test_one_child_at_a_time_asks_a_mount() -> None:
    mount = secrets.token_hex(4).encode()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    first, second = os.fork(), 0
    if first == 0:
        try:
            probe._take_turn(mount, theirs)
            theirs.send(b"first")
            time.sleep(LONG)
        finally:
            os._exit(0)
    try:
        assert ours.recv(10) == b"first"
        second = os.fork()
        if second == 0:
            try:
                probe._take_turn(mount, theirs)
                theirs.send(b"second")
            finally:
                os._exit(0)
        ours.settimeout(0.3)
        with pytest.raises(TimeoutError):
            ours.recv(10)
        os.kill(first, 9)
        ours.settimeout(LONG)
        assert ours.recv(10) == b"second"
    finally:
        ours.close()
        theirs.close()
        for child in filter(None, (first, second)):
            os.kill(child, 9)
            os.waitpid(child, 0)


def test_who_waits_for_a_turn_ends_with_the_one_who_asked() -> None:
    mount = secrets.token_hex(4).encode()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as turn:
        turn.bind(b"\0fusermount3-proxy/wait-mounted/%d/%b" % (os.getuid(), mount))
        child = os.fork()
        if child == 0:
            ours.close()
            try:
                probe._take_turn(mount, theirs)
            finally:
                os._exit(1)
        ours.close()
        theirs.close()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_is_no_fuse_filesystem_is_told() -> None:
    assert failure(b"/") == "/: not a mountpoint of a FUSE filesystem"
    assert failure(b"/proc") == "/proc: not a mountpoint of a FUSE filesystem"
    assert failure(b"/no/such/path") == "/no/such/path: No such file or directory"


@pytest.mark.parametrize(
    ("mountpoint", "fstype", "is_it"),
    [
        (b"{}", b"fuse", True),
        (b"{}", b"fuse.sshfs", True),
        (b"{}", b"fuseblk.ntfs", True),
        (b"{}", b"fusectl", False),
        (b"{}", b"tmpfs", False),
        (b"/elsewhere", b"fuse", False),
    ],
)
def test_a_mountpoint_of_fuse_is_known_by_its_line(
    mountpoint: bytes, fstype: bytes, is_it: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "a b\\c\nd"
    place.mkdir()
    path = bytes(place).replace(b"\\", b"\\134").replace(b" ", b"\\040").replace(b"\n", b"\\012")
    lines = {
        b"fdinfo": [b"pos:\t0", b"flags:\t012", b"mnt_id:\t70"],
        b"mountinfo": [
            b"7 1 0:3 / " + path + b" rw - fuse x rw",
            b"70 1 0:4 / " + mountpoint.replace(b"{}", path) + b" rw shared:1 - " + fstype + b" host:/x rw - y",
        ],
    }
    monkeypatch.setattr(probe, "_lines", lambda name: lines[name.split(b"/")[3]])
    descriptor = os.open(place, os.O_PATH)
    try:
        assert probe._mount_at(descriptor) == (b"70" if is_it else b"")
    finally:
        os.close(descriptor)
