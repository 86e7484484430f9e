"""The identity of a caller: what the kernel reports, and a pidfd that refers to no other process."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusermount3_broker.front import peer
from fusermount3_broker.front.decisions.limits import account_of
from fusermount3_broker.front.peer import PeerGone
from fusermount3_broker.messages.refusal import Refusal
from tests.unit.fakes import open_descriptors

CONNECT_AND_WAIT = """
import _socket, sys
connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
connection.connect(sys.argv[1])
sys.stdin.read()
"""


class Caller:
    """A process that has connected, and the broker's end of its connection."""

    def __init__(self, directory: Path) -> None:
        path = directory / "sock"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(bytes(path))
            listener.listen()
            command = [sys.executable, "-I", "-S", "-c", CONNECT_AND_WAIT, str(path)]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE)
            self.connection, _ = listener.accept()

    def end(self) -> None:
        self.process.communicate()


@pytest.fixture
def caller(tmp_path: Path) -> Iterator[Caller]:
    caller = Caller(tmp_path)
    yield caller
    caller.end()
    caller.connection.close()


def pid_of(pidfd: int) -> int:
    """Return the pid of the process that a pidfd refers to, and close the pidfd."""
    text = Path(f"/proc/self/fdinfo/{pidfd}").read_text()
    os.close(pidfd)
    match = re.search(r"^Pid:\t(-?\d+)$", text, re.MULTILINE)
    assert match is not None
    return int(match[1])


def open_proc(path: str, flags: int) -> int:
    return os.open(f"/proc/{path}", flags)


def test_a_caller_is_identified_by_its_connection(caller: Caller) -> None:
    found = peer.identify(caller.connection, open_proc)
    assert (found.pid, found.uid, found.gid) == (caller.process.pid, os.geteuid(), os.getegid())
    assert not os.get_inheritable(found.pidfd)
    assert pid_of(found.pidfd) == caller.process.pid


def test_an_older_kernel_is_asked_for_the_pid(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusermount3_broker.kernel.syscalls.SO_PEERPIDFD", 9999)  # ENOPROTOOPT
    found = peer.identify(caller.connection, open_proc)
    assert (found.pid, found.uid) == (caller.process.pid, os.geteuid())
    assert pid_of(found.pidfd) == caller.process.pid


def test_an_older_kernel_shows_the_caller_where_proc_hides_others(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the service, whose ProtectProc= leaves its front only the descriptor of another /proc."""
    asked = []

    def open_visible(path: str, flags: int) -> int:
        asked.append(path)
        return open_proc(path, flags)

    monkeypatch.setattr("fusermount3_broker.kernel.syscalls.SO_PEERPIDFD", 9999)  # ENOPROTOOPT
    found = peer.identify(caller.connection, open_visible)
    os.close(found.pidfd)
    assert f"{caller.process.pid}/status" in asked


def test_an_older_kernel_can_not_identify_an_invisible_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in another pid namespace, from which SO_PEERCRED reports pid 0."""
    monkeypatch.setattr("fusermount3_broker.kernel.syscalls.SO_PEERPIDFD", 9999)  # ENOPROTOOPT
    ours, theirs = socket.socketpair()
    before = open_descriptors()
    with ours, theirs, pytest.raises(Refusal, match="hostPID"):
        peer._pidfd(ours, 0, 0, open_proc)
    assert open_descriptors() == before - 2


def test_a_kernel_that_knows_the_caller_to_be_gone_is_believed() -> None:
    class GoneSocket:
        def getsockopt(self, *_: int) -> bytes:
            raise ProcessLookupError

    with pytest.raises(PeerGone):
        peer._pidfd(GoneSocket(), 1, 0, open_proc)  # type: ignore[arg-type]  # has as much of a socket as this needs


def test_the_pid_of_a_live_caller_is_its_own(caller: Caller) -> None:
    pidfd = peer.pidfd_of_pid(caller.connection, caller.process.pid, os.geteuid(), open_proc)
    assert pid_of(pidfd) == caller.process.pid


def test_a_caller_that_has_sent_and_waits_is_alive() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.send(b"request")
        assert pid_of(peer.pidfd_of_pid(ours, os.getpid(), os.geteuid(), open_proc)) == os.getpid()
        assert ours.recv(100) == b"request"


def test_a_pid_that_is_free_is_no_caller(caller: Caller) -> None:
    caller.end()
    before = open_descriptors()
    with pytest.raises(PeerGone):
        peer.pidfd_of_pid(caller.connection, caller.process.pid, os.geteuid(), open_proc)
    assert open_descriptors() == before


def test_a_pid_whose_connection_has_hung_up_is_no_caller(caller: Caller) -> None:
    """As after the pid was used again: the process exists, but it is not the one that connected."""
    caller.end()
    before = open_descriptors()
    with pytest.raises(PeerGone):
        peer.pidfd_of_pid(caller.connection, os.getpid(), os.geteuid(), open_proc)
    assert open_descriptors() == before


def test_a_pid_of_another_user_is_no_caller(caller: Caller) -> None:
    before = open_descriptors()
    with pytest.raises(PeerGone):
        peer.pidfd_of_pid(caller.connection, caller.process.pid, os.geteuid() + 1, open_proc)
    assert open_descriptors() == before


def test_a_connection_that_fails_is_no_callers() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.send(b"unread")
    ours.close()
    with theirs, pytest.raises(PeerGone):
        peer.pidfd_of_pid(theirs, os.getpid(), os.geteuid(), open_proc)  # ECONNRESET


@pytest.mark.parametrize("pid", [0, -1])
def test_a_caller_in_a_foreign_pid_namespace_has_no_command(pid: int) -> None:
    assert peer.command_of(pid, open_proc) == ""


def test_a_caller_has_a_command() -> None:
    assert peer.command_of(os.getpid(), open_proc) == Path("/proc/self/comm").read_text().strip()


def test_a_caller_that_is_gone_has_no_command(caller: Caller) -> None:
    caller.end()
    assert peer.command_of(caller.process.pid, open_proc) == ""


def test_a_caller_that_is_gone_has_no_account(caller: Caller) -> None:
    caller.end()
    before = open_descriptors()
    with pytest.raises(PeerGone):
        peer.identify(caller.connection, open_proc)
    assert open_descriptors() == before


def test_the_account_of_a_caller_is_that_of_its_cgroup(caller: Caller) -> None:
    found = peer.identify(caller.connection, open_proc)
    os.close(found.pidfd)
    cgroup = Path(f"/proc/{caller.process.pid}/cgroup").read_bytes()
    assert found.account == account_of(cgroup, os.geteuid())
    assert "/" not in found.container


def test_the_account_of_a_caller_that_is_not_to_be_seen_is_that_of_its_network(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "_read", lambda *_: b"")
    found = peer.identify(caller.connection, open_proc)
    os.close(found.pidfd)
    assert re.fullmatch("network [0-9]+", found.account)
    assert found.container == ""
