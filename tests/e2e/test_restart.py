"""What callers see when parts of the broker are killed, or all of it restarted, under load: a slower answer.

No live mount is lost, none is leaked, none is made twice, and no call fails: as the callers' own mount tables and
descriptors say, and the broker's list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.lab.callers import Seen, moments, start_callers
from tests.lab.faults import FRONT, MOUNTER, Part, kill

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.conftest import RunBroker

pytestmark = [pytest.mark.e2e, pytest.mark.long]

CALLERS = 6
SECONDS = 8


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("parts", [(FRONT,), (MOUNTER,), (FRONT, MOUNTER)], ids=" and ".join)
def test_callers_notice_nothing_of_a_kill(
    parts: tuple[Part, ...], seed: int, run_broker: RunBroker, tmp_path: Path
) -> None:
    broker = run_broker()
    callers = start_callers(CALLERS, SECONDS, broker.socket, tmp_path)
    kills = 0
    for left in moments(SECONDS - 1, 0.2, 1.2, seed):
        if left > 0:
            kill(broker, *parts)
            kills += 1
    seen = Seen.together(caller.result() for caller in callers)
    print(f"{kills} kills, {len(seen.mounts)} mounts, {len(seen.unmounts)} unmounts")
    assert kills > 2
    assert len(seen.mounts) > CALLERS, "there was no load"
    assert seen.problems() == []
    assert broker.mounts() == []
