"""The newest release of Kubernetes, whose kubelet takes over the pods of an older one while they use their volumes.

`make test-cluster KUBERNETES=newest` runs the tests of every change there.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import pytest

from tests.callers.conftest import or_not_run
from tests.cluster import binaries, driver
from tests.cluster.conftest import begun, nothing_left
from tests.cluster.long import writers
from tests.cluster.long.writers import Watched, reads
from tests.cluster.pods import applied, wait_until_it_says
from tests.e2e.conftest import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.long.conftest import Figure
    from tests.cluster.node import ClusterNode
    from tests.cluster.pods import Pod

pytestmark = [pytest.mark.e2e, pytest.mark.long]

KINDS = sorted(writers.USES)


@pytest.fixture(scope="module")
def older_kubelet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterNode]:
    """A node of the newest release, as it is between the upgrades of its control plane and of its kubelet."""
    with or_not_run():
        binaries.kubernetes(binaries.NEWEST)
    directory = tmp_path_factory.mktemp("newest") / "node"
    with begun(directory, binaries.NEWEST, kubelet=binaries.KUBERNETES) as node:
        yield node


def test_kubelet_is_upgraded_under_pods_that_use_their_volumes(older_kubelet: ClusterNode, figure: Figure) -> None:
    node = older_kubelet
    with nothing_left(node), contextlib.ExitStack() as stack:
        pods = [stack.enter_context(applied(node, writers.example(name))) for name in KINDS]
        for pod in pods:
            pod.wait_until_ready()
        watched = [Watched(pod) for pod in pods]
        before = {each.name: each.counts() for each in watched}
        assert kubelet(node) == f"v{binaries.KUBERNETES.version}"
        upgraded = time.monotonic()
        node.upgrade_kubelet()
        wait_until(lambda: kubelet(node) == f"v{binaries.NEWEST.version}", 60)
        figure("from", binaries.KUBERNETES.version)
        figure("to", binaries.NEWEST.version)
        figure("seconds until the new kubelet was ready", round(time.monotonic() - upgraded))
        after = [each.goes_on() for each in watched]
        figure("turns meanwhile", sum(each.turns for each in after) - sum(each.turns for each in before.values()))
        figure("failed", sum(each.failed for each in after))
        assert {each.name: each.errors() for each in watched} == dict.fromkeys(before, "")
        # The new kubelet has taken over what the old one has begun: it restarts the programs, and none by itself.
        assert {pod.name: restarts(pod) for pod in pods} == dict.fromkeys(before, (0, 0))
        for pod in pods:
            pod.kill("sshfs")
        for pod, each in zip(pods, watched, strict=True):
            pod.wait_until_restarted("sshfs", 1)
            failed = each.recovers()
            assert each.goes_on().failed == failed
            assert restarts(pod) == (0, 1)


@pytest.mark.parametrize("name", KINDS)
def test_an_example_on_the_newest_release(newest: ClusterNode, name: str) -> None:
    with nothing_left(newest), applied(newest, driver.example(name)) as pod:
        pod.wait_until_ready()
        wait_until_it_says(pod, *reads(name))


@pytest.fixture
def newest(older_kubelet: ClusterNode) -> ClusterNode:
    """The same node after both upgrades, whichever tests were run before."""
    if kubelet(older_kubelet) != f"v{binaries.NEWEST.version}":
        older_kubelet.upgrade_kubelet()
    return older_kubelet


def kubelet(node: ClusterNode) -> str:
    """Return the version that kubelet has told the API server."""
    version = "jsonpath={.status.nodeInfo.kubeletVersion}"
    return node.kubectl("get", "node", node.machine.name, f"--output={version}").stdout


def restarts(pod: Pod) -> tuple[int, int]:
    """Return how often the app and its FUSE program were restarted."""
    return pod.status("app")["restartCount"], pod.status("sshfs")["restartCount"]
