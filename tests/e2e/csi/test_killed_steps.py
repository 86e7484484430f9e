"""Each process of the broker, and all of it, is killed at each step of publish and unpublish. Kubelet repeats its call,
and in the end everything exists once, or nothing does.

A step is a system call of the mounter's child, at which strace holds it. See test_processes for kills at any moment.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import wait_until
from tests.e2e.csi.pods import SOCKET, SOCKETS, consumer, pod
from tests.e2e.csi.test_broker_restarts import PLUGIN, end_at_once, end_supervisor
from tests.e2e.hostile import slow
from tests.lab.faults import FRONT, MOUNTER, kill
from tests.lab.manifests import EmptyDir

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.csi.conftest import RunCluster
    from tests.lab.cluster import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.long]

BROKER, SUPERVISOR = "broker", "supervisor"
PUBLISH = ["bind", "listen", "setxattr", "linkat", "unlinkat", "mkdirat", "fsmount", "move_mount"]
UNPUBLISH = ["unlinkat", "umount2"]
HELD = 0.5
"""Seconds that a step takes."""

SPEC = pod([consumer()], attributes={"mountTiming": "eager"})


@pytest.fixture
def cluster(run_cluster: RunCluster) -> Cluster:
    return run_cluster()


def end(cluster: Cluster, part: str) -> None:
    if part == BROKER:
        end_at_once(cluster)
    elif part == SUPERVISOR:
        end_supervisor(cluster)
    else:
        kill(cluster.broker, part)


parts = pytest.mark.parametrize("part", [FRONT, MOUNTER, PLUGIN, BROKER, SUPERVISOR])


@parts
@pytest.mark.parametrize("step", PUBLISH)
def test_publish(cluster: Cluster, tmp_path: Path, step: str, part: str) -> None:
    with cluster.kubelet.new_pod(SPEC) as running, ThreadPoolExecutor() as beside:
        running.set_up_volume(EmptyDir(SOCKETS))
        log = tmp_path / "strace"
        with slow(cluster.broker, step, HELD, log):
            publishing = beside.submit(running.set_up_volume, running.csi_volume())
            wait_until(lambda: f"{step}(" in log.read_text())
            end(cluster, part)
        publishing.result(60)
        # Another front or mounter makes or removes its part a moment later.
        wait_until(lambda: [each.fstype for each in cluster.node.mounts(running.target())] == ["tmpfs", "fuse"])
        sockets = running.volume_path(EmptyDir(SOCKETS))
        wait_until(lambda: [path.name for path in sockets.iterdir()] == [SOCKET])


@parts
@pytest.mark.parametrize("step", UNPUBLISH)
def test_unpublish(cluster: Cluster, tmp_path: Path, step: str, part: str) -> None:
    with cluster.kubelet.new_pod(SPEC) as running, ThreadPoolExecutor() as beside:
        running.set_up_volumes()
        log = tmp_path / "strace"
        with slow(cluster.broker, step, HELD, log):
            unpublishing = beside.submit(running.tear_down_volume, running.csi_volume())
            wait_until(lambda: f"{step}(" in log.read_text())
            end(cluster, part)
        unpublishing.result(60)
        assert [*running.volume_path(EmptyDir(SOCKETS)).iterdir()] == []
    assert cluster.broker.status()["volumes"] == 0
