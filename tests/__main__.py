"""Run all tests in a fraction of the time: ``python -m tests [--prefetch] [arguments of pytest]``.

Most tests wait more than they compute, so `AT_ONCE` processes of pytest-xdist run them, each the tests of one file
after the other. With `--prefetch`, `tests.prefetch` meanwhile makes what later tests need. The exit status is that of
pytest.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Files whose tests run at the same time, on two processors.
AT_ONCE = 3
PREFETCH = "--prefetch"
#: How much slower all is that tests wait for (`tests.lab.pace`): they share the processors.
_SLOWNESS = "3"
#: Signals that are to end a run: Ctrl-C, kill(1), the end of the terminal.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Seconds that the prefetching process has to end; it may have a container to remove.
_PATIENCE = 60


@contextlib.contextmanager
def prefetching() -> Iterator[None]:
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-m", "tests.prefetch"]
    processes = [
        subprocess.Popen([*command, name], stdin=quiet, stdout=quiet, stderr=quiet) for name in ("entries", "cluster")
    ]
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGINT)
        for process in processes:
            process.wait(_PATIENCE)


def main(arguments: list[str]) -> int:
    os.environ.setdefault("FUSERMOUNT3PROXY_TEST_SLOWNESS", _SLOWNESS)
    given = [each for each in arguments if each != PREFETCH]
    pytest = [sys.executable, "-m", "pytest", "-p", "tests.interrupted", f"--numprocesses={AT_ONCE}", "--dist=loadfile"]
    with prefetching() if PREFETCH in arguments else contextlib.nullcontext():
        return run_interruptible([*pytest, *given])


def run_interruptible(command: Sequence[str]) -> int:
    """Run the command and return its exit status. Whichever signal is to end this process interrupts the command.

    The command gets a process group of its own: Ctrl-C reaches it once, through this process. A second SIGINT would
    interrupt its cleaning up. Signals count even if they were ignored, as in background jobs of a shell.
    """
    started: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def interrupt(number: int, _: object) -> None:
        for process in started:
            process.send_signal(signal.SIGINT)
        if not started:
            early.append(number)

    for number in _ENDING:
        signal.signal(number, interrupt)
    started.append(subprocess.Popen(command, process_group=0))
    if early:
        started[0].send_signal(signal.SIGINT)
    return started[0].wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
