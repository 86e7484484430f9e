"""`top`: its output for one answer and for the difference of two, and its exit at a terminal."""

from __future__ import annotations

import copy
import fcntl
import io
import json
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from fusermount3_broker.cli import live_display
from fusermount3_broker.cli.container_names import ContainerNames
from fusermount3_broker.cli.mounts import name_containers
from fusermount3_broker.cli.top import Sample, render
from tests.unit.cli.conftest import FakeControlSocket
from tests.unit.cli.test_main import MOUNT, STATUS, run

PATIENCE = 30


def shown(look: Sample, before: Sample | None = None, height: int | None = None) -> str:
    console = Console(file=io.StringIO(), width=200, markup=False, highlight=False)
    name_containers(look.mounts, ContainerNames(Path("/nowhere")))
    console.print(render(look, before, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def later(status: dict[str, Any], seconds: int, **counts: int) -> dict[str, Any]:
    """Return the same broker's answer some seconds later, with `mounted` more mounts in each bucket."""
    after = copy.deepcopy(status)
    after["uptime_seconds"] += seconds
    after["requests"]["mount mounted"] += counts["mounted"]
    buckets = after["latency"]["mount"]["buckets"]
    after["latency"]["mount"]["buckets"] = [[upper, count + counts["mounted"]] for upper, count in buckets]
    return after


def words(text: str, first: str) -> list[list[str]]:
    """Return the words of each line that begins with `first`."""
    return [line.split() for line in text.splitlines() if line.startswith(first)]


def rows(text: str) -> list[list[str]]:
    """Return the words of each mount."""
    return [line.split() for line in text.partition("\nREQUEST  STATE")[2].splitlines()[1:]]


def test_one_look_shows_everything() -> None:
    text = shown(Sample(STATUS, [MOUNT]))
    assert text.splitlines()[0].split("   ") == [
        "fusermount3-broker 0.1.0",
        "up 00:00:12",
        "mounts: 2 live, 0 dead, 1 hung",
    ]
    assert words(text, "front") == [["front", "10", "30.0", "MiB", "20"]]
    assert words(text, "mounter") == [["mounter", "11", "9.0", "MiB", "0"]]
    assert words(text, "mount ") == [
        ["mount", "mounted", "3", "0.2"],
        ["mount", "refused", "1", "0.1"],
        ["mount", "4", "3.00", "ms", "3.98", "ms"],
    ]
    assert words(text, "mount_max") == [["mount_max", "1", "0.1"]]
    assert rows(text)[0][1] == "live"
    assert rows(text)[0][3:] == ["/mnt/a", "b", "fuse.sshfs", "host:", "1000", "4711", "sshfs", "f" * 12]


def test_rates_and_latencies_are_of_the_time_between_two_looks() -> None:
    text = shown(Sample(later(STATUS, 2, mounted=30), [], at=102.0), Sample(STATUS, [], at=100.0))
    assert words(text, "mount ") == [
        ["mount", "mounted", "33", "15.0"],
        ["mount", "refused", "1", "0"],
        ["mount", "30", "1.00", "ms", "1.98", "ms"],
    ]


def test_where_nothing_happened_there_is_no_latency() -> None:
    text = shown(Sample(later(STATUS, 1, mounted=0), [], at=101.0), Sample(STATUS, [], at=100.0))
    assert ["mount", "0", "-", "-"] in words(text, "mount ")


def test_what_a_front_that_was_started_again_counts_is_since_its_start() -> None:
    again = later(STATUS, 0, mounted=0) | {"front": STATUS["front"] | {"pid": 99}}  # type: ignore[operator]
    assert ["mount", "mounted", "3", "0.2"] in words(
        shown(Sample(again, [], at=101.0), Sample(STATUS, [], at=100.0)), "mount "
    )


def test_mounts_in_need_come_first_then_the_newest_as_many_as_there_is_room_for() -> None:
    states = ["live"] * 100 + ["dead", "hung"]
    mounts = [MOUNT | {"state": state, "mounted_at": 1e9 + n, "uid": n} for n, state in enumerate(states)]
    text = shown(Sample(STATUS, mounts), height=24)
    lines = text.splitlines()
    assert len(lines) <= 24
    first = next(n for n, line in enumerate(lines) if line.startswith("REQUEST  STATE"))
    assert [line.split()[1] for line in lines[first + 1 : first + 5]] == ["hung", "dead", "live", "live"]
    assert lines[first + 3].split()[7] == "99"
    assert lines[-1] == f"and {102 - (len(lines) - first - 2)} more"
    assert len(rows(shown(Sample(STATUS, mounts)))) == 102


@pytest.mark.parametrize("field", ["mountpoint", "type", "program_command", "container"])
@pytest.mark.parametrize("text", ["\x1b[2Jgone", "a\nb", "\x9b2J", "[red]x[/red]", "\u202etxt"])
def test_what_a_caller_chose_cannot_move_the_terminals_cursor(field: str, text: str) -> None:
    plain = shown(Sample(STATUS, [MOUNT]))
    hostile = shown(Sample(STATUS, [MOUNT | {field: text}]))
    assert len(hostile.splitlines()) == len(plain.splitlines())
    assert hostile.replace("\n", "").isprintable()


@pytest.mark.parametrize("option", [(), ("--once",)])
def test_where_there_is_no_terminal_one_look_is_printed(tmp_path: Path, option: tuple[str, ...]) -> None:
    with FakeBroker(tmp_path) as broker:
        result = run("top", "--config", broker.config, *option)
    assert result.exit_code == 0
    assert broker.questions == ["status", "mounts"]
    assert result.output.startswith("fusermount3-broker 0.1.0 ")
    assert "\x1b" not in result.output


class FakeBroker:
    """A broker that answers every question, with `STATUS` or one mount, while the block runs."""

    def __init__(self, directory: Path) -> None:
        paths = FakeControlSocket(directory)
        self.config, self._path = paths.config, paths.path
        self.questions: list[str] = []

    def __enter__(self) -> FakeBroker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(bytes(self._path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE)
        self._listener.close()
        self._path.unlink()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as stream:
                self.questions.append(stream.readline().decode().strip())
                connection.sendall(json.dumps(STATUS if self.questions[-1] == "status" else [MOUNT]).encode())


class Terminal:
    """`fusermount3-broker top` on a terminal of 100 columns and 40 lines."""

    def __init__(self, config: Path) -> None:
        self._screen, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self._terminal = theirs
        self.text = ""
        # a shell's background processes ignore SIGINT and SIGQUIT, those of nohup(1) SIGHUP, and so would this one
        interruptible = ["env", "--default-signal=INT,QUIT,HUP", sys.executable]
        command = [
            *interruptible,
            "-c",
            "from fusermount3_broker.cli.main import main; main()",
            "top",
            "--config",
            str(config),
        ]
        environment = os.environ | {"TERM": "xterm"}
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )

    def wait_for(self, text: str, times: int = 1) -> None:
        os.set_blocking(self._screen, False)
        give_up = time.monotonic() + PATIENCE
        while self.text.count(text) < times:
            assert time.monotonic() < give_up, self.text
            try:
                self.text += os.read(self._screen, 65536).decode("utf-8", "replace")
            except BlockingIOError:
                time.sleep(0.02)

    def press(self, key: str) -> None:
        os.write(self._screen, key.encode())

    def end(self) -> int:
        """Wait for the end, check that the terminal is restored, and return the exit status."""
        self.wait_for("\x1b[?1049l")  # restores the screen; the program ends when this has been read
        status = self.process.wait(PATIENCE)
        assert termios.tcgetattr(self._terminal) == self.before
        assert "Traceback" not in self.text
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._screen)
        os.close(self._terminal)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    with FakeBroker(tmp_path) as broker:
        terminal = Terminal(broker.config)
        try:
            yield terminal
        finally:
            terminal.close()


def test_at_a_terminal_it_looks_again_and_again_until_q_is_pressed(terminal: Terminal) -> None:
    terminal.wait_for("fusermount3-broker 0.1.0", 3)
    terminal.press("x")
    terminal.wait_for("fusermount3-broker 0.1.0", 4)
    terminal.press("q")
    assert terminal.end() == 0


def test_an_interrupt_ends_it_cleanly(terminal: Terminal) -> None:
    terminal.wait_for("fusermount3-broker 0.1.0", 2)
    terminal.process.send_signal(signal.SIGINT)  # what ^C sends at a controlling terminal
    assert terminal.end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_that_ends_it_leaves_the_terminal_as_it_was(terminal: Terminal, number: int) -> None:
    terminal.wait_for("fusermount3-broker 0.1.0", 2)
    terminal.process.send_signal(number)
    assert terminal.end() == -number
    assert terminal.text.count("\x1b[?25l") == terminal.text.count("\x1b[?25h"), "the cursor is shown again"


#: A display that gets its signal while Python runs a finalizer.
FINALIZING = """
import io, os, signal
from rich.console import Console
from rich.text import Text
from fusermount3_broker.cli import live_display

class Sample:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        sum(range(1000))

live_display.show(Sample, lambda *_: Text("sample"), Console(file=io.StringIO(), force_terminal=True))
"""


def test_a_signal_ends_it_whatever_python_is_doing() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", FINALIZING],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, b"")


def test_it_ends_when_its_terminal_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it reads no key any more, it would ask the broker again and again without a pause."""
    screen, theirs = pty.openpty()
    asked: list[None] = []

    def ask() -> None:
        asked.append(None)
        if len(asked) == 2:
            os.close(screen)
        assert len(asked) < 5

    with os.fdopen(theirs) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        live_display.show(ask, lambda *_: Text("sample"), Console(file=io.StringIO(), force_terminal=True))
    assert len(asked) == 2


def test_a_broker_that_is_away_for_a_while_is_waited_for(tmp_path: Path) -> None:
    with FakeBroker(tmp_path) as broker:
        terminal = Terminal(broker.config)
        try:
            terminal.wait_for("fusermount3-broker 0.1.0")
            broker.stop()
            terminal.wait_for("no broker answers at")
            broker.start()
            asked = len(broker.questions)
            terminal.wait_for("fusermount3-broker 0.1.0", terminal.text.count("fusermount3-broker 0.1.0") + 3)
            assert len(broker.questions) > asked
            terminal.press("q")
            assert terminal.end() == 0
        finally:
            terminal.close()
