"""Pods with `hostUsers: false`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cluster import driver
from tests.cluster.pods import applied
from tests.e2e.conftest import wait_until

if TYPE_CHECKING:
    from tests.cluster.node import ClusterNode

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def test_the_example_reads_and_writes(node: ClusterNode) -> None:
    with applied(node, driver.example("user-namespace")) as pod:
        pod.wait_until_ready(60)
        assert pod.execute("cat", "/data/hello").stdout == "hello\n"
        pod.execute("sh", "-c", "echo new > /data/written && rm /data/written")


def test_a_container_can_not_start_while_the_filesystem_is_mounted(node: ClusterNode) -> None:
    """The kernel makes no idmapped mount of such a filesystem, as docs/kubernetes.md says."""
    with applied(node, driver.example("user-namespace")) as pod:
        pod.wait_until_ready(60)
        pod.kill("app")
        wait_until(lambda: "MOUNT_ATTR_IDMAP" in pod.description(), 60)
        assert "running" not in pod.status("app")["state"]
