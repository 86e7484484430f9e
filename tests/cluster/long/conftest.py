"""What the tests of this directory have in common: how long the control plane is away, and what the report says."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cluster.node import ClusterNode

AWAY = float(os.environ.get("FUSERMOUNT3PROXY_TEST_AWAY", "30"))
"""Seconds for which the control plane is away; `make test-cluster-long AWAY=120` sets it."""


class Figure(Protocol):
    """Record a figure for the report."""

    def __call__(self, name: str, value: object, /) -> None: ...


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Figure:
    """The function that records what a test has measured; the report has it beside the test's result."""
    return record_property


@pytest.fixture(autouse=True, scope="session")
def _versions(node_of_session: ClusterNode, record_testsuite_property: Callable[[str, object], None]) -> None:
    """Record what the report is about."""
    for name, command in {
        "containerd": ["containerd", "--version"],
        "runc": ["runc", "--version"],
        "crun": ["crun", "--version"],
    }.items():
        words = node_of_session.run(command).stdout.split("\n")[0].split()
        record_testsuite_property(name, next(word for word in words if word[:1].isdigit()))
    record_testsuite_property("Kubernetes", node_of_session.release.version)
    record_testsuite_property("Linux", platform.release())
    record_testsuite_property("processors", os.cpu_count())
