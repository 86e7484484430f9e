"""The watcher of auto_unmount, not frozen: a process that waits for the FUSE program's end, then calls the broker."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from posix import environ

import pytest

from fusermount3_proxy import approach, watch
from fusermount3_proxy.wire import Reply, UnmountRequest
from tests.unit.fakes import FakeBroker, reply


def start_watcher(directory: Path, theirs: socket.socket) -> subprocess.Popen[bytes]:
    """Start ``--auto-unmount -- mnt`` in the directory."""
    (directory / "mnt").mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "_FUSE_COMMFD": str(theirs.fileno()),
        "FUSERMOUNT3PROXY_FDPASSING_SOCKPATH": str(directory / "broker.sock"),
    }
    command = [sys.executable, "-m", "fusermount3_proxy", "--auto-unmount", "--", "mnt"]
    return subprocess.Popen(command, cwd=directory, env=environment, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)


def test_a_watcher_asks_for_a_dead_mount_to_be_unmounted_when_the_program_is_gone(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        watcher = start_watcher(tmp_path, theirs)
    assert watcher.stderr is not None
    with watcher, ours:
        assert watcher.stderr.read() == b"", "its end of the caller's pipes is closed once it watches"
        assert os.getsid(watcher.pid) == watcher.pid
        assert Path(f"/proc/{watcher.pid}/cwd").readlink() == Path("/")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            watcher.send_signal(number)
        ours.send(b"what it says is ignored")
        with FakeBroker(tmp_path / "broker.sock", reply(Reply(b"id"))) as fake_broker:
            ours.close()
        assert watcher.wait(10) == 0
    (request,) = fake_broker.requests
    assert isinstance(request, UnmountRequest)
    assert (request.mountpoint, request.name) == (bytes(tmp_path / "mnt"), b"mnt")
    assert (request.only_dead, request.mount) == (True, b"")


def test_a_watcher_without_a_comm_socket_fails(tmp_path: Path) -> None:
    with socket.socket() as no_comm, Path("/dev/null").open() as null:
        os.dup2(null.fileno(), no_comm.fileno())
        with start_watcher(tmp_path, no_comm) as watcher:
            assert watcher.stderr is not None
            assert b"is not a socket, can't send fuse fd" in watcher.stderr.read()
    assert watcher.returncode == 1


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(environ, approach.VARIABLE, bytes(tmp_path / "broker.sock"))
    return tmp_path / "broker.sock"


@pytest.mark.parametrize("number", [0, errno.EBUSY, errno.EPERM])
def test_whatever_the_answer_the_watcher_ends_well(path: Path, number: int) -> None:
    with FakeBroker(path, reply(Reply(b"id", number, b"text" if number else b""))) as fake_broker:
        assert watch.unmount_dead(b"/mnt", b"1a2b") == 0
    (request,) = fake_broker.requests
    assert isinstance(request, UnmountRequest)
    assert (request.name, request.only_dead, request.mount) == (b"mnt", True, b"1a2b")


def test_a_mount_that_hangs_is_asked_for_again(path: Path) -> None:
    hangs = reply(Reply(b"id", errno.ETIMEDOUT, b"failed to unmount /mnt: Connection timed out"))
    with FakeBroker(path, hangs, hangs, reply(Reply(b"id"))) as fake_broker:
        assert watch.unmount_dead(b"/mnt", b"") == 0
    assert len(fake_broker.requests) == 3


def test_a_directory_that_is_gone_ends_the_watch(path: Path) -> None:
    assert path
    assert watch.unmount_dead(b"/none/mnt", b"") == 0
