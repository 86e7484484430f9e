"""The checkout that the tests and benchmarks run from."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.lab.cache import Cache
from tests.lab.commands import run

ROOT = Path(__file__).parents[2]


def commit() -> str:
    """Return the commit that is checked out, with a + if files have been changed since."""
    described = subprocess.run(
        ["git", "describe", "--always", "--exclude=*", "--dirty=+"], cwd=ROOT, capture_output=True, text=True
    )
    return described.stdout.strip() or "not a git checkout"


def make_static(architecture: str) -> Path:
    """Return the static proxy for another architecture, which `make static` has built, in one process at a time.

    Two that build it at once would read what the other one writes.
    """
    with Cache().locked(f"static-{architecture}"):
        run(["make", "--directory", ROOT, "static", f"ARCH={architecture}"], timeout=600)
    return ROOT / "build/static" / architecture / "fusermount3-proxy"
