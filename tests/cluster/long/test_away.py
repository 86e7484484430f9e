"""The API server and etcd are away for a while; the node's kubelet and the driver go on by themselves."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import pytest

from tests.cluster.long import writers
from tests.cluster.long.conftest import AWAY
from tests.cluster.long.writers import Watched
from tests.cluster.pods import applied

if TYPE_CHECKING:
    from tests.cluster.long.conftest import Figure
    from tests.cluster.node import ClusterNode

pytestmark = [pytest.mark.e2e, pytest.mark.long]

CONTROL_PLANE = ("kube-apiserver", "etcd")


def test_volumes_go_on_while_the_api_server_and_etcd_are_away(node: ClusterNode, figure: Figure) -> None:
    with contextlib.ExitStack() as stack:
        pods = [stack.enter_context(applied(node, writers.example(name))) for name in writers.USES]
        for pod in pods:
            pod.wait_until_ready()
        watched = [Watched(pod) for pod in pods]
        (crashing,) = [pod for pod in pods if pod.name == "fs-group"]
        program = crashing.status("sshfs")["containerID"].partition("://")[2]
        node.end(*CONTROL_PLANE)
        try:
            begun, before = time.monotonic(), sum(each.counts().turns for each in watched)
            (its_counts,) = [each for each in watched if each.name == crashing.name]
            # kubelet restarts a program without being told by anybody, and the driver mounts it again.
            node.run(["ctr", "--namespace", "k8s.io", "tasks", "kill", "--signal", "SIGKILL", program])
            failed_at_the_crash = its_counts.recovers()
            while time.monotonic() < begun + AWAY:
                for each in watched:
                    each.goes_on(seconds=10)
                time.sleep(1)
            after = [each.goes_on() for each in watched]
        finally:
            node.begin(*reversed(CONTROL_PLANE))
        others = [each for each in watched if each is not its_counts]
        assert [each.name for each in others if each.counts().failed] == []
        assert its_counts.counts().failed == failed_at_the_crash
        figure("seconds away", round(time.monotonic() - begun))
        figure("turns meanwhile", sum(each.turns for each in after) - before)
        figure("failed", sum(each.counts().failed for each in others))
        for pod in pods:
            pod.wait_until_ready()
            assert pod.status("app")["restartCount"] == 0
        assert crashing.status("sshfs")["restartCount"] == 1
    with applied(node, writers.example("sshfs")) as pod:
        pod.wait_until_ready()
        assert Watched(pod).goes_on().failed == 0
