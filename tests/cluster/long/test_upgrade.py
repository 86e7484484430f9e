"""The driver is upgraded from the last release to this working tree, under pods that use their volumes all the time.

The pods' images have that release's proxy, as they would.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster import driver, images, released
from tests.cluster.commands import execute
from tests.cluster.long import writers
from tests.cluster.long.writers import Watched
from tests.cluster.pods import applied
from tests.e2e.documented import block
from tests.kubernetes.objects import containers, the
from tests.lab.images import SSHFS, image_tag

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.long.conftest import Figure
    from tests.cluster.node import ClusterNode

pytestmark = [pytest.mark.e2e, pytest.mark.long]

OLD_SSHFS = "localhost/released-sshfs:1"

KINDS = sorted(writers.USES.keys() - {"user-namespace"})
"""The examples. With `hostUsers: false`, containerd started no container on a volume of that release."""


def test_volumes_of_every_kind_are_used_while_the_driver_is_upgraded(last_release: ClusterNode, figure: Figure) -> None:
    node = last_release
    with contextlib.ExitStack() as stack:
        pods = [stack.enter_context(applied(node, with_its_proxy(name))) for name in KINDS]
        for pod in pods:
            pod.wait_until_ready()
        watched = [Watched(pod) for pod in pods]
        before = {each.name: each.counts() for each in watched}
        assert {each.failed for each in before.values()} == {0}

        assert image_of_the_broker(node) != images.BROKER
        begun = time.monotonic()
        driver.install(node)
        assert image_of_the_broker(node) == images.BROKER
        figure("seconds until the driver of this tree was ready", round(time.monotonic() - begun))
        after = [each.goes_on() for each in watched]
        figure("turns meanwhile", sum(each.turns for each in after) - sum(each.turns for each in before.values()))
        figure("failed", sum(each.failed for each in after))
        assert {each.name: each.errors() for each in watched} == dict.fromkeys(before, "")

        # What the release has mounted is the new broker's: it knows it, and mounts again when the program has ended.
        mounts = json.loads(driver.broker(node, "mounts", "--json"))
        assert [each["state"] for each in mounts] == ["live"] * len(KINDS)
        for pod in pods:
            pod.kill("sshfs")
        for pod, each in zip(pods, watched, strict=True):
            pod.wait_until_restarted("sshfs", 1)
            failed = each.recovers()
            assert each.goes_on().failed == failed
            assert pod.status("app")["restartCount"] == 0
    with applied(node, writers.example("sshfs")) as pod:
        pod.wait_until_ready()
        assert Watched(pod).goes_on().failed == 0


@pytest.fixture
def last_release(without_driver: ClusterNode) -> Iterator[ClusterNode]:
    """The node, with the driver of the last release."""
    node = without_driver
    directory = released.release()
    images.load_one(node, OLD_SSHFS, images.with_proxy(image_tag(SSHFS), {}, directory / "fusermount3-proxy"))
    shutil.rmtree(node.seen(driver.STATE))  # what this tree's broker has written down
    old, new = f"{images.BROKER}-released", f"{images.BROKER}-new"
    images.name_also(node, images.BROKER, new)
    images.load_archive(node, directory / "fusermount3-broker.tar")
    images.name_also(node, images.BROKER, old)
    images.name_also(node, new, images.BROKER)
    with released.kustomization(directory, old) as overlay:
        execute(node, block(driver.PAGE, "kubectl apply --kustomize").text, overlay)
    yield node
    driver.remove(node)
    images.remove(node, OLD_SSHFS, old, new)


def with_its_proxy(name: str) -> list[dict[str, Any]]:
    """Return the objects of an example with `writers`, whose FUSE container has the proxy of the last release."""
    objects = writers.example(name)
    (sidecar,) = [each for each in containers(the("Pod", objects)) if each["name"] == "sshfs"]
    sidecar["image"] = OLD_SSHFS
    return objects


def image_of_the_broker(node: ClusterNode) -> str:
    """Return the name of the image that the driver's only pod runs."""
    (pod,) = json.loads(node.kubectl("--namespace", driver.NAMESPACE, "get", "pods", "--output=json").stdout)["items"]
    (container,) = [each for each in pod["spec"]["containers"] if each["name"] == "broker"]
    return str(container["image"])
