"""The checkout that the tests and benchmarks run from."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.lab.cache import Cache
from tests.lab.commands import Argument, run

ROOT = Path(__file__).parents[2]


def commit() -> str:
    """Return the commit that is checked out, with a + if files have been changed since."""
    described = subprocess.run(
        ["git", "describe", "--always", "--exclude=*", "--dirty=+"], cwd=ROOT, capture_output=True, text=True
    )
    return described.stdout.strip() or "not a git checkout"


def contents(*paths: str) -> list[str | bytes]:
    """Return the names of the files below these paths, or of all, as git finds them, each followed by its content.

    For the recipe of what is made of them (`tests.lab.cache`). A path is one of git(1), such as ``:!docs``.
    """
    command: list[Argument] = [
        "git",
        "-C",
        ROOT,
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
        "--",
        *paths,
    ]
    names = sorted({name for name in run(command).stdout.split("\0") if (ROOT / name).is_file()} - {""})
    return [part for name in names for part in (name, (ROOT / name).read_bytes())]


def make_static(architecture: str) -> Path:
    """Return the static proxy for another architecture, which `make static` has built, in one process at a time.

    Two that build it at once would read what the other one writes.
    """
    with Cache().locked(f"static-{architecture}"):
        run(["make", "--directory", ROOT, "static", f"ARCH={architecture}"], timeout=600)
    return ROOT / "build/static" / architecture / "fusermount3-proxy"
