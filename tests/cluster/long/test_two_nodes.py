"""Two nodes of a cluster, each with a driver of its own.

Pods share files, move when their node is drained, and come back after a reboot; a shared volume has a mount pod on each
node. The second node is another kubelet and containerd, in namespaces of their own. Both have the same processors.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.cluster import driver, images, installed_controller, test_shared_on_a_node
from tests.cluster.left import Left, left
from tests.cluster.long import writers
from tests.cluster.long.writers import Watched
from tests.cluster.node import ClusterNode
from tests.cluster.pods import applied, wait_until_it_says
from tests.cluster.shared_volumes import device, used, user, wait_for
from tests.e2e.conftest import wait_until
from tests.kubernetes.objects import the

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.long.conftest import Figure

pytestmark = [pytest.mark.e2e, pytest.mark.long]

controlled = test_shared_on_a_node.controlled

KIND = "sshfs"
MOVED = 120
"""Seconds in which the pods of a drained node are ready on the other."""


@pytest.fixture(scope="module")
def second(node_of_session: ClusterNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterNode]:
    """Another node of the session's cluster; the DaemonSet has brought the driver there."""
    first = node_of_session
    with ClusterNode(tmp_path_factory.mktemp("second") / "node", first.release, first=first) as node:
        images.load(node)
        for archive in installed_controller.image().glob("*.tar"):
            images.load_archive(node, archive)
        rolled_out(first)
        try:
            yield node
        finally:
            first.kubectl("delete", "node", node.machine.name)
            # Nobody is there to say that the driver's pod has ended.
            gone = ["--namespace", driver.NAMESPACE, "--field-selector", f"spec.nodeName={node.machine.name}"]
            first.kubectl("delete", "pods", *gone, "--force", "--grace-period=0")
            rolled_out(first)


@pytest.fixture
def nodes(node_of_session: ClusterNode, second: ClusterNode) -> Iterator[tuple[ClusterNode, ClusterNode]]:
    """Both nodes. After each test, nothing of its pods may be left on either."""
    both = node_of_session, second
    before = [of_pods(each) for each in both]
    yield both
    wait_until(lambda: not any(any(of_pods(node).beyond(had)) for node, had in zip(both, before, strict=True)), 30)


def test_pods_on_both_nodes_see_what_the_other_has_written(nodes: tuple[ClusterNode, ClusterNode]) -> None:
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(applied(nodes[0], placed(node))) for node in nodes)
        for pod in (first, second):
            pod.wait_until_ready()
        for writes, reads in ((first, second), (second, first)):
            writes.execute("sh", "-c", f"echo by {writes.name} > /data/written")
            wait_until_it_says(reads, ["cat", "/data/written"], f"by {writes.name}\n")
        first.execute("rm", "/data/written")
        # Each node's broker has mounted for the pod there.
        assert [len(mounts(node)) for node in nodes] == [1, 1]


def test_the_pods_of_a_drained_node_go_on_on_the_other(nodes: tuple[ClusterNode, ClusterNode], figure: Figure) -> None:
    first, second = nodes
    first.kubectl("cordon", first.machine.name)
    with contextlib.ExitStack() as stack:
        stack.callback(first.kubectl, "uncordon", second.machine.name)
        stack.callback(first.kubectl, "uncordon", first.machine.name)
        stack.enter_context(deployed(first, 3))
        wait_until(lambda: ready(first) == 3, MOVED)
        assert len(mounts(second)) == 3
        first.kubectl("uncordon", first.machine.name)
        drained = time.monotonic()
        words = ["--ignore-daemonsets", "--delete-emptydir-data", f"--timeout={MOVED}s"]
        first.kubectl("drain", second.machine.name, *words)
        figure("pods with volumes", 3)
        figure("seconds until the node was drained", round(time.monotonic() - drained))
        assert mounts(second) == []
        wait_until(lambda: ready(first) == 3, MOVED)
        figure("seconds until all were ready on the other", round(time.monotonic() - drained))
        assert len(mounts(first)) == 3


def test_a_node_goes_on_while_the_other_is_off_and_comes_back(
    nodes: tuple[ClusterNode, ClusterNode], figure: Figure
) -> None:
    with contextlib.ExitStack() as stack:
        stays, comes_back = (stack.enter_context(applied(nodes[0], placed(node))) for node in nodes)
        for pod in (stays, comes_back):
            pod.wait_until_ready()
        watched = Watched(stays)
        started = time.monotonic()
        nodes[1].reboot(lambda: watched.goes_on())
        wait_until(lambda: comes_back.status("app")["restartCount"] == 1, MOVED)
        comes_back.wait_until_ready()
        wait_until_it_says(comes_back, ["cat", "/data/hello"], "hello\n")
        figure("seconds until the pod of the other worked again", round(time.monotonic() - started))
        assert watched.goes_on().failed == 0
        assert stays.status("app")["restartCount"] == 0


@pytest.mark.usefixtures("controlled")
def test_a_shared_volume_has_a_mount_pod_on_each_node_with_pods_that_use_it(
    nodes: tuple[ClusterNode, ClusterNode],
) -> None:
    users = [user(f"{name}-{node.machine.name}") for node in nodes for name in ("one", "two")]
    for each, node in zip(users, (nodes[0], nodes[0], nodes[1], nodes[1]), strict=True):
        each["spec"]["nodeSelector"] = on(node)
    with used(nodes[0], *users) as pods:
        served = wait_for(nodes[0], 2)
        assert {each["spec"]["nodeName"] for each in served} == {node.machine.name for node in nodes}
        for one, two in (pods[:2], pods[2:]):
            assert device(one) == device(two)
        pods[0].execute("sh", "-c", "echo shared > /data/shared")
        wait_until_it_says(pods[3], ["cat", "/data/shared"], "shared\n")
        pods[3].execute("rm", "/data/shared")


def placed(node: ClusterNode) -> list[dict[str, Any]]:
    """Return an example with `writers` for this node."""
    objects = writers.example(KIND)
    pod = the("Pod", objects)
    pod["metadata"]["name"] = f"on-{node.machine.name}"
    pod["spec"]["nodeSelector"] = on(node)
    (app,) = pod["spec"]["containers"]
    app["command"] = [each.replace(f"by-{KIND}", f"by-{node.machine.name}") for each in app["command"]]
    return objects


def on(node: ClusterNode) -> dict[str, str]:
    return {"kubernetes.io/hostname": node.machine.name}


@contextlib.contextmanager
def deployed(node: ClusterNode, replicas: int) -> Iterator[None]:
    """Have a Deployment of an example with `writers`."""
    pod = the("Pod", writers.example(KIND))
    labels = {"app": KIND}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": KIND},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod["spec"]},
        },
    }
    node.kubectl("apply", "--filename=-", input=yaml.safe_dump(deployment))
    try:
        yield
    finally:
        node.kubectl("delete", "deployment", KIND, "--cascade=foreground", f"--timeout={MOVED}s")


def ready(node: ClusterNode) -> int:
    return int(node.kubectl("get", "deployment", KIND, "--output=jsonpath={.status.readyReplicas}").stdout or 0)


def rolled_out(node: ClusterNode) -> None:
    """Return when each node of the cluster has a driver that is ready."""
    node.kubectl("--namespace", driver.NAMESPACE, "rollout", "status", driver.DAEMONSET, "--timeout=180s")


def mounts(node: ClusterNode) -> list[dict[str, Any]]:
    """Return what the node's own broker has mounted."""
    words = ["--namespace", driver.NAMESPACE, "get", "pods", "--field-selector", f"spec.nodeName={node.machine.name}"]
    name = node.kubectl(*words, "--output=name").stdout.strip()
    command = ["exec", name, "--container", "broker", "--", "fusermount3-broker", "mounts", "--json"]
    found: list[dict[str, Any]] = json.loads(node.kubectl("--namespace", driver.NAMESPACE, *command).stdout)
    return found


def of_pods(node: ClusterNode) -> Left:
    """Return what there is of pods on the node; what its own broker has mounted, too."""
    return left(node)._replace(broker=json.dumps(mounts(node)))
