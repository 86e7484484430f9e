"""FUSE programs that stop answering: kubelet's calls end in time, and the pod goes all the same."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.e2e.csi.pods import DATA, OWN_MOUNTPOINT, consumer, pod, starter, wait_for_volume

if TYPE_CHECKING:
    from tests.lab.kubelet import Kubelet

pytestmark = [pytest.mark.e2e, pytest.mark.long]

IN_TIME = 15
"""Seconds; kubelet waits 120 for a call. The deadline of an operation is 3 here, and there are some in a row."""

HANGS = {
    "stats": ("silent_at=getattr", "stat {data}"),
    "stopped": ("stop_at=getattr", "stat {data}"),
    "lookup": ("silent_at=lookup", "cat {data}/file"),
    "init": ("silent_at=init", "stat {data}"),
    "writeback": ("writeback,silent_at=write", "dd if=/dev/zero of={data}/file bs=4k count=100"),
}


@pytest.mark.parametrize(("options", "use"), HANGS.values(), ids=HANGS.keys())
@pytest.mark.parametrize("timing", ["onConnect", "eager"])
def test_kubelet_is_never_held_up(kubelet: Kubelet, options: str, use: str, timing: str) -> None:
    serving = starter(f"exec stopfs -f -o {options} {OWN_MOUNTPOINT}")
    with kubelet.pod(pod([consumer(), serving], attributes={"mountTiming": timing})) as running:
        wait_for_volume(running)
        running["consumer"].start(["sh", "-c", use.format(data=DATA)])
        time.sleep(1)
        begun = time.monotonic()
        running.stats(patience=IN_TIME)
        assert time.monotonic() - begun < IN_TIME
        running.publish(running.csi_volume())
        # The program still runs while the volume is taken away: kubelet does so when it couldn't kill a container.
        running.kubelet.plugin.unpublish(running.handle(running.csi_volume()), running.target(), IN_TIME)
        running.stop_containers()


def test_a_pod_with_a_hung_program_goes(kubelet: Kubelet) -> None:
    serving = starter(f"exec stopfs -f -o stop_at=getattr {OWN_MOUNTPOINT}")
    with kubelet.pod(pod([consumer(), serving])) as running:
        wait_for_volume(running)
        running["consumer"].start(["stat", DATA])
        time.sleep(0.5)
        begun = time.monotonic()
    assert time.monotonic() - begun < 4 * IN_TIME
