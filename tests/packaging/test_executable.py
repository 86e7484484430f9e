"""Test that the static executable builds reproducibly, wherever its sources are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.cache import sha256
from tests.lab.commands import run

pytestmark = pytest.mark.e2e

SOURCES = Path(__file__).parents[2]


def build(sources: Path, umask: str) -> Path:
    """Return the executable, built from a copy of the sources in this directory."""
    run([SOURCES / "packaging/export", sources])
    executable = sources / "build/static/fusermount3-proxy"
    command = f"umask {umask} && exec /usr/bin/python3 packaging/static/build.py --output {executable}"
    run(["env", "--chdir", sources, "sh", "-c", command], timeout=300)
    return executable


def test_built_elsewhere_it_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "a/longer").mkdir(parents=True)
    first, second = build(tmp_path / "one", "022"), build(tmp_path / "a/longer/path", "077")
    assert sha256(first) == sha256(second)
    assert bytes(tmp_path) not in first.read_bytes()
