"""Test what docs/kubernetes.md says about versions."""

from __future__ import annotations

from tests.cluster import binaries
from tests.e2e.documented import PAGES


def test_the_version_is_that_of_the_node_of_the_tests() -> None:
    assert f" node with Kubernetes {binaries.version()}, " in " ".join(PAGES["kubernetes.md"].read_text().split())
