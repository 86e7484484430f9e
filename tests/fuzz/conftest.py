"""The engine takes minutes, so it runs beside all other tests: begun with the session, and awaited by the last test.

It takes what the others leave of the processor, and it is ended with the session, also with one that is interrupted.
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
    """`python -m tests.fuzz`, as a process of the session's."""

    def __init__(self) -> None:
        self._said: IO[str] = TemporaryFile("w+")  # noqa: SIM115 - it is closed with the process
        command = [sys.executable, "-m", "tests.fuzz", "--idle"]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=self._said, stderr=subprocess.STDOUT)

    def wait(self) -> tuple[int, str]:
        """Return the status with which it ended, and what it said."""
        status = self._process.wait()
        self._said.seek(0)
        return status, self._said.read()

    def end(self) -> None:
        """End it, and the engine with it, if it has not ended."""
        self._process.kill()
        self._process.wait()
        self._said.close()


_BACKGROUND = pytest.StashKey[Background]()


def _awaits(item: pytest.Item) -> bool:
    return "background" in getattr(item, "fixturenames", ())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what awaits the engine behind all others."""
    items.sort(key=_awaits)


def pytest_collection_finish(session: pytest.Session) -> None:
    if any(map(_awaits, session.items)) and not session.config.option.collectonly:
        background = session.config.stash[_BACKGROUND] = Background()
        session.config.add_cleanup(background.end)


@pytest.fixture
def background(request: pytest.FixtureRequest) -> Background:
    """The engine, which works on all targets since the session began."""
    return request.config.stash[_BACKGROUND]
