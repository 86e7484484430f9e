"""Test what docs/kubernetes.md says about versions."""

from __future__ import annotations

from tests.cluster import binaries
from tests.e2e.documented import PAGES


def test_the_versions_are_those_of_the_tests() -> None:
    page = " ".join(PAGES["kubernetes.md"].read_text().split())
    assert f" node with Kubernetes {binaries.KUBERNETES.version}, " in page
    assert f": Kubernetes {binaries.NEWEST.version}, crun, " in page
