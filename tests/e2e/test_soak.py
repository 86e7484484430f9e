"""The soak in short; `make soak` is the long one."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.soak.faults import awaited_by, descriptors_of, held_while_idle
from benchmarks.soak.run import soak
from fusermount3_broker.messages.mounter import StartMount
from tests.e2e.conftest import wait_until
from tests.e2e.hostile import in_private_namespace
from tests.e2e.owned_front import PATIENCE, caller, facts_of, playing_the_front

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@pytest.mark.parametrize("seed", [1])
def test_nothing_is_lost_or_leaked_in_a_short_soak(seed: int) -> None:
    report = soak(seconds=20, seed=seed, at_once=200)
    print(report.markdown())
    assert all(report.faults.values()), "each fault at least once"
    assert report.cycles > 0, "no FUSE program ran"
    assert len(report.seen.mounts) > 0, "there was no load"
    assert report.attacks > 0, "nobody attacked"
    assert report.problems() == []


def test_the_soak_takes_no_child_for_idle_that_waits_for_the_fronts_decision(tmp_path: Path) -> None:
    """Such a child reads from its conversation, of which the mounter has a descriptor, too."""

    def body() -> None:
        with playing_the_front() as front, caller(tmp_path, 0) as (connection, pidfd):
            mounter = psutil.Process(front.pid)
            facts_of(front.begin(StartMount(seconds=PATIENCE, commit_seconds=PATIENCE), connection, pidfd))
            wait_until(lambda: deciding(mounter) and idle(mounter))
            assert not deciding(mounter) & idle(mounter)

    def idle(mounter: psutil.Process) -> set[int]:
        return {child.pid for child in mounter.children() if held_while_idle(child, mounter)}

    def deciding(mounter: psutil.Process) -> set[int]:
        """Return the children that read from a socket of the mounter's that this process, its parent, does not have."""
        theirs = set(descriptors_of(mounter.pid).values()) - set(descriptors_of(os.getpid()).values())
        return {child.pid for child in mounter.children() if awaited(child.pid) in theirs}

    def awaited(pid: int) -> str:
        with suppress(OSError, ValueError, IndexError):  # it runs, or has ended
            return awaited_by(pid, descriptors_of(pid))
        return ""

    in_private_namespace(body)
