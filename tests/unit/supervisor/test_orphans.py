"""Orphans of a killed mounter: only children that carry out an operation, and only those of the given parents."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fusermount3_broker.messages.process_names import BUSY
from fusermount3_broker.supervisor import orphans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def child() -> Iterator[Callable[[bytes], int]]:
    """Fork children with a given name, which wait; return their pids."""
    children: list[int] = []

    def child(name: bytes) -> int:
        ready, said = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                Path("/proc/self/comm").write_bytes(name)
                os.write(said, b".")
                signal.pause()
            finally:
                os._exit(0)
        os.read(ready, 1)
        os.close(ready)
        os.close(said)
        children.append(pid)
        return pid

    yield child
    for pid in children:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def left_by(parent: int, known: tuple[int, ...] = ()) -> set[int]:
    """Return the pids of the orphans that it finds, from the fdinfo of their pidfds; close the pidfds."""
    found = set()
    for pidfd in orphans.of([parent], known):
        fields = dict(line.split(":", 1) for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines())
        found.add(int(fields["Pid"]))
        os.close(pidfd)
    return found


def test_busy_children_are_found(child: Callable[[bytes], int]) -> None:
    busy = {child(BUSY), child(BUSY)}
    assert left_by(os.getpid()) == busy


@pytest.mark.parametrize("name", [b"python3", b"fuse-operatio", b"(fuse-operation", b"x) Z 1 (fuse"])
def test_what_only_waits_or_has_another_name_is_not(child: Callable[[bytes], int], name: bytes) -> None:
    child(name)
    assert left_by(os.getpid()) == set()


def test_what_is_known_is_left_out(child: Callable[[bytes], int]) -> None:
    one, other = child(BUSY), child(BUSY)
    assert left_by(os.getpid(), (one,)) == {other}


def test_children_of_others_are_not_found(child: Callable[[bytes], int]) -> None:
    child(BUSY)
    assert left_by(os.getppid()) == set()


def test_what_has_ended_does_not_count_and_is_reaped(child: Callable[[bytes], int]) -> None:
    ended, known = child(BUSY), child(BUSY)
    os.kill(ended, signal.SIGKILL)
    os.waitid(os.P_PID, ended, os.WEXITED | os.WNOWAIT)
    assert left_by(os.getpid()) == {known}
    orphans.reap({known})
    with pytest.raises(ChildProcessError):
        os.waitpid(ended, os.WNOHANG)


def test_who_is_known_is_reaped_by_who_knows_it(child: Callable[[bytes], int]) -> None:
    known = child(BUSY)
    os.kill(known, signal.SIGKILL)
    os.waitid(os.P_PID, known, os.WEXITED | os.WNOWAIT)
    orphans.reap({known})
    assert os.waitpid(known, 0) == (known, signal.SIGKILL)
