"""A cluster for all tests, one for tests that need their own, and the check that a pod leaves nothing behind."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Protocol

import pytest

from tests.e2e.conftest import has_no_mounts, nothing_held, settle, wait_until
from tests.e2e.csi.pods import DRIVER, lab_images
from tests.lab.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.kubelet import Images, Kubelet

CONFIGURATION = "hung_seconds = 1\n[deadlines]\noperation = 3"


class RunCluster(Protocol):
    """Run a cluster until the test ends; `configuration` is the broker's, in TOML."""

    def __call__(self, configuration: str = CONFIGURATION, driver: str = DRIVER) -> Cluster: ...


@pytest.fixture(scope="session")
def images() -> Images:
    return lab_images()


@pytest.fixture(scope="session")
def session_cluster(images: Images) -> Iterator[Cluster]:
    with Cluster(DRIVER, images, CONFIGURATION) as cluster:
        settle(cluster.broker)
        yield cluster


@pytest.fixture
def cluster(session_cluster: Cluster) -> Iterator[Cluster]:
    """A cluster that tests share. After each test, its pods and all that they held in the broker must be gone."""
    before = session_cluster.kubelet.left()
    with nothing_held(session_cluster.broker):
        yield session_cluster
        assert session_cluster.kubelet.left() == before


@pytest.fixture
def kubelet(cluster: Cluster) -> Kubelet:
    return cluster.kubelet


@pytest.fixture
def run_cluster(images: Images) -> Iterator[RunCluster]:
    """Return a function that runs clusters of the test's own, in which parts of the broker may be killed."""
    clusters: list[Cluster] = []
    with contextlib.ExitStack() as stack:

        def run_cluster(configuration: str = CONFIGURATION, driver: str = DRIVER) -> Cluster:
            clusters.append(stack.enter_context(Cluster(driver, images, configuration)))
            settle(clusters[-1].broker)
            return clusters[-1]

        yield run_cluster
        for cluster in clusters:
            assert cluster.kubelet.left() == []
            wait_until(partial(has_no_mounts, cluster.broker))
            assert cluster.broker.records("internal error") == []
