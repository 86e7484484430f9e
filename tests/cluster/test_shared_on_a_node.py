"""Shared volumes on a real node: pods read through one mount pod, and read on when it is replaced."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING

import pytest
import yaml

from fusermount3_controller.mount_pods import ATTACHMENTS
from tests.cluster import installed_controller
from tests.cluster.pods import Pod, wait_until_it_says
from tests.cluster.test_webhook_on_a_node import DRIVER, pod
from tests.kubernetes.objects import TEMPLATES, Object
from tests.lab.pace import SLOWNESS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.node import ClusterNode

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.usefixtures("controlled"),
]

MOUNTS = "fuse-mounts"
TEMPLATE = next(path for path in TEMPLATES if path.stem == "sshfs")


@pytest.fixture(scope="module")
def controlled(node_of_session: ClusterNode) -> Iterator[None]:
    """The controller, the template for sshfs as one for shared volumes, and the Secret that it needs."""
    node = node_of_session
    with installed_controller.installed(node):
        secret = json.loads(node.kubectl("get", "secret", "sshfs", "--output=json").stdout)
        secret["metadata"] = {"name": "sshfs", "namespace": MOUNTS}
        node.kubectl("create", "--filename=-", input=json.dumps(secret))
        template = yaml.safe_load(TEMPLATE.read_text())
        template["metadata"]["name"] = "shared"
        template["spec"] |= {"placement": "Shared", "allowInline": True}
        node.kubectl("create", "--filename=-", input=yaml.safe_dump(template))
        yield


def user(name: str, group: int | None = None, *, read_only: bool = False) -> Object:
    """Return a pod with six lines for a shared volume."""
    attributes = {"volumeTemplate": "shared", "directory": "reports"}
    result = pod({"csi": {"driver": DRIVER, "volumeAttributes": attributes, "readOnly": read_only}})
    result["metadata"]["name"] = name
    if group is not None:
        result["spec"]["securityContext"]["fsGroup"] = group
    return result


@contextlib.contextmanager
def used(node: ClusterNode, *users: Object) -> Iterator[list[Pod]]:
    """Yield the pods when they are ready; afterwards, wait until nothing is left of them and of what served them."""
    manifests = yaml.safe_dump_all(users)
    try:
        node.kubectl("create", "--filename=-", input=manifests)
        pods = [Pod(node, each["metadata"]["name"]) for each in users]
        for each in pods:
            each.wait_until_ready()
        yield pods
    finally:
        node.kubectl("delete", "--filename=-", "--ignore-not-found", "--timeout=120s", input=manifests)
        wait_for(node, 0)
        assert not items(node, ATTACHMENTS)


def items(node: ClusterNode, *words: str) -> list[Object]:
    found: list[Object] = json.loads(node.kubectl("get", *words, "--output=json").stdout)["items"]
    return found


def wait_for(node: ClusterNode, number: int) -> list[Object]:
    """Return the mount pods when there are so many, all of which serve."""
    give_up = time.monotonic() + SLOWNESS * 120
    while True:
        found = items(node, "pods", f"--namespace={MOUNTS}")
        ready = [
            each
            for each in found
            if any(c["type"] == "Ready" and c["status"] == "True" for c in each["status"].get("conditions", []))
        ]
        if len(found) == len(ready) == number:
            return found
        assert time.monotonic() < give_up, found
        time.sleep(0.2)


def device(pod: Pod) -> str:
    return pod.execute("stat", "-c", "%d", "/data").stdout


def test_pods_share_a_filesystem_if_all_that_matters_is_the_same(node: ClusterNode) -> None:
    """Three pods, of which one has another fsGroup: two mount pods."""
    with used(node, user("one", 1000), user("two", 1000), user("three", 2000)) as (one, two, three):
        assert [each.execute("cat", "/data/first").stdout for each in (one, two, three)] == ["first\n"] * 3
        assert device(one) == device(two) != device(three)
        assert len(wait_for(node, 2)) == 2


def test_a_container_finds_the_filesystem_when_it_starts(node: ClusterNode) -> None:
    """Without a startup probe and mountPropagation, and never what is there before."""
    reads = user("reads")
    (container,) = reads["spec"]["containers"]
    container["command"] = ["sh", "-c", "cat /data/first > /dev/termination-log && exec sleep 3600"]
    with used(node, reads) as (pod,):
        assert pod.status("app")["restartCount"] == 0


def test_one_that_may_only_read_does_not_keep_others_from_writing(node: ClusterNode) -> None:
    with used(node, user("reads", read_only=True), user("writes")) as (reads, writes):
        assert device(reads) == device(writes)
        writes.execute("sh", "-c", "echo shared > /data/shared")
        assert reads.execute("cat", "/data/shared").stdout == "shared\n"
        refused = reads.execute("rm", "/data/shared", check=False)
        assert "Read-only file system" in refused.stderr
        writes.execute("rm", "/data/shared")


def test_pods_read_on_when_their_mount_pod_was_killed(node: ClusterNode) -> None:
    with used(node, user("one"), user("two")) as pods:
        (mount_pod,) = wait_for(node, 1)
        name = mount_pod["metadata"]["name"]
        words = ["delete", "pod", name, f"--namespace={MOUNTS}", "--force", "--grace-period=0"]
        node.kubectl(*words)
        for each in pods:
            wait_until_it_says(each, ["cat", "/data/first"], "first\n")
            assert each.status("app")["restartCount"] == 0
        (other,) = wait_for(node, 1)
        assert other["metadata"]["uid"] != mount_pod["metadata"]["uid"]


def test_a_pod_in_a_user_namespace_is_refused(node: ClusterNode) -> None:
    refused = user("refused")
    refused["spec"]["hostUsers"] = False
    tried = node.kubectl("create", "--dry-run=server", "--filename=-", input=yaml.safe_dump(refused), check=False)
    assert "spec.hostUsers: a shared volume is of another user namespace" in tried.stderr
