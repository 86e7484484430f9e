"""Run the engine, which takes minutes, in parallel with all other tests: from the session's start to the last test.

The engine uses only processor time that other processes leave idle, and ends with the session, even an interrupted one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO

import pytest

ROOT = Path(__file__).parents[2]


class Background:
    """A process of `python -m tests.fuzz` that belongs to the session."""

    def __init__(self) -> None:
        self._said: IO[str] = TemporaryFile("w+")  # noqa: SIM115 - `end` closes it
        # Killed, the process removes none of its temporary files.
        self._temporary = TemporaryDirectory()  # `end` removes it
        command = [sys.executable, "-m", "tests.fuzz", "--idle"]
        environment = {**os.environ, "TMPDIR": self._temporary.name}
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=self._said, stderr=subprocess.STDOUT
        )

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
        self._temporary.cleanup()


_BACKGROUND = pytest.StashKey[Background]()


def awaits_the_engine(item: pytest.Item) -> bool:
    return "fuzzing_in_background" in getattr(item, "fixturenames", ())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that wait for the engine after all others."""
    items.sort(key=awaits_the_engine)


def pytest_collection_finish(session: pytest.Session) -> None:
    if any(map(awaits_the_engine, session.items)) and not session.config.option.collectonly:
        background = session.config.stash[_BACKGROUND] = Background()
        session.config.add_cleanup(background.end)


@pytest.fixture
def fuzzing_in_background(request: pytest.FixtureRequest) -> Background:
    """The engine, which has fuzzed all targets since the session's start."""
    return request.config.stash[_BACKGROUND]
