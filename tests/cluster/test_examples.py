"""The examples of packaging/kubernetes on a real node, whose API server admits no pod that isn't `restricted`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cluster import driver, server
from tests.cluster.pods import applied

if TYPE_CHECKING:
    from tests.cluster.node import ClusterNode

pytestmark = [pytest.mark.e2e, pytest.mark.long]

READ_AND_WRITE = ("sshfs", "eager", "fs-group", "persistent", "two-containers")


@pytest.mark.parametrize("name", READ_AND_WRITE)
def test_the_other_container_reads_and_writes(node: ClusterNode, name: str) -> None:
    with applied(node, driver.example(name)) as pod:
        pod.wait_until_ready()
        assert pod.execute("cat", "/data/hello").stdout == "hello\n"
        pod.execute("sh", "-c", f"echo {name} > /data/written")
        assert server.execute(node, "cat written; rm written") == f"{name}\n"


def test_a_read_only_volume(node: ClusterNode) -> None:
    with applied(node, driver.example("read-only")) as pod:
        pod.wait_until_ready()
        assert pod.execute("cat", "/data/hello").stdout == "hello\n"
        written = pod.execute("sh", "-c", "echo new > /data/written", check=False)
        assert "Read-only file system" in written.stderr


def test_a_directory_of_the_volume(node: ClusterNode) -> None:
    with applied(node, driver.example("subpath")) as pod:
        pod.wait_until_ready()
        assert pod.execute("cat", "/reports/first").stdout == "first\n"
