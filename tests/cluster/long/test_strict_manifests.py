"""Pods of strict administrators: read-only root filesystems, groups, labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cluster import driver, server
from tests.cluster.pods import applied, wait_until_it_says
from tests.kubernetes.objects import containers, the

if TYPE_CHECKING:
    from tests.cluster.node import ClusterNode

pytestmark = [pytest.mark.e2e, pytest.mark.long]

GROUP, OTHER_GROUP = 2000, 3000


@pytest.mark.parametrize("name", ["eager"])
def test_a_pod_with_all_that_a_security_context_has(node: ClusterNode, name: str) -> None:
    objects = driver.example(name)
    pod_object = the("Pod", objects)
    pod_object["spec"]["securityContext"] |= {
        "fsGroup": GROUP,
        "supplementalGroups": [OTHER_GROUP],
        # This machine has no SELinux: that the field does no harm is all that is shown.
        "seLinuxOptions": {"level": "s0:c123,c456"},
    }
    for each in containers(pod_object):
        each["securityContext"] |= {"readOnlyRootFilesystem": True, "runAsNonRoot": True}
    with applied(node, objects) as pod:
        pod.wait_until_ready()
        assert {str(GROUP), str(OTHER_GROUP)} <= set(pod.execute("id", "-G").stdout.split())
        assert "Read-only file system" in pod.execute("touch", "/file", check=False).stderr
        wait_until_it_says(pod, ["cat", "/data/hello"], "hello\n")
        pod.execute("sh", "-c", f"echo {name} > /data/written")
        assert server.execute(node, "cat written; rm written") == f"{name}\n"
        pod.kill("sshfs")
        pod.wait_until_restarted("sshfs", 1)
        wait_until_it_says(pod, ["cat", "/data/hello"], "hello\n")
