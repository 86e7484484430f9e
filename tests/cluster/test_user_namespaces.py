"""Pods with `hostUsers: false`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cluster import driver
from tests.cluster.pods import applied

if TYPE_CHECKING:
    from tests.cluster.node import ClusterNode

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def test_the_example_reads_and_writes(node: ClusterNode) -> None:
    with applied(node, driver.example("user-namespace")) as pod:
        pod.wait_until_ready(60)
        assert pod.execute("cat", "/data/hello").stdout == "hello\n"
        pod.execute("sh", "-c", "echo new > /data/written && rm /data/written")
