"""Under load, callers see only slower answers when parts of the broker are killed or all of it is restarted.

No live mount is lost, none leaks, none is made twice, and no call fails, according to the callers' own mount tables and
descriptors and to the broker's list.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from typing import TYPE_CHECKING

import pytest

from fusermount3_broker.kernel import syscalls
from tests.e2e import hostile
from tests.lab.broker import Broker
from tests.lab.callers import Seen, moments, start_callers
from tests.lab.faults import FRONT, MOUNTER, Part, kill
from tests.lab.kernel import needs_kernel
from tests.lab.pace import SLOWNESS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.conftest import RunBroker

pytestmark = [pytest.mark.e2e, pytest.mark.long]

CALLERS = 6
SECONDS = max(8, round(4 * SLOWNESS))
#: Kills that fit into that time; on an emulated machine, each takes long.
LEAST_KILLS = 3 if SLOWNESS <= 3 else 1
#: On a slow machine, the broker's own steps take longer, too.
DEADLINES = f"[deadlines]\noperation = {max(5, round(2 * SLOWNESS))}\n"


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("parts", [(FRONT,), (MOUNTER,), (FRONT, MOUNTER)], ids=" and ".join)
def test_callers_notice_nothing_of_a_kill(
    parts: tuple[Part, ...], seed: int, run_broker: RunBroker, tmp_path: Path
) -> None:
    broker = run_broker(DEADLINES)
    callers = start_callers(CALLERS, SECONDS, broker.socket, tmp_path)
    kills = 0
    for left in moments(SECONDS - 1, 0.2, 1.2, seed):
        if left > 0:
            kill(broker, *parts)
            kills += 1
    seen = Seen.together(caller.result() for caller in callers)
    print(f"{kills} kills, {len(seen.mounts)} mounts, {len(seen.unmounts)} unmounts")
    assert kills >= LEAST_KILLS
    assert len(seen.mounts) > CALLERS, "there was no load"
    assert seen.problems() == []
    assert broker.mounts() == []


@needs_kernel("statmount(2)")
def test_mounts_are_known_to_a_broker_that_finds_another_fusectl(tmp_path: Path) -> None:
    """This happens where fusectl is mounted nowhere, so that a new instance begins with the broker: the inodes in the
    broker's table are then meaningless.

    A mount that is gone, and whose device number now belongs to another, is not mistaken for that one.
    """
    gone, kept = tmp_path / "gone", tmp_path / "kept"
    gone.mkdir()
    kept.mkdir()

    def body() -> None:
        with Broker() as broker, Broker() as other:
            devices = [hostile.mount(broker, place) for place in (gone, kept)]
            broker.stop()
            os.close(devices.pop(0))
            syscalls.umount2(bytes(gone), 0)
            devices.append(hostile.mount(other, gone))
            (number,) = [mount["device"] for mount in other.mounts()]
            with contextlib.closing(sqlite3.connect(broker.directory / "state/mounts.sqlite")) as table, table:
                table.execute("UPDATE mounts SET connection = connection + 1000000")
                table.execute("UPDATE mounts SET device = ? WHERE mountpoint = ?", [number, bytes(gone)])
            broker.start()
            assert [mount["mountpoint"] for mount in broker.mounts()] == [str(kept)]
            (said,) = broker.records("fusectl was mounted anew")
            assert (said["recognized"], said["gone"]) == (1, 1)
            for device in devices:
                os.close(device)
            hostile.unmount(broker, kept)
            hostile.unmount(other, gone)

    hostile.in_private_namespace(body)
