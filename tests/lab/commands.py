"""Running commands: one way for the whole lab, with an error that contains the command's output."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab.pace import SLOWNESS

if TYPE_CHECKING:
    from collections.abc import Sequence

Argument = str | Path


class CommandFailed(AssertionError):
    """A command ended with a status other than 0. An AssertionError, because in a test it is a failed assertion."""

    def __init__(self, argv: Sequence[Argument], result: subprocess.CompletedProcess[str]) -> None:
        self.result = result
        command = " ".join(str(word) for word in argv)
        said = (result.stdout + result.stderr).strip() or "(no output)"
        super().__init__(f"{command}\nended with status {result.returncode} and said:\n{said}")


def run(
    argv: Sequence[Argument],
    *,
    input: str = "",  # noqa: A002  # subprocess.run's name for it
    check: bool = True,
    timeout: float = 300.0,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end.

    Raises CommandFailed if `check` and it failed, subprocess.TimeoutExpired after `timeout` seconds, or more on a slow
    machine.
    """
    result = subprocess.run(
        argv, input=input, text=True, errors="surrogateescape", capture_output=True, timeout=SLOWNESS * timeout
    )
    if check and result.returncode != 0:
        raise CommandFailed(argv, result)
    return result


def run_with_teardown(
    argv: Sequence[Argument], *, check: bool = True, timeout: float = 600.0
) -> subprocess.CompletedProcess[str]:
    """As `run`, for a program that has things to remove when it ends: it is never killed, but interrupted.

    So it leaves nothing when the tests are interrupted, either.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, text=True, stdout=pipe, stderr=pipe, start_new_session=True) as process:
        try:
            said = process.communicate(timeout=SLOWNESS * timeout)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)  # make forwards nothing to what it runs
            with suppress(KeyboardInterrupt):
                process.communicate()
            raise
    result = subprocess.CompletedProcess(argv, process.returncode, *said)
    if check and result.returncode != 0:
        raise CommandFailed(argv, result)
    return result
