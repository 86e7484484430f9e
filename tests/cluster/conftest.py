"""One node for all tests of this directory, and the check that a test leaves nothing on it."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.callers.conftest import or_not_run
from tests.cluster import binaries, claimed_volumes, driver, images, server
from tests.cluster.claimed_volumes import Cluster
from tests.cluster.left import left
from tests.cluster.node import ClusterNode
from tests.e2e.conftest import wait_until
from tests.lab.broker import PROXY
from tests.lab.pace import SLOWNESS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.binaries import Release

collect_ignore = ["long"]
"""What runs before each release only, with `make test-cluster-long`. pytest ignores no directory that it is told."""

PATIENCE = 30.0
"""Seconds in which kubelet has removed what is left of a pod that is deleted."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run these tests after all others: on a fresh machine, their programs are built meanwhile (`tests.prefetch`)."""
    items.sort(key=lambda item: item.path.is_relative_to(Path(__file__).parent))


@pytest.fixture(scope="session")
def node_of_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterNode]:
    """A node with the driver and an SSH server."""
    assert PROXY.exists(), f"{PROXY} is missing: run 'make static'"
    release = binaries.RELEASES[os.environ.get("FUSERMOUNT3PROXY_TEST_KUBERNETES") or binaries.USUAL]
    with or_not_run():
        binaries.kubernetes(release)
        images.driver_images()
        images.others()
    with begun(tmp_path_factory.mktemp("cluster") / "node", release) as node:
        yield node


@contextlib.contextmanager
def begun(directory: Path, release: Release, kubelet: Release | None = None) -> Iterator[ClusterNode]:
    """Yield a node of these releases, in the directory, with the driver and an SSH server."""
    with ClusterNode(directory, release, kubelet=kubelet) as node:
        images.load(node)
        # The examples promise to need no more than this.
        node.kubectl("label", "namespace", "default", "pod-security.kubernetes.io/enforce=restricted")
        driver.install(node)
        server.deploy(node)
        yield node


@contextlib.contextmanager
def nothing_left(node: ClusterNode) -> Iterator[None]:
    """Fail if anything of pods is on the node after the block that was not there before."""
    before = left(node)
    yield
    give_up = time.monotonic() + SLOWNESS * PATIENCE
    # Of what there was before, something may be gone: a process that kubelet had only just started to remove a pod.
    while any(more := left(node).beyond(before)) and time.monotonic() < give_up:
        time.sleep(0.2)
    assert not any(more), more


@pytest.fixture
def node(node_of_session: ClusterNode) -> Iterator[ClusterNode]:
    """The node. After each test, nothing of its pods may be left there: mounts, cgroups, directories, processes."""
    with nothing_left(node_of_session):
        yield node_of_session


@pytest.fixture
def without_driver(node_of_session: ClusterNode) -> Iterator[ClusterNode]:
    """The node, from which the driver is removed. Afterwards, it is installed again as it was."""
    node = node_of_session
    pods = ("--namespace", driver.NAMESPACE, "get", "pods", "--output=jsonpath={.items[*].metadata.uid}")
    pod = node.kubectl(*pods).stdout
    driver.remove(node)
    try:
        assert driver.what_there_is(node) == ""
        for path in driver.STAYS:
            assert node.seen(path).is_dir()
        wait_until(lambda: pod not in str(left(node)), PATIENCE)
        with nothing_left(node):
            yield node
    finally:
        node.kubectl("delete", "namespace", driver.NAMESPACE, "--ignore-not-found")
        driver.install(node)


@pytest.fixture(scope="module")
def buckets_for_claims(node_of_session: ClusterNode) -> Iterator[None]:
    """What `claimed_volumes.installed` has."""
    with or_not_run(), claimed_volumes.installed(node_of_session):
        yield


@pytest.fixture
def cluster(node: ClusterNode) -> Iterator[Cluster]:
    """The cluster of the node, without events. After each test, nothing may be left in it of volumes for claims."""
    result = Cluster(node)
    result.forget_events()
    yield result
    result.wait_until(result.is_clean)
