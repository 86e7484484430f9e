"""The lock of the state directory, of which a supervisor and its front have one each."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fusermount3_broker.service import state_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

FRONT = """
import sys
from pathlib import Path
from fusermount3_broker.service import state_directory
state_directory.lock_beside_supervisor(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def front(directory: Path) -> Iterator[None]:
    """Run a process that has locked the directory as a front does."""
    command = [sys.executable, "-c", FRONT, str(directory)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "locked\n"
        yield
        process.stdin.close()
        assert process.wait(timeout=60) == 0


@contextmanager
def opened(directory: Path) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def test_a_front_keeps_its_lock_when_its_supervisor_has_gone(tmp_path: Path) -> None:
    with ExitStack() as supervisor, opened(tmp_path) as later:
        assert state_directory.lock(supervisor.enter_context(opened(tmp_path)))
        with front(tmp_path):
            assert not state_directory.lock(later)
            supervisor.close()
            assert not state_directory.lock(later)
        assert state_directory.lock(later)


def test_a_supervisor_keeps_its_lock_when_its_front_has_gone(tmp_path: Path) -> None:
    with opened(tmp_path) as own, opened(tmp_path) as later:
        assert state_directory.lock(own)
        with front(tmp_path):
            pass
        assert not state_directory.lock(later)
        with front(tmp_path):
            assert not state_directory.lock(later)


def test_a_supervisor_that_could_not_lock_the_directory_has_no_lock(tmp_path: Path) -> None:
    with ExitStack() as supervisor, opened(tmp_path) as later, opened(tmp_path) as last:
        assert state_directory.lock(supervisor.enter_context(opened(tmp_path)))
        assert not state_directory.lock(later)
        supervisor.close()
        assert state_directory.lock(last)


def test_a_front_needs_the_directory_but_not_that_it_can_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: int) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))  # as on NFS

    monkeypatch.setattr("fusermount3_broker.service.state_directory.fcntl.flock", flock)
    with pytest.raises(FileNotFoundError):
        state_directory.lock_beside_supervisor(tmp_path / "none")
    state_directory.lock_beside_supervisor(tmp_path)
    for descriptor in Path("/proc/self/fd").iterdir():
        if os.path.realpath(descriptor) == str(tmp_path):
            os.close(int(descriptor.name))
