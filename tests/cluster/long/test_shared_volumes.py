"""Shared volumes on a real node: many pods at once, mount pods that the node ends, upgrades and a reboot."""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.cluster import driver, installed_controller, shared_volumes
from tests.cluster.long.test_oom import ENDED, LIMIT, USE_MEMORY
from tests.cluster.long.writers import Watched, use_all_the_time
from tests.cluster.pods import Pod
from tests.cluster.shared_volumes import (
    MOUNTS,
    TEMPLATE,
    device,
    items,
    name_of,
    served_mounts,
    uid_of,
    used,
    user,
    wait_for,
)
from tests.e2e.conftest import wait_until
from tests.lab.pace import SLOWNESS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.long.conftest import Figure
    from tests.cluster.node import ClusterNode
    from tests.kubernetes.objects import Object

pytestmark = [pytest.mark.e2e, pytest.mark.long]

STARTS, AT_ONCE = int(os.environ.get("FUSERMOUNT3PROXY_TEST_STARTS", "100")), 10
"""How many containers start on a shared volume, and how many of them wait for one new mount pod."""
BORROWERS = 20
"""Pods that use one mount pod while the driver ends, and the node."""
SANDBOXES = "/run/containerd/io.containerd.grpc.v1.cri/sandboxes"
"""Where containerd has what the containers of a pod share, such as /dev/shm."""
READS = "read -r m < /data/first && [ $m = first ]"
REBOOTED = 600
"""Seconds in which all of them have come back on a busy machine."""
REPLACED = 30
"""Seconds that a program has to end when another one takes its place."""


@pytest.fixture(scope="module", autouse=True)
def _installed(node_of_session: ClusterNode) -> Iterator[None]:
    with shared_volumes.installed(node_of_session):
        yield


def reader(name: str, of_template: str = TEMPLATE) -> Object:
    """Return a pod that reads its volume all the time."""
    result = user(name, of_template=of_template)
    use_all_the_time(result, READS)
    return result


def test_the_first_look_of_a_container_is_at_the_filesystem(node: ClusterNode, figure: Figure) -> None:
    """Without a startup probe and mountPropagation; and each time, the mount pod has only just been made."""
    spec = user("unused", command="cat /data/first")["spec"]
    spec["restartPolicy"] = "Never"
    job = {"completions": AT_ONCE, "parallelism": AT_ONCE, "backoffLimit": 0, "template": {"spec": spec}}
    seconds = []
    for turn in range(STARTS // AT_ONCE):
        name = f"starts-{turn}"
        manifest = yaml.safe_dump({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": job})
        begun = time.monotonic()
        node.kubectl("create", "--filename=-", input=manifest)
        try:
            waited = node.kubectl("wait", "--for=condition=Complete", f"job/{name}", "--timeout=180s", check=False)
            assert waited.returncode == 0, node.kubectl("describe", "pods", f"--selector=job-name={name}").stdout
            seconds.append(time.monotonic() - begun)
        finally:
            node.kubectl("delete", "job", name, "--cascade=foreground", "--timeout=120s")
        wait_for(node, 0)
    figure("containers that read at their first look", STARTS)
    figure(f"seconds until {AT_ONCE} pods had ended, at most", round(max(seconds)))


@contextlib.contextmanager
def with_template(node: ClusterNode, manifest: Object) -> Iterator[None]:
    node.kubectl("create", "--filename=-", input=yaml.safe_dump(manifest))
    try:
        yield
    finally:
        node.kubectl("delete", "volumetemplate", name_of(manifest))


def test_a_mount_pod_is_evicted(node: ClusterNode, figure: Figure) -> None:
    """Another one takes its place, and containers read again."""
    evicted = shared_volumes.template("evicted")
    spec = evicted["spec"]["volumeStaging"]["podTemplate"]["spec"]
    spec["volumes"].append({"name": "scratch", "emptyDir": {"sizeLimit": "1Mi"}})
    spec["containers"][0]["volumeMounts"].append({"name": "scratch", "mountPath": "/scratch"})
    with with_template(node, evicted), used(node, reader("reads", "evicted")) as (pod,):
        watched = Watched(pod)
        mount_pod = wait_for(node, 1)
        program = Pod(node, name_of(mount_pod[0]), MOUNTS)
        fill = "dd if=/dev/zero of=/scratch/file bs=1M count=4"
        program.execute("sh", "-c", fill, container="fuse")
        failed = watched.recovers()
        wait_for(node, 1, beside=mount_pod)
        figure("turns that failed meanwhile", failed)
        assert watched.goes_on().failed == failed
        assert pod.status("app")["restartCount"] == 0


def test_the_memory_of_a_mount_pod_is_used_up(node: ClusterNode, figure: Figure) -> None:
    """kubelet starts its program again, and containers read again."""
    memory = {"memory": LIMIT, "cpu": "10m"}
    tight = shared_volumes.template("tight", resources={"requests": memory, "limits": {"memory": LIMIT}})
    with with_template(node, tight), used(node, reader("reads", "tight")) as (pod,):
        watched = Watched(pod)
        (mount_pod,) = wait_for(node, 1)
        program = Pod(node, name_of(mount_pod), MOUNTS)
        program.execute("sh", "-c", USE_MEMORY, container="fuse", check=False)
        killed = time.monotonic()
        ended = shared_volumes.wait_until(lambda: how_it_ended(program), program.description, 60)
        # What a program has had in its own memory went with it; the file is in that of the pod, which is as limited.
        (file,) = node.seen(SANDBOXES).glob("*/shm/file")
        file.unlink()
        program.wait_until_restarted("fuse", 1, 120)
        figure("the program ended with", f"{ended['reason']}, status {ended['exitCode']}")
        assert ended["exitCode"] in ENDED
        failed = watched.recovers()
        figure("seconds until the volume worked again", round(time.monotonic() - killed))
        figure("turns that failed meanwhile", failed)
        assert watched.goes_on().failed == failed
        assert pod.status("app")["restartCount"] == 0


def how_it_ended(program: Pod) -> Object | None:
    """Return what is said of the end of the program, as soon as it has ended."""
    status = program.status("fuse")
    states = (status["state"], status["lastState"])
    return next((each["terminated"] for each in states if "terminated" in each), None)


def test_a_template_is_replaced_under_a_pod_that_reads(node: ClusterNode, figure: Figure) -> None:
    replaced = shared_volumes.template("replaced")
    replaced["spec"]["upgrade"] = "Replace"
    patch = {"spec": {"volumeStaging": {"podTemplate": {"metadata": {"annotations": {"edited": "yes"}}}}}}
    with with_template(node, replaced), used(node, reader("reads", "replaced")) as (pod,):
        watched, had = Watched(pod), device(pod)
        before = wait_for(node, 1)
        node.kubectl("patch", "volumetemplate", "replaced", "--type=merge", f"--patch={yaml.safe_dump(patch)}")
        (after,) = wait_for(node, 1, beside=before, seconds=4 * REPLACED)
        assert after["metadata"]["annotations"]["edited"] == "yes"
        wait_until(lambda: device(pod) != had, 10)
        failed = watched.goes_on().failed
        figure("turns that failed meanwhile", failed)
        # A turn takes a tenth of a second, and as long as the two programs follow each other.
        assert failed <= SLOWNESS * 20
        assert watched.goes_on().failed == failed
        assert pod.status("app")["restartCount"] == 0


def test_pods_of_one_mount_pod_read_on_while_the_driver_is_restarted_and_after_a_reboot(
    node_of_session: ClusterNode, figure: Figure
) -> None:
    node = node_of_session
    with used(node, *(reader(f"reads-{number}") for number in range(BORROWERS))) as pods:
        watched = [Watched(pod) for pod in pods]
        wait_for(node, 1)
        (has,) = {device(pod) for pod in pods}
        before = sum(each.counts().turns for each in watched)
        restart_driver(node)
        after = [each.goes_on() for each in watched]
        figure("pods of the mount pod", BORROWERS)
        figure("turns while the driver was restarted", sum(each.turns for each in after) - before)
        figure("failed", sum(each.failed for each in after))
        assert {each.name: each.errors() for each in watched} == {each.name: "" for each in watched}
        assert {device(pod) for pod in pods} == {has}
        wait_for_borrowers(node)

        def forget() -> None:
            for each in watched:
                each.forget()

        node.reboot(forget)
        begun = time.monotonic()
        for each in watched:
            each.goes_on(beyond=0, seconds=REBOOTED)
        figure("seconds until all read again after the reboot", round(time.monotonic() - begun))
        for pod in pods:
            pod.wait_until_ready()
        assert len({device(pod) for pod in pods}) == 1
        wait_for_borrowers(node)
        wait_for(node, 1)
        installed_controller.wait_until_ready(node)
    wait_until(lambda: not json.loads(driver.broker(node, "mounts", "--json")))


def restart_driver(node: ClusterNode) -> None:
    """Have another pod take the place of the driver's, as when it is upgraded."""
    of_driver = ("--namespace", driver.NAMESPACE)
    before = {uid_of(each) for each in items(node, "pods", *of_driver)}
    node.kubectl(*of_driver, "rollout", "restart", driver.DAEMONSET)
    node.kubectl(*of_driver, "rollout", "status", driver.DAEMONSET, "--timeout=180s")
    assert not before & {uid_of(each) for each in items(node, "pods", *of_driver)}


def wait_for_borrowers(node: ClusterNode) -> None:
    """Return when the broker says that all pods use one filesystem, and there is no other one."""
    wait_until(lambda: [len(each["borrowers"]) for each in served_mounts(node)] == [BORROWERS], 60)
