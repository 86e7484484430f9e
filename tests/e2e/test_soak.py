"""The soak in short; `make soak` is the long one."""

from __future__ import annotations

import pytest

from benchmarks.soak import soak

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@pytest.mark.parametrize("seed", [1])
def test_nothing_is_lost_or_leaked_in_a_short_soak(seed: int) -> None:
    report = soak(seconds=20, seed=seed)
    print(report.markdown())
    assert report.faults.total() > 0
    assert report.cycles > 0, "no FUSE program ran"
    assert len(report.seen.mounts) > 0, "there was no load"
    assert report.seen.problems() == []
