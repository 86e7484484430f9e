"""Run the engine, which takes minutes, in parallel with all other tests: from the session's start to the last test.

The engine uses only processor time that other processes leave idle, and ends with the session, even an interrupted one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import pytest

ROOT = Path(__file__).parents[2]


class Background:
    """A process of `python -m tests.fuzz` that belongs to the session."""

    def __init__(self) -> None:
        self._said: IO[str] = TemporaryFile("w+")  # noqa: SIM115 - `end` closes it
        command = [sys.executable, "-m", "tests.fuzz", "--idle"]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=self._said, stderr=subprocess.STDOUT)

    def wait(self) -> tuple[int, str]:
        """Wait for the process; return its exit status and its output."""
        status = self._process.wait()
        self._said.seek(0)
        return status, self._said.read()

    def end(self) -> None:
        """Kill the process, and the engine with it, unless it has ended."""
        self._process.kill()
        self._process.wait()
        self._said.close()


_BACKGROUND = pytest.StashKey[Background]()


def _awaits(item: pytest.Item) -> bool:
    return "background" in getattr(item, "fixturenames", ())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that wait for the engine after all others."""
    items.sort(key=_awaits)


def pytest_collection_finish(session: pytest.Session) -> None:
    if any(map(_awaits, session.items)) and not session.config.option.collectonly:
        background = session.config.stash[_BACKGROUND] = Background()
        session.config.add_cleanup(background.end)


@pytest.fixture
def background(request: pytest.FixtureRequest) -> Background:
    """The engine, which has fuzzed all targets since the session's start."""
    return request.config.stash[_BACKGROUND]
