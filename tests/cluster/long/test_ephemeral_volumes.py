"""Generic ephemeral volumes: the cluster makes a claim for each pod, from a template in it.

Without a provisioner, the claim gets the PersistentVolume that the administrator has made for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster import server
from tests.cluster.long import writers
from tests.cluster.long.writers import Watched
from tests.cluster.pods import applied, wait_until_it_says
from tests.e2e.conftest import wait_until
from tests.kubernetes.objects import the

if TYPE_CHECKING:
    from tests.cluster.node import ClusterNode

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def with_a_template() -> tuple[list[dict[str, Any]], str]:
    """Return the example `persistent`, with its claim as the template of an ephemeral volume; and the claim's name."""
    objects = writers.example("persistent")
    claim, pod = the("PersistentVolumeClaim", objects), the("Pod", objects)
    (volume,) = [each for each in pod["spec"]["volumes"] if "persistentVolumeClaim" in each]
    del volume["persistentVolumeClaim"]
    volume["ephemeral"] = {"volumeClaimTemplate": {"spec": claim["spec"]}}
    name = f"{pod['metadata']['name']}-{volume['name']}"
    persistent = the("PersistentVolume", objects)
    persistent["spec"]["claimRef"]["name"] = name
    return [persistent, pod], name


def test_a_generic_ephemeral_volume(node: ClusterNode) -> None:
    objects, claim = with_a_template()
    with applied(node, objects) as pod:
        pod.wait_until_ready()
        wait_until_it_says(pod, ["cat", "/data/hello"], "hello\n")
        pod.execute("sh", "-c", "echo written > /data/written")
        assert server.execute(node, "cat written; rm written") == "written\n"
        watched = Watched(pod)
        pod.kill("sshfs")
        pod.wait_until_restarted("sshfs", 1)
        failed = watched.recovers()
        assert watched.goes_on().failed == failed
        node.kubectl("delete", "pod", pod.name)
        # The claim is the pod's, and goes with it.
        wait_until(lambda: not node.kubectl("get", "pvc", claim, "--ignore-not-found").stdout, 60)
