"""Volumes of which something is to be done on the node after they were used there, on a real node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import yaml

from fusermount3_controller.pod_volumes import PLURAL
from tests.cluster import configuration
from tests.cluster.claimed_volumes import ENDPOINT, TEMPLATE, Cluster, claim, storage_class, user
from tests.cluster.pods import Pod

if TYPE_CHECKING:
    from tests.kubernetes.objects import Object

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.usefixtures("buckets_for_claims"),
]

_UNSTAGES = {
    "name": "unstages",
    "image": "busybox:1.37",
    # The pods of a volume are numbered, and the first one creates it.
    "command": ["sh", "-c", 'case $POD in *-1) echo "$NODE is busy"; exit 1; esac'],
    "env": [
        {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "NODE", "value": "{{ node.metadata.name }}"},
    ],
    "securityContext": {"runAsUser": 1000},
}


def template() -> Object:
    """Return the template for buckets, with a pod that unstages; the first one fails."""
    manifest: Object = yaml.safe_load(TEMPLATE.read_text())
    manifest["metadata"]["name"] = "unstaged"
    manifest["spec"]["volumeUnstaging"] = {"podTemplate": {"spec": {"containers": [_UNSTAGES]}}}
    return manifest


def test_a_volume_is_unstaged_each_time_after_it_was_used(cluster: Cluster) -> None:
    def nodes() -> object:
        (volume,) = cluster.items(PLURAL)
        return volume["status"].get("stagedNodes")

    of_it = storage_class("unstaged", parameters={"volumeTemplate": "unstaged", "endpoint": ENDPOINT})
    with cluster.created(template(), of_it), cluster.created(claim("unstaged")):
        name = cluster.bound()["metadata"]["name"]
        assert nodes() is None
        for times in (1, 2):
            with cluster.created(user()):
                app = Pod(cluster.node, "app")
                app.wait_until_ready()
                app.execute("sh", "-c", "echo hello > /data/hello")
                assert nodes() == [configuration.NAME]
            cluster.wait_until(lambda: nodes() is None)
            told = [each for each in cluster.events("VolumeUnstaged") if name in each]
            assert len(told) == times and all(f"on {configuration.NAME}" in each for each in told)
        (failed,) = cluster.events("VolumeUnstagingFailed")
        assert failed == f"pod {name}-1: Error, status 1: {configuration.NAME} is busy; trying again in 5 s"
