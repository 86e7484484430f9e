"""A container in a user namespace of its pod, which starts only while no filesystem is mounted on its volume."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.cluster import driver
from tests.cluster.pods import applied, wait_until_it_says
from tests.e2e.conftest import wait_until

if TYPE_CHECKING:
    from tests.cluster.node import ClusterNode

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def test_a_container_with_a_user_namespace_does_not_start_on_a_mounted_filesystem(node: ClusterNode) -> None:
    """The runtime looks at the volume first, and the filesystem refuses who is not in the pod's user namespace."""
    with applied(node, driver.example("user-namespace")) as pod:
        pod.wait_until_ready()
        wait_until_it_says(pod, ["cat", "/data/hello"], "hello\n")
        pod.kill("app")
        refused = re.compile(r"failed to stat \S+/volumes/kubernetes.io~csi/data/mount.*: permission denied")
        wait_until(lambda: refused.search(pod.description()), 120)
        assert "running" not in pod.status("app")["state"]
        assert "running" in pod.status("sshfs")["state"]
