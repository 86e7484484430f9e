"""Volumes in volumes on a real node: gocryptfs over s3fs, and over that gocryptfs again; they end from the top."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from fusermount3_controller.pod_volumes import PLURAL, STAGE_LABEL, VOLUME_LABEL
from tests.callers import s3
from tests.callers.build import image_tag
from tests.callers.conftest import or_not_run
from tests.callers.images import BOOKWORM
from tests.cluster import images
from tests.cluster.claimed_volumes import Cluster, claim, claim_spec, storage_class, user
from tests.cluster.pods import Pod
from tests.cluster.shared_volumes import MOUNTS
from tests.kubernetes.objects import PACKAGING, Object
from tests.lab.pace import SLOWNESS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.node import ClusterNode

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.usefixtures("buckets_for_claims", "encrypting"),
]

TEMPLATE = PACKAGING / "provisioners/gocryptfs.yaml"
LAYERS = [
    {"of_class": "s3", "name": "encrypted"},
    {"of_class": "encrypted", "name": "inner"},
    {"of_class": "twice"},
]
"""The claims, from the lowest on: each one's template uses the claim before it. The last one is that of users."""
PATIENCE = 120
"""Seconds in which all mount pods end: much less than those for which Kubernetes would wait for one that does not."""


@pytest.fixture(scope="module")
def encrypting(node_of_session: ClusterNode) -> Iterator[None]:
    node = node_of_session
    classes = [
        storage_class("encrypted", parameters={"volumeTemplate": "gocryptfs"}),
        storage_class("twice", parameters={"volumeTemplate": "gocryptfs", "claim": "inner"}),
    ]
    with or_not_run():
        image = image_tag(BOOKWORM)
    images.load_one(node, "docker.io/example/gocryptfs:1.0", images.with_proxy(image, {}))
    passphrase = ["generic", "gocryptfs", "--from-literal=passphrase=secret"]
    node.kubectl("--namespace", MOUNTS, "create", "secret", *passphrase)
    node.kubectl("create", f"--filename={TEMPLATE}")
    with Cluster(node).created(*classes):
        yield


def lower_claim(of_class: str, name: str) -> Object:
    """Return a claim of mount pods."""
    return {**claim(of_class), "metadata": {"name": name, "namespace": MOUNTS}, "spec": claim_spec(of_class)}


def mount_pods(cluster: Cluster) -> list[str]:
    """Return the names of the claims that have mount pods, in any order."""
    claims = {each["metadata"]["name"]: each["spec"]["claimRef"]["name"] for each in cluster.items("pv")}
    pods = cluster.items("pods", f"--namespace={MOUNTS}", f"--selector={VOLUME_LABEL},!{STAGE_LABEL}")
    return [claims[each["metadata"]["labels"][VOLUME_LABEL]] for each in pods]


def has_volumes(cluster: Cluster, number: int) -> bool:
    return len(cluster.items(PLURAL)) == number


@pytest.mark.parametrize("number", [2, 3])
def test_volumes_in_volumes_serve_and_end_from_the_top(cluster: Cluster, number: int) -> None:
    *lower, upper = LAYERS[:number]
    order = [*(each["name"] for each in lower), "data"]
    claims = [*(lower_claim(**each) for each in lower), claim(upper["of_class"])]
    with contextlib.ExitStack() as held:
        for below, each in enumerate(claims):
            # The pod that deletes a volume uses the claim below it, so that has to go later.
            held.callback(cluster.wait_until, partial(has_volumes, cluster, below))
            held.enter_context(cluster.created(each))
        with cluster.created(user()):
            app = Pod(cluster.node, "app")
            app.wait_until_ready()
            app.execute("sh", "-c", "echo hello > /data/secret-name")
            assert app.execute("cat", "/data/secret-name").stdout == "hello\n"
            assert sorted(mount_pods(cluster)) == sorted(order)
            (bucket,) = (
                each["metadata"]["name"] for each in cluster.items("pv") if each["spec"]["storageClassName"] == "s3"
            )
            stored = s3.get(cluster.node, f"{s3.URL}/{bucket}")
            assert "gocryptfs.conf" in stored and "secret-name" not in stored, stored
        give_up = time.monotonic() + SLOWNESS * PATIENCE
        while left := mount_pods(cluster):
            assert set(left) == set(order[: len(left)]), f"they end from the top, not so that {left} are left"
            assert time.monotonic() < give_up, cluster.description()
            time.sleep(0.2)
    cluster.wait_until(cluster.is_clean)
    assert bucket not in cluster.buckets()
