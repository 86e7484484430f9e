"""Programs of another architecture on this machine, by packaging/emulated.py."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

EMULATED = ("/usr/bin/python3", Path(__file__).parents[2] / "packaging/emulated.py")


def can_emulate() -> bool:
    """Return whether the kernel gives each user namespace its own binfmt_misc."""
    return run_emulating(["true"]).returncode == 0


def run_emulating(argv: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """Run the command as root of a user namespace that has all users of this one and executes programs for arm64.

    Needs root and Linux 6.7. Standard error goes to the result's `stdout`, too.
    """
    return subprocess.run([*EMULATED, *argv], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
