"""The disk of the driver's tables is full: kubelet gets an error for a new volume, and existing ones can be removed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from tests.e2e.conftest import wait_until
from tests.e2e.csi.pods import SOCKETS, consumer, pod
from tests.lab.commands import run
from tests.lab.csi import CsiError
from tests.lab.disk import SMALL, Disk
from tests.lab.faults import FRONT, kill
from tests.lab.manifests import EmptyDir

if TYPE_CHECKING:
    from tests.e2e.csi.conftest import RunCluster
    from tests.lab.cluster import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.long]

FULL = "No space left on device"


def small_disk(cluster: Cluster) -> Disk:
    """Put the broker's tables on a small disk, in the broker's own mount namespace."""
    front = cluster.broker.front.pid
    state = cluster.broker.directory / "state"
    run(["nsenter", "-t", str(front), "-m", "mount", *SMALL, state])
    kill(cluster.broker, FRONT)  # the next front opens them there
    return Disk(Path(f"/proc/{cluster.broker.process.pid}/root/{state.relative_to('/')}"))


def written(cluster: Cluster) -> int:
    """Return how many volumes are in the table, as read in the broker's mount namespace."""
    look = (
        "import sqlite3, sys; print(*sqlite3.connect(sys.argv[1]).execute('SELECT count(*) FROM volumes').fetchone())"
    )
    inside = ["nsenter", "-t", str(cluster.broker.process.pid), "-m", "--", sys.executable, "-c", look]
    return int(run([*inside, cluster.broker.directory / "state/volumes.sqlite"]).stdout)


def problem(cluster: Cluster, table: str) -> str:
    return f"the broker can't write its table of {table} in {cluster.broker.directory}/state: {FULL}"


@pytest.mark.parametrize("timing", ["eager", "onConnect"])
def test_a_volume_is_published_when_it_can_be_written_down_and_unpublished_always(
    run_cluster: RunCluster, timing: str
) -> None:
    cluster = run_cluster()
    disk = small_disk(cluster)
    with cluster.kubelet.new_pod(pod([consumer()], attributes={"mountTiming": timing})) as running:
        running.set_up_volume(EmptyDir(SOCKETS))
        volume = running.csi_volume()
        disk.fill()
        with pytest.raises(CsiError) as failed:
            running.publish(volume)
        assert failed.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert problem(cluster, "volumes") in failed.value.text
        assert cluster.node.mounts(running.directory) == []
        assert cluster.broker.status()["volumes"] == 0
        wait_until(cluster.plugin.is_ready)  # otherwise kubelet would start the driver again, which makes no room
        disk.free()
        running.set_up_volume(volume)
        assert (cluster.broker.status()["volumes"], written(cluster)) == (1, 1)
        disk.fill()
        running.tear_down_volume(volume)
        assert cluster.broker.status()["volumes"] == 0
        assert cluster.broker.status()["tables"]["volumes"] == problem(cluster, "volumes")
        disk.free()
        wait_until(lambda: written(cluster) == 0)
        wait_until(lambda: cluster.broker.status()["tables"] == {"mounts": "ok", "volumes": "ok"})
    assert "Traceback" not in cluster.broker.log.read_text()
