"""As many pods with volumes as a node takes, all started at once, and again after the power was cut."""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.cluster import driver
from tests.cluster.conftest import nothing_left
from tests.cluster.left import left
from tests.cluster.node import ClusterNode
from tests.e2e.conftest import wait_until
from tests.kubernetes.objects import the

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cluster.long.conftest import Figure

pytestmark = [pytest.mark.e2e, pytest.mark.long]

OTHERS = 2
"""The driver's pod and the SSH server's."""
PODS = int(os.environ.get("FUSERMOUNT3PROXY_TEST_PODS", "110")) - OTHERS
"""How many pods with a volume there are; 110 in all is what kubelet allows (maxPods)."""
KINDS = ("sshfs", "eager")

STARTED = 1200
"""Seconds in which all have read their volumes, on two processors that have other work, too."""

_READ = """
trap 'exit 0' TERM
until [ "$(cat /data/hello)" = hello ]; do sleep 1; done
touch /counts/read
sleep infinity & wait
"""
_READ_BY_ALL = "var/lib/kubelet/pods/*/volumes/kubernetes.io~empty-dir/counts/read"


def test_all_pods_of_a_node_are_started_at_once_also_after_a_reboot(
    node_of_session: ClusterNode, figure: Figure
) -> None:
    node = node_of_session
    with nothing_left(node), deployed(node):
        started = time.monotonic()
        wait_until(lambda: len(those_that_read(node)) == PODS, STARTED)
        figure("pods with volumes", PODS)
        figure("seconds until all had read", round(time.monotonic() - started))
        check(node)
        processes = left(node).processes

        def forget() -> None:
            for each in those_that_read(node):
                each.unlink()

        node.reboot(forget)
        started = time.monotonic()
        wait_until(lambda: len(those_that_read(node)) == PODS, STARTED)
        figure("after the reboot", round(time.monotonic() - started))
        check(node)
        wait_until(lambda: not left(node).processes - processes, 120)  # kubelet's probes come and go


@contextlib.contextmanager
def deployed(node: ClusterNode) -> Iterator[None]:
    """Have `PODS` pods, of several kinds, which read a file in their volumes and then wait."""
    names = dict.fromkeys(KINDS, PODS // len(KINDS)) | {KINDS[0]: PODS - PODS // len(KINDS) * (len(KINDS) - 1)}
    manifests = yaml.safe_dump_all([deployment(name, replicas) for name, replicas in names.items()])
    node.kubectl("apply", "--filename=-", input=manifests)
    try:
        yield
    finally:
        words = ["--filename=-", "--cascade=foreground", f"--timeout={STARTED}s"]
        node.kubectl("delete", *words, input=manifests, timeout=STARTED + 60)


def deployment(name: str, replicas: int) -> dict[str, Any]:
    spec = the("Pod", driver.example(name))["spec"]
    (app,) = [each for each in spec["containers"] if each["name"] == "app"]
    app["command"] = ["sh", "-c", _READ]
    app["volumeMounts"].append({"name": "counts", "mountPath": "/counts"})
    spec["volumes"].append({"name": "counts", "emptyDir": {}})
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "progressDeadlineSeconds": STARTED,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def those_that_read(node: ClusterNode) -> list[Path]:
    """Return the files by which pods say that they have read their volume, whether or not the node is on."""
    return list(node.root.glob(_READ_BY_ALL))


def check(node: ClusterNode) -> None:
    """Check that all pods are ready, and that the broker has mounted for each of them, and nothing else."""
    wait_until(lambda: ready(node) == PODS, 120)
    mounts = json.loads(driver.broker(node, "mounts", "--json"))
    assert [each["state"] for each in mounts] == ["live"] * PODS
    assert len({each["volume"] for each in mounts}) == PODS


def ready(node: ClusterNode) -> int:
    """Return how many replicas are ready."""
    said = node.kubectl("get", "deployments", *KINDS, "--output=jsonpath={.items[*].status.readyReplicas}").stdout
    return sum(map(int, said.split()))
