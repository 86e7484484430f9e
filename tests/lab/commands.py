"""Running commands: one way for the whole lab, with an error that tells what the command said."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Argument = str | Path


class CommandFailed(AssertionError):
    """A command ended with a status other than 0. An AssertionError, since in a test that is what it is."""

    def __init__(self, argv: Sequence[Argument], result: subprocess.CompletedProcess[str]) -> None:
        self.result = result
        command = " ".join(str(word) for word in argv)
        said = (result.stdout + result.stderr).strip() or "(no output)"
        super().__init__(f"{command}\nended with status {result.returncode} and said:\n{said}")


def run(
    argv: Sequence[Argument],
    *,
    input: str = "",  # noqa: A002  # the name that subprocess.run has for it
    check: bool = True,
    timeout: float = 60.0,
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end. Raises CommandFailed if `check` and it failed, subprocess.TimeoutExpired
    after `timeout` seconds."""
    result = subprocess.run(
        argv, input=input, text=True, errors="surrogateescape", capture_output=True, timeout=timeout
    )
    if check and result.returncode != 0:
        raise CommandFailed(argv, result)
    return result
