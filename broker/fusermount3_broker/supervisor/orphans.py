"""Orphaned children of a killed mounter: the supervisor adopts and counts them.

Such a child ends when its operation has finished; one that hangs, when its FUSE program has ended. The next mounter
must know their number, or each kill would allow as many again.
"""

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.messages.process_names import BUSY


def adopt() -> None:
    """Make this process the parent of its children's orphans. Raises OSError."""
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)


def of(parents: Collection[int], known: Collection[int]) -> list[int]:
    """Return pidfds of the busy children of these processes, except the `known` ones; the caller must close them.

    Returns at most as many as a record can carry (SCM_MAX_FD).
    """
    found: list[int] = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal() and int(directory.name) not in known and _parent_of_busy(directory) in parents:
            with suppress(OSError):  # it has ended
                found.append(os.pidfd_open(int(directory.name)))
        if len(found) == syscalls.SCM_MAX_FD:
            break
    return found


def _parent_of_busy(directory: Path) -> int:
    """Return the parent of a busy child that has not ended, by its directory in /proc; 0 for others."""
    try:
        # The name is in parentheses, and may itself contain parentheses (proc_pid_stat(5)).
        before, _, after = (directory / "stat").read_bytes().rpartition(b")")
        state, parent = after.split()[:2]
    except (OSError, ValueError):
        return 0
    return int(parent) if state != b"Z" and before.partition(b"(")[2] == BUSY else 0


def reap(known: Collection[int]) -> None:
    """Reap adopted processes that have ended, but not the `known` ones, which are waited for elsewhere."""
    with suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in known:  # its own handler will see its end next
                return
            os.waitpid(ended.si_pid, 0)
