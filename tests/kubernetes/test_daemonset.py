"""Test the broker in a container with the settings of the DaemonSet, run by Podman and runc."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kubernetes.daemonset import broker_of, publish_and_unpublish
from tests.lab.node import Node

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.e2e


@pytest.fixture
def node() -> Iterator[Node]:
    with Node() as node:
        node.seen(node.kubelet / "pods").mkdir()
        yield node


def test_a_volume_is_published_for_the_node(node: Node) -> None:
    with broker_of(node) as plugin:
        publish_and_unpublish(node, plugin)
