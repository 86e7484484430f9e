"""However a run of all tests is interrupted, it tears down what its tests have made, and prints its summary."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab.broker import Broker
from tests.lab.pace import SLOWNESS

ROOT = Path(__file__).parents[2]
#: Its teardown takes longer than any process of pytest-xdist has by itself, see `tests.interrupted`.
TEST = """
import time
from pathlib import Path
import pytest

PLACE = Path(__file__).parent

@pytest.fixture(scope="session")
def made():
    (PLACE / "made").touch()
    yield
    time.sleep(16)
    (PLACE / "made").unlink()
    (PLACE / "torn down").touch()

def test_something(made):
    time.sleep(300)
"""
#: What the shell does with `COMMAND &` in a script.
IGNORING = "trap '' INT; exec \"$@\""


Interrupt = Callable[[subprocess.Popen[bytes], int], None]


def interrupt_by_terminal(_: subprocess.Popen[bytes], terminal: int) -> None:
    os.write(terminal, b"\x03")


def interrupt_alone(process: subprocess.Popen[bytes], _: int) -> None:
    process.send_signal(signal.SIGINT)


def terminate_alone(process: subprocess.Popen[bytes], _: int) -> None:
    process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("interrupt", "ignoring"),
    [(interrupt_by_terminal, False), (interrupt_alone, True), (terminate_alone, False)],
    ids=["Ctrl-C", "SIGINT to a background job", "SIGTERM"],
)
def test_it_tears_down(tmp_path: Path, interrupt: Interrupt, ignoring: bool) -> None:
    file = tmp_path / "test_slow_to_tear_down.py"
    file.write_text(TEST)
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "tests", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(file)]
    if ignoring:
        command = ["sh", "-c", IGNORING, "sh", *command]
    # setsid --ctty makes it the job in the foreground of the terminal
    with subprocess.Popen(["setsid", "--ctty", *command], cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs) as run:
        os.close(theirs)
        wait_for(tmp_path / "made")
        interrupt(run, ours)
        said = read_all(ours)
        status = run.wait(60 * SLOWNESS)
    os.close(ours)
    assert not (tmp_path / "made").exists(), said
    assert (tmp_path / "torn down").exists()
    assert status == pytest.ExitCode.INTERRUPTED
    assert "KeyboardInterrupt" in said
    assert "no tests ran" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_run_of_pytest_itself_tears_down_whatever_ends_it(tmp_path: Path, number: signal.Signals) -> None:
    """As with timeout(1), a second signal comes while it does."""
    file = tmp_path / "test_something.py"
    file.write_text(TEST.replace("time.sleep(16)", "(PLACE / 'tearing down').touch(); time.sleep(1)"))
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(file)]
    command = [sys.executable, "-m", "pytest", *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        wait_for(tmp_path / "made")
        run.send_signal(number)
        wait_for(tmp_path / "tearing down")
        run.send_signal(number)
        said, _ = run.communicate(timeout=60 * SLOWNESS)
    assert run.returncode == pytest.ExitCode.INTERRUPTED, said
    assert (tmp_path / "torn down").exists(), said
    assert not (tmp_path / "made").exists()


#: A run that gets its signals while it prefetches.
EARLY = """
import contextlib, os, signal, sys
from tests import __main__ as tests

@contextlib.contextmanager
def prefetching():
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
    try:
        yield
    finally:
        print("the prefetching has ended", flush=True)

tests.prefetching = prefetching
sys.exit(tests.main(["--prefetch", "--collect-only"]))
"""


def test_an_interrupt_while_it_prefetches_ends_that_and_runs_no_test() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EARLY], cwd=ROOT, capture_output=True, text=True, timeout=60 * SLOWNESS
    )
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert sorted(done.stdout.splitlines()) == ["interrupted, no tests ran", "the prefetching has ended"]
    assert done.stderr == ""


#: A command whose status tells how often it was interrupted, by two signals to its parent.
COUNTING = """
import os, signal, sys, time
count = 0
def interrupted(*_):
    global count
    count += 1
signal.signal(signal.SIGINT, interrupted)
for number in (signal.SIGTERM, signal.SIGINT):
    os.kill(os.getppid(), number)
    time.sleep(0.5)
sys.exit(10 + count)
"""


def test_a_second_signal_does_not_interrupt_the_teardown() -> None:
    command = [sys.executable, "-c", COUNTING]
    code = f"import sys; from tests.__main__ import Interruption; sys.exit(Interruption().run({command!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60 * SLOWNESS, check=False)
    assert done.returncode == 11


def test_a_broker_whose_start_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **_named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(Broker, "wait_for", interrupted)
    broker = Broker()
    with pytest.raises(KeyboardInterrupt):
        broker.__enter__()
    assert not broker.is_running
    assert list(tmp_path.iterdir()) == []


def wait_for(path: Path) -> None:
    give_up = time.monotonic() + 60 * SLOWNESS
    while not path.exists():
        assert time.monotonic() < give_up, "the test has not begun"
        time.sleep(0.05)


def read_all(terminal: int) -> str:
    """Return what is written to the terminal until nobody has it open any more."""
    parts = []
    try:
        while part := os.read(terminal, 65536):
            parts.append(part)
    except OSError:  # EIO
        pass
    return b"".join(parts).decode()
