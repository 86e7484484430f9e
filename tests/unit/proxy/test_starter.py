"""fuse-starter: its request to a fake broker, and what the program that it executes inherits."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusermount3_proxy import approach, wire
from fusermount3_proxy.wire import CommitRequest, Reply, VolumeRequest
from tests.unit.fakes import FakeBroker, reply, reply_and_hear

UNFROZEN = "import sys; sys.argv[:] = sys.argv[1:]; from fusermount3_proxy.cli import main; sys.exit(main())"

#: Prints its arguments, the file behind each descriptor from 3 on, and its PID.
PROGRAM = """\
import json, os, sys
descriptors = {}
for number in range(3, 20):
    try:
        descriptors[number] = [os.fstat(number).st_ino, os.lseek(number, 0, os.SEEK_CUR)]
    except OSError:
        pass
print(json.dumps([sys.argv, descriptors, os.getpid()]))
"""


class Starter:
    """The directory of a broker's socket, the program, and a file in place of /dev/fuse."""

    def __init__(self, directory: Path) -> None:
        self.socket = directory / "volume.sock"
        self.program = directory / "program"
        self.program.write_text(f"#!{sys.executable} -I\n{PROGRAM}")
        self.program.chmod(0o755)
        self.device = directory / "device"
        self.device.touch()

    def start(self, *words: str | Path, name: str = "fuse-starter", code: str = UNFROZEN) -> Started:
        process = subprocess.Popen(
            [sys.executable, "-c", code, name, *words],
            env={**os.environ, os.fsdecode(approach.VARIABLE): str(self.socket)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        out, err = process.communicate(timeout=30)
        return Started(process.returncode, out, err, process.pid)

    def open_device(self) -> int:
        return os.open(self.device, os.O_RDWR)


class Started:
    """The result of a run: exit status, output, and PID."""

    def __init__(self, status: int, out: str, err: str, pid: int) -> None:
        self.status, self.out, self.err, self.pid = status, out, err, pid

    def program(self) -> tuple[list[str], dict[int, int]]:
        """Return the program's arguments and the inode behind each descriptor; check its status and its PID."""
        assert (self.status, self.err) == (0, "")
        words, descriptors, pid = json.loads(self.out)
        assert pid == self.pid
        return words, {int(number): inode for number, (inode, _) in descriptors.items()}


@pytest.fixture
def starter(tmp_path: Path) -> Starter:
    return Starter(tmp_path)


@pytest.mark.parametrize(
    "words", [["fuse-starter"], ["fuse-starter", "--"], ["fusermount3-proxy", "fuse-starter", "--"]]
)
def test_the_program_gets_the_descriptor_after_the_commit(starter: Starter, words: list[str]) -> None:
    heard: list[bytes] = []
    device = starter.open_device()
    with FakeBroker(starter.socket, reply_and_hear(Reply(b"id"), device, heard)) as fake_broker:
        started = starter.start(*words[1:], starter.program, "host:", "{}", "-f", name=words[0])
    os.close(device)
    assert started.program() == (
        [str(starter.program), "host:", "/dev/fd/3", "-f"],
        {3: starter.device.stat().st_ino},
    )
    assert [(type(each), each.fields()) for each in fake_broker.requests] == [(VolumeRequest, {"options": b""})]
    assert isinstance(wire.decode_request(heard[0]), CommitRequest)


def test_the_placeholder_may_be_part_of_an_argument_and_come_again(starter: Starter) -> None:
    with FakeBroker(starter.socket, reply_and_hear(Reply(b"id"), 0, [])):
        words, _ = starter.start(starter.program, "--at={}", "{}{}", "{", "}").program()
    assert words[1:] == ["--at=/dev/fd/3", "/dev/fd/3/dev/fd/3", "{", "}"]


@pytest.mark.parametrize(
    ("word", "number"), [("{}", 4), ("/dev/fd/3", 3)], ids=["with a placeholder", "without a placeholder"]
)
def test_a_number_3_that_is_inherited_stays_where_the_placeholder_leaves_a_choice(
    starter: Starter, word: str, number: int
) -> None:
    """As under systemd's socket activation, whose descriptors begin with 3."""
    device = starter.open_device()
    with FakeBroker(starter.socket, reply_and_hear(Reply(b"id"), device, [])):
        occupied = f"import os; os.open({str(starter.program)!r}, 0); os.set_inheritable(3, True); {UNFROZEN}"
        words, descriptors = starter.start(starter.program, word, code=occupied).program()
    os.close(device)
    assert words[1:] == [f"/dev/fd/{number}"]
    assert descriptors[number] == starter.device.stat().st_ino
    assert (descriptors[3] == starter.program.stat().st_ino) is (number != 3)


@pytest.mark.parametrize("spelling", ["--fd-passing-socket-path", "-fd-passing-socket-path="])
def test_the_command_line_of_meta_fuse_csi_plugin_is_understood(starter: Starter, spelling: str) -> None:
    """It names the socket, and assumes that the descriptor is number 3."""
    named = [f"{spelling}{starter.socket}"] if spelling.endswith("=") else [spelling, str(starter.socket)]
    starter.socket, device = starter.socket.with_name("another.sock"), starter.open_device()
    with FakeBroker(starter.socket.with_name("volume.sock"), reply_and_hear(Reply(b"id"), device, [])):
        started = starter.start(*named, "--", starter.program, "/dev/fd/3", "--endpoint=http://localhost:9000")
    os.close(device)
    assert started.program() == (
        [str(starter.program), "/dev/fd/3", "--endpoint=http://localhost:9000"],
        {3: starter.device.stat().st_ino},
    )


def test_mount_options_are_asked_for(starter: Starter) -> None:
    with FakeBroker(starter.socket, reply_and_hear(Reply(b"id"), 0, [])) as fake_broker:
        starter.start("-o", "ro,default_permissions", "--", starter.program, "{}").program()
    assert fake_broker.requests[0].fields() == {"options": b"ro,default_permissions"}


def test_warnings_are_told_and_the_program_runs(starter: Starter) -> None:
    with FakeBroker(starter.socket, reply_and_hear(Reply(b"id", warnings=(b"careful",)), 0, [])):
        started = starter.start(starter.program, "{}")
    assert (started.status, started.err) == (0, "fuse-starter: careful\n")
    assert started.out


def test_a_refusal_is_told_and_nothing_is_executed(starter: Starter) -> None:
    with FakeBroker(starter.socket, reply(Reply(b"1a2b", errno.EOPNOTSUPP, b"this socket is of no volume"))):
        started = starter.start(starter.program, "{}")
    assert (started.status, started.out) == (125, "")
    assert started.err == "fuse-starter: this socket is of no volume\nfuse-starter: broker request 1a2b\n"


def test_a_reply_without_a_descriptor_is_a_failure(starter: Starter) -> None:
    with FakeBroker(starter.socket, reply(Reply(b"id"))):
        started = starter.start(starter.program, "{}")
    assert (started.status, started.out) == (125, "")
    assert started.err == "fuse-starter: mount failed: the broker sent no descriptor\n"


@pytest.mark.parametrize(("program", "status"), [("./no-such", 127), ("/etc/passwd", 126)])
def test_what_cannot_be_executed_asks_for_no_mount(starter: Starter, program: str, status: int) -> None:
    with FakeBroker(starter.socket) as fake_broker:
        assert starter.start("--timeout", "0", program, "{}").status == status
    assert fake_broker.requests == []


def test_a_broker_that_is_not_there_is_waited_for_as_long_as_was_said(starter: Starter) -> None:
    started = starter.start("--timeout", "0.1", starter.program, "{}")
    assert started.status == 125
    assert started.err == (
        f"fuse-starter: no broker at {starter.socket}: No such file or directory, waited 0.1 seconds for it\n"
    )
