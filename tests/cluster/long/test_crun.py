"""The examples with crun instead of runc, which containerd starts by the pod's RuntimeClass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.cluster import driver
from tests.cluster.long.writers import reads
from tests.cluster.pods import Pod, applied, wait_until_it_says
from tests.kubernetes.objects import the

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.node import ClusterNode

pytestmark = [pytest.mark.e2e, pytest.mark.long]

CLASS = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "crun"}, "handler": "crun"}


@pytest.fixture(autouse=True, scope="module")
def _runtime_class(node_of_session: ClusterNode) -> Iterator[None]:
    node_of_session.kubectl("apply", "--filename=-", input=yaml.safe_dump(CLASS))
    yield
    node_of_session.kubectl("delete", "runtimeclass", "crun")


def with_crun(name: str) -> list[dict[str, Any]]:
    objects = driver.example(name)
    the("Pod", objects)["spec"]["runtimeClassName"] = "crun"
    return objects


def is_of_crun(pod: Pod) -> bool:
    """Return whether crun has started the container: runc has another file in its place."""
    identity = pod.status("app")["containerID"].partition("://")[2]
    return bool(pod.node.seen(f"/run/containerd/runc/k8s.io/{identity}/status").exists())


@pytest.mark.parametrize(
    "name",
    ["sshfs", "eager", "read-only", "user-namespace"],
)
def test_an_example_with_crun(node: ClusterNode, name: str) -> None:
    with applied(node, with_crun(name)) as pod:
        pod.wait_until_ready()
        assert is_of_crun(pod)
        wait_until_it_says(pod, *reads(name))
