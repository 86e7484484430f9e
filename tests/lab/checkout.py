"""The checkout that the tests and benchmarks run from."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def commit() -> str:
    """Return the commit that is checked out, with a + if files have been changed since."""
    described = subprocess.run(
        ["git", "describe", "--always", "--exclude=*", "--dirty=+"], cwd=ROOT, capture_output=True, text=True
    )
    return described.stdout.strip() or "not a git checkout"
