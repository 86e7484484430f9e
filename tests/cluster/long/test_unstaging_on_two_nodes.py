"""A volume moves from one node to another only after it was unstaged on the first, with two real kubelets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import yaml

from fusermount3_controller.pod_volumes import PLURAL, STAGE_LABEL
from tests.callers import s3
from tests.callers.build import image_tag
from tests.cluster import buckets, claimed_volumes, images
from tests.cluster.claimed_volumes import ENDPOINT, TEMPLATE, Cluster, claim, storage_class, user
from tests.cluster.long import test_two_nodes
from tests.cluster.pods import Pod
from tests.cluster.shared_volumes import MOUNTS

if TYPE_CHECKING:
    from tests.cluster.node import ClusterNode
    from tests.kubernetes.objects import Object

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.usefixtures("buckets_for_claims")]

second, nodes = test_two_nodes.second, test_two_nodes.nodes

OPEN = "open"
"""As soon as the server has this bucket, volumes can be unstaged."""
_UNSTAGES = {
    "name": "unstages",
    "image": "busybox:1.37",
    "command": ["sh", "-c", f"until wget -q -O - {ENDPOINT}/ | grep -q '<Name>{OPEN}<'; do sleep 0.2; done"],
    "securityContext": {"runAsUser": 1000},
}


def template() -> Object:
    manifest: Object = yaml.safe_load(TEMPLATE.read_text())
    manifest["metadata"]["name"] = "moves"
    manifest["spec"]["volumeUnstaging"] = {"podTemplate": {"spec": {"containers": [_UNSTAGES]}}}
    return manifest


def on(node: ClusterNode) -> Object:
    pod = user()
    pod["metadata"]["name"] = f"on-{node.machine.name}"
    pod["spec"]["nodeSelector"] = test_two_nodes.on(node)
    return pod


def pods_of_volumes(cluster: Cluster, selector: str) -> list[Object]:
    return cluster.items("pods", f"--namespace={MOUNTS}", f"--selector={selector}")


def test_a_volume_is_used_on_another_node_only_after_it_was_unstaged(nodes: tuple[ClusterNode, ClusterNode]) -> None:
    first, other = nodes
    cluster = Cluster(first)
    images.load_one(other, claimed_volumes.IMAGE, images.with_proxy(image_tag(buckets.DEBIANS), {}))
    of_it = storage_class("moves", parameters={"volumeTemplate": "moves", "endpoint": ENDPOINT})
    with cluster.created(template(), of_it), cluster.created(claim("moves")):
        with cluster.created(on(first)):
            app = Pod(first, f"on-{first.machine.name}")
            app.wait_until_ready()
            app.execute("sh", "-c", "echo hello > /data/hello")
        cluster.wait_until(lambda: pods_of_volumes(cluster, f"{STAGE_LABEL}=volumeUnstaging"))
        with cluster.created(on(other)):
            waits = f"waits until the volume is unstaged on {first.machine.name}"
            cluster.wait_until(lambda: any(waits in each for each in cluster.events("MountPodFailed")))
            assert pods_of_volumes(cluster, f"!{STAGE_LABEL}") == []
            (volume,) = cluster.items(PLURAL)
            assert volume["status"]["stagedNodes"] == [first.machine.name]
            s3.put(first, OPEN)
            app = Pod(first, f"on-{other.machine.name}")
            app.wait_until_ready()
            assert app.execute("cat", "/data/hello").stdout == "hello\n"
            (volume,) = cluster.items(PLURAL)
            assert volume["status"]["stagedNodes"] == [other.machine.name]
    cluster.wait_until(cluster.is_clean)
