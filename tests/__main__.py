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
#: pytest.ExitCode.INTERRUPTED
INTERRUPTED = 2
#: Seconds that the prefetching process has to end; it may have a container to remove.
_PATIENCE = 60


@contextlib.contextmanager
def prefetching() -> Iterator[None]:
    """Prefetch while the block runs. The processes have groups of their own: each is interrupted once, at the end."""
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-m", "tests.prefetch"]
    processes = [
        subprocess.Popen([*command, name], stdin=quiet, stdout=quiet, stderr=quiet, process_group=0)
        for name in ("entries", "cluster")
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
    interruption = Interruption()
    given = [each for each in arguments if each != PREFETCH]
    pytest = [sys.executable, "-m", "pytest", "-p", "tests.interrupted", f"--numprocesses={AT_ONCE}", "--dist=loadfile"]
    with prefetching() if PREFETCH in arguments else contextlib.nullcontext():
        return interruption.run([*pytest, *given])


class Interruption:
    """From now on, the first signal that is to end this process interrupts the command that `run` executes, and nothing
    else; later ones are ignored, for a second SIGINT would interrupt the command's cleaning up.

    Signals count even if they were ignored, as in background jobs of a shell.
    """

    def __init__(self) -> None:
        self._came = False
        self._process: subprocess.Popen[bytes] | None = None
        for number in _ENDING:
            signal.signal(number, self._interrupt)

    def _interrupt(self, _number: int, _: object) -> None:
        if not self._came and self._process:
            self._process.send_signal(signal.SIGINT)
        self._came = True

    def run(self, command: Sequence[str]) -> int:
        """Run the command and return its exit status, that of an interrupted pytest if a signal came too early for it.

        The command gets a process group of its own: Ctrl-C reaches it once, through this process.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # no signal between the look and the start
        try:
            if not self._came:
                self._process = subprocess.Popen(command, process_group=0, preexec_fn=_unblock)
        finally:
            _unblock()
        status = self._process.wait() if self._process else -signal.SIGINT
        if self._came and status == -signal.SIGINT:
            print("interrupted, no tests ran")
            return INTERRUPTED
        return status


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
