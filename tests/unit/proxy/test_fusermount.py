"""One call of the proxy, from its arguments to its exit status, in this process and with a fake broker."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from posix import environ

import pytest

from fusermount3_proxy import approach, cli, wire
from fusermount3_proxy.wire import CommitRequest, MountRequest, Reply, UnmountRequest
from tests.unit.fakes import Answer, FakeBroker, FakeClock, hang_up, reply, reply_and_hear


class Call:
    """A directory with a mountpoint in it, the fake broker's socket, and the FUSE program's end of a comm socket."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.mountpoint = directory / "mnt"
        self.mountpoint.mkdir()
        self.path = directory / "broker.sock"
        monkeypatch.chdir(directory)
        monkeypatch.setitem(environ, approach.VARIABLE, bytes(self.path))
        self.comm, self._theirs = socket.socketpair()
        self.comm.settimeout(10)

    def give_comm_socket(self) -> None:
        self._monkeypatch.setitem(environ, b"_FUSE_COMMFD", b"%d" % self._theirs.detach())

    def run(self, *arguments: str, program: str = "fusermount3") -> int:
        self._monkeypatch.setattr(cli, "argv", [program, *arguments])
        return cli.main()

    def received(self) -> tuple[bytes, int]:
        """Return the bytes and the number of descriptors received over the comm socket."""
        data, descriptors, _, _ = socket.recv_fds(self.comm, 100, 4)
        for descriptor in descriptors:
            os.close(descriptor)
        return data, len(descriptors)

    def broker(self, *answers: Answer) -> FakeBroker:
        return FakeBroker(self.path, *answers)

    def close(self) -> None:
        self.comm.close()
        self._theirs.close()


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Call]:
    call = Call(tmp_path.resolve(), monkeypatch)
    yield call
    call.close()


def test_a_mount_sends_the_descriptor_then_commits_and_is_silent(call: Call, capfd: pytest.CaptureFixture[str]) -> None:
    call.give_comm_socket()
    heard: list[bytes] = []
    with call.broker(reply_and_hear(Reply(b"id"), 0, heard)) as fake_broker:
        assert call.run("-o", "ro", "--", "mnt") == 0
    request = fake_broker.requests[0]
    assert isinstance(request, MountRequest)
    assert (request.mountpoint, request.options) == (bytes(call.mountpoint), b"ro")
    assert fake_broker.pinned[0].st_ino == call.mountpoint.stat().st_ino
    assert call.received() == (b"\0", 1)
    assert isinstance(wire.decode_request(heard[0]), CommitRequest)
    assert capfd.readouterr() == ("", "")


def test_warnings_are_printed_and_the_mount_succeeds(call: Call, capfd: pytest.CaptureFixture[str]) -> None:
    call.give_comm_socket()
    with call.broker(reply_and_hear(Reply(b"id", warnings=(b"one", b"two")), 0, [])):
        assert call.run("mnt", program="/usr/bin/fusermount3") == 0
    assert capfd.readouterr() == ("", "/usr/bin/fusermount3: one\n/usr/bin/fusermount3: two\n")


def test_a_refusal_is_printed_with_its_id_and_nothing_is_sent(call: Call, capfd: pytest.CaptureFixture[str]) -> None:
    call.give_comm_socket()
    with call.broker(reply(Reply(b"1a2b", errno.EPERM, b"no\xff", (b"careful",)))):
        assert call.run("mnt", program="fm") == 1
    assert call.received() == (b"", 0)
    assert capfd.readouterr()[1].encode("utf-8", "surrogateescape").startswith(b"fm: careful\nfm: no")


def test_a_mount_without_a_descriptor_is_a_failure(call: Call, capfd: pytest.CaptureFixture[str]) -> None:
    call.give_comm_socket()
    with call.broker(reply(Reply(b"id"))):
        assert call.run("mnt") == 1
    assert capfd.readouterr() == ("", "fusermount3: mount failed: the broker sent no descriptor\n")


def test_a_caller_that_is_gone_gets_no_commit(call: Call, capfd: pytest.CaptureFixture[str]) -> None:
    call.give_comm_socket()
    call.comm.close()
    heard: list[bytes] = []
    with call.broker(reply_and_hear(Reply(b"id"), 0, heard)):
        assert call.run("mnt") == 1
    assert heard == [b""]
    assert capfd.readouterr()[1].startswith("fusermount3: sending file descriptor: ")


def test_the_broker_is_not_asked_without_a_comm_socket(call: Call, capfd: pytest.CaptureFixture[str]) -> None:
    assert call.run("mnt") == 1
    assert capfd.readouterr() == ("", "fusermount3: old style mounting not supported\n")


@pytest.mark.parametrize(("options", "lazy"), [(["-u"], False), (["-uz"], True), (["-u", "-q", "-z"], True)])
def test_an_unmount_sends_the_directory_and_the_name(
    call: Call, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: list[str], lazy: bool
) -> None:
    monkeypatch.setitem(environ, b"_FUSE_COMMFD", b"garbage that is ignored")
    with call.broker(reply(Reply(b"id"))) as fake_broker:
        assert call.run(*options, "--", "mnt") == 0
    request = fake_broker.requests[0]
    assert isinstance(request, UnmountRequest)
    assert (request.mountpoint, request.name, request.lazy) == (bytes(call.mountpoint), b"mnt", lazy)
    assert fake_broker.pinned[0].st_ino == call.mountpoint.parent.stat().st_ino
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("quiet", [False, True])
def test_a_refused_unmount_is_told_unless_quiet(call: Call, capfd: pytest.CaptureFixture[str], quiet: bool) -> None:
    with call.broker(reply(Reply(b"1a2b", errno.EPERM, b"entry for /mnt not found in /etc/mtab"))):
        assert call.run("-uq" if quiet else "-u", "mnt") == 1
    told = capfd.readouterr()[1]
    assert told.splitlines()[:1] == ([] if quiet else ["fusermount3: entry for /mnt not found in /etc/mtab"])
    assert ("1a2b" in told) is not quiet


def test_quiet_does_not_hide_a_bad_path(call: Call, capfd: pytest.CaptureFixture[str]) -> None:
    assert call.run("-uq", "none/mnt") == 1
    assert capfd.readouterr()[1] == "fusermount3: bad mount point none/mnt: No such file or directory\n"


def test_version_and_help_ask_nobody(call: Call, capfd: pytest.CaptureFixture[str]) -> None:
    assert call.run("-V") == 0
    assert capfd.readouterr() == ("fusermount3 version: 3.18.2\n", "")
    assert call.run("-h", program="fm") == 1
    printed = capfd.readouterr()
    assert printed[0].startswith("fm: [options] mountpoint\nOptions:\n")
    assert printed[1] == ""


def test_every_message_begins_with_the_name_that_the_caller_used(call: Call, capfd: pytest.CaptureFixture[str]) -> None:
    assert call.run("--foo", program="/odd/näme\udcff") == 1
    assert capfd.readouterr()[1].startswith("/odd/näme")


def test_a_call_without_even_a_name_is_fusermount(
    call: Call, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call
    monkeypatch.setattr(cli, "argv", [])
    assert cli.main() == 1
    assert capfd.readouterr()[1] == "fusermount: missing mountpoint argument\n"


def test_a_closed_stderr_does_not_matter(call: Call, capfd: pytest.CaptureFixture[str]) -> None:
    call.give_comm_socket()
    with capfd.disabled():
        sys.stderr.flush()
        before = os.dup(2)
        os.close(2)
        try:
            with call.broker(reply_and_hear(Reply(b"id", warnings=(b"careful",)), 0, [])):
                status = call.run("mnt")
        finally:
            os.dup2(before, 2)
            os.close(before)
    assert status == 0


def test_no_broker_is_one_clear_line(
    call: Call, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call.give_comm_socket()
    fake_clock = FakeClock(monkeypatch)
    with call.broker(hang_up):
        assert call.run("mnt") == 1
    assert sum(fake_clock.pauses) <= 10
    told = capfd.readouterr()[1]
    assert told.startswith(f"fusermount3: no broker at {call.path}: ")
    assert told.count("\n") == 1
