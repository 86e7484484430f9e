"""The engine, which takes minutes, beside all other tests: from the session's start to the last test.

It uses only processor time that other processes leave idle, and ends with the session, even an interrupted one. A
session of several processes (pytest-xdist) has one engine: that of the process which distributes the tests. The one
that runs the test which waits for it reads the result in a directory that they share.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from xdist.workermanage import WorkerController  # type: ignore[import-untyped]  # it has no types

ROOT = Path(__file__).parents[2]
#: The fixture of a test that waits for the engine, and the end of that test's name for other processes.
FIXTURE = "fuzzing_in_background"
AWAITING = "::test_the_engine_finds_nothing"
_DIRECTORY = "fuzz_directory"
_SAID, _STATUS = "said", "status"


class Background:
    """A process of `python -m tests.fuzz` that belongs to the session, once it is started."""

    def __init__(self) -> None:
        # Killed, the process removes none of its temporary files.
        self._temporary = TemporaryDirectory()  # `end` removes it
        self.directory = Path(self._temporary.name)
        self._process: subprocess.Popen[bytes] | None = None
        self._watch = threading.Thread(target=self._tell, daemon=True)

    def start(self) -> None:
        """Start the process, unless it has been started."""
        if self._process:
            return
        command = [sys.executable, "-m", "tests.fuzz", "--idle"]
        environment = {**os.environ, "TMPDIR": self._temporary.name}
        with (self.directory / _SAID).open("w") as said:
            self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=said)
        self._watch.start()

    def _tell(self) -> None:
        assert self._process
        new = self.directory / f"{_STATUS}.new"
        new.write_text(str(self._process.wait()))
        new.rename(self.directory / _STATUS)

    def end(self) -> None:
        """Kill the process, and the engine with it, unless it has ended."""
        if self._process:
            self._process.kill()
            self._watch.join()
        self._temporary.cleanup()


def wait(directory: Path) -> tuple[int, str]:
    """Wait for the engine that tells its result in this directory; return its exit status and its output."""
    while not (directory / _STATUS).exists():
        assert directory.exists(), "the session has ended"
        time.sleep(0.5)
    return int((directory / _STATUS).read_text()), (directory / _SAID).read_text()


_BACKGROUND = pytest.StashKey[Background]()


def _of(config: pytest.Config) -> Background:
    """Return the engine of the session, which may not have been started."""
    if _BACKGROUND not in config.stash:
        background = config.stash[_BACKGROUND] = Background()
        config.add_cleanup(background.end)
    return config.stash[_BACKGROUND]


def directory_of(config: pytest.Config) -> Path:
    """Return the directory where the session's engine tells its result."""
    given: dict[str, str] = getattr(config, "workerinput", {})
    return Path(given[_DIRECTORY]) if given else _of(config).directory


def awaits_the_engine(item: pytest.Item) -> bool:
    return FIXTURE in getattr(item, "fixturenames", ())


def pytest_collection_finish(session: pytest.Session) -> None:
    """In a session of one process: start the engine if a test will wait for it."""
    is_alone = not hasattr(session.config, "workerinput")
    if is_alone and any(map(awaits_the_engine, session.items)) and not session.config.option.collectonly:
        _of(session.config).start()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """In the process that distributes the tests, for each that is to run them."""
    node.workerinput[_DIRECTORY] = str(_of(node.config).directory)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: WorkerController, ids: Iterable[str]) -> None:
    if any(each.endswith(AWAITING) for each in ids):
        _of(node.config).start()
