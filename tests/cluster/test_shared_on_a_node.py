"""Shared volumes on a real node: pods read through one mount pod, and read on when it is replaced."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import yaml

from fusermount3_controller.mount_pods import ATTACHMENTS
from fusermount3_controller.rendering import TEMPLATE_LABEL
from tests.cluster import configuration, installed_controller, server, shared_volumes
from tests.cluster.pods import Pod, wait_until_it_says
from tests.cluster.shared_volumes import (
    FIRST,
    MOUNTS,
    TEMPLATE,
    device,
    items,
    mount_pods,
    name_of,
    served_mounts,
    started,
    uid_of,
    used,
    user,
    wait_for,
    wait_until,
)
from tests.lab.pace import SLOWNESS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cluster.node import ClusterNode

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.usefixtures("controlled"),
]

#: Seconds in which containers read again when a program has mounted; a mount pod ends when its last user has; and it is
#: gone, with all that belongs to it.
HEALED, ENDED, GONE = 2, 5, 10
#: Seconds in which what happened while no controller ran is made up for.
RESYNCED = 120
#: Seconds for which a pod writes on when it was told to end.
WRITES = 30

_WRITE_ON = f"""
trap 'stop=1' TERM
until [ $stop ]; do sleep 0.2 & wait $!; done
n=0 failed=0 end=$(($(date +%s) + {WRITES}))
while [ $(date +%s) -lt $end ]; do
    n=$((n + 1))
    echo $n > /data/drained && read -r m < /data/drained && [ $m = $n ] || failed=$((failed + 1))
    sleep 0.1
done
echo $n $failed > /data/drained
"""


@pytest.fixture(scope="module")
def controlled(node_of_session: ClusterNode) -> Iterator[None]:
    with shared_volumes.installed(node_of_session):
        yield


def test_pods_share_a_filesystem_if_all_that_matters_is_the_same(node: ClusterNode) -> None:
    """Three pods, of which one has another fsGroup: two mount pods."""
    with used(node, user("one", 1000), user("two", 1000), user("three", 2000)) as (one, two, three):
        assert [each.execute("cat", "/data/first").stdout for each in (one, two, three)] == ["first\n"] * 3
        assert device(one) == device(two) != device(three)
        assert len(wait_for(node, 2)) == 2
        mounts = served_mounts(node)
        assert len(mounts) == len({each.device for each in node.mounts() if each.is_fuse}) == 2
        assert sorted(len(each["borrowers"]) for each in mounts) == [1, 2]


def test_a_container_finds_the_filesystem_when_it_starts(node: ClusterNode) -> None:
    """Without a startup probe and mountPropagation, and never what is there before."""
    reads = user("reads", command="cat /data/first > /dev/termination-log && exec sleep 3600")
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
        words = ["delete", "pod", name_of(mount_pod), f"--namespace={MOUNTS}", "--force", "--grace-period=0"]
        node.kubectl(*words)
        for each in pods:
            wait_until_it_says(each, ["cat", "/data/first"], "first\n")
            assert each.status("app")["restartCount"] == 0
        (other,) = wait_for(node, 1)
        assert uid_of(other) != uid_of(mount_pod)


@pytest.fixture
def part(node: ClusterNode) -> Iterator[str]:
    """A directory of the volume, with the file `first`."""
    server.execute(node, "mkdir reports/part; cp reports/first reports/part/")
    yield "part"
    server.execute(node, "rm -r reports/part")


def mount_pod_of(node: ClusterNode, group: str) -> Pod:
    """Return the mount pod of the users with that fsGroup."""
    (attachment,) = [each for each in items(node, ATTACHMENTS) if each["spec"]["workloadFSGroup"] == group]
    return Pod(node, attachment["status"]["mountPod"]["name"], MOUNTS)


def test_containers_read_soon_after_the_program_was_killed(node: ClusterNode, part: str) -> None:
    """Their own containers run on, also one that has only a part of the volume; and others notice nothing."""
    users = [user("one", 1000), user("two", 1000, subPath=part), user("other", 2000)]
    with used(node, *users) as (one, two, other):
        wait_for(node, 2)
        program, others = mount_pod_of(node, "1000"), device(other)
        files = [each.seen("app", "/data/first") for each in (one, two)]
        (before,) = {path.stat().st_dev for path in files}
        program.kill("fuse")
        healed: dict[Path, float] = {}

        def all_healed() -> dict[Path, float] | None:
            for path in files:
                if path not in healed and reads_another(path, before):
                    healed[path] = time.time()
            return healed if len(healed) == len(files) else None

        wait_until(all_healed, program.description, 60)
        (now,) = {os.minor(path.stat().st_dev) for path in files}
        (mount,) = [each for each in served_mounts(node) if each["device"] == now]
        assert max(healed.values()) - mount["mounted_at"] <= SLOWNESS * HEALED
        assert program.status("fuse")["restartCount"] == 1
        assert [each.status("app")["restartCount"] for each in (one, two, other)] == [0, 0, 0]
        assert device(other) == others
        assert other.execute(*FIRST).stdout == "first\n"


def reads_another(path: Path, device: int) -> bool:
    """Return whether the file can be read, and is on another filesystem than that."""
    try:
        return path.stat().st_dev != device and path.read_text() == "first\n"
    except OSError:
        return False


def test_a_pod_that_writes_while_its_node_is_drained_loses_nothing(node: ClusterNode) -> None:
    """All pods are told to end at once, the mount pod, too: it waits for them, and no other one is made."""
    writes = user("writes", command=_WRITE_ON)
    writes["spec"]["terminationGracePeriodSeconds"] = 2 * WRITES
    with used(node, writes, user("reads")), ThreadPoolExecutor() as beside:
        (mount_pod,) = wait_for(node, 1)
        selector = f"--pod-selector={TEMPLATE_LABEL}={TEMPLATE}"
        words = ["drain", configuration.NAME, selector, "--force", "--delete-emptydir-data", "--timeout=120s"]
        begun = time.monotonic()
        draining = beside.submit(node.kubectl, *words)
        try:
            ended: dict[str, float] = {}
            while "mount pod" not in ended:
                found = items(node, "pods", "--all-namespaces", f"--selector={TEMPLATE_LABEL}={TEMPLATE}")
                names = {name_of(each) for each in found}
                if "writes" not in names:
                    ended.setdefault("writes", time.monotonic())
                if name_of(mount_pod) not in names:
                    ended["mount pod"] = time.monotonic()
                assert names <= {"writes", "reads", name_of(mount_pod)}
                assert time.monotonic() - begun < SLOWNESS * 4 * WRITES
            draining.result()
        finally:
            node.kubectl("uncordon", configuration.NAME)
        assert ended["writes"] - begun >= WRITES
        assert ended["mount pod"] - ended["writes"] <= SLOWNESS * ENDED
        written, failed = server.execute(node, "cat reports/drained; rm reports/drained").split()
        assert (failed, int(written) > WRITES) == ("0", True)


def test_a_mount_pod_is_gone_soon_after_its_last_user(node: ClusterNode) -> None:
    with used(node, user("only")):
        wait_for(node, 1)
        node.kubectl("delete", "pod", "only")
        wait_for(node, 0, seconds=GONE)
        wait_until(lambda: None if items(node, ATTACHMENTS) else True, lambda: "an attachment is left", GONE)
        assert served_mounts(node) == []


def test_what_ended_while_no_controller_ran_is_made_up_for(node_of_session: ClusterNode) -> None:
    node = node_of_session

    def scale(replicas: int) -> None:
        words = ["--namespace", installed_controller.NAMESPACE]
        node.kubectl(*words, "scale", installed_controller.DEPLOYMENT, f"--replicas={replicas}")

    with used(node, user("only")):
        wait_for(node, 1)
        scale(0)
        pods = ("pods", "--namespace", installed_controller.NAMESPACE)
        wait_until(lambda: None if items(node, *pods) else True, lambda: "a controller is left", 60)
        node.kubectl("delete", "pod", "only")
        assert len(mount_pods(node)) == 1
        scale(2)
        begun = time.monotonic()
        wait_for(node, 0, seconds=RESYNCED)
        assert time.monotonic() - begun < SLOWNESS * RESYNCED
        installed_controller.wait_until_ready(node)


def test_a_template_that_is_edited_takes_effect_with_the_next_pods(node: ClusterNode) -> None:
    """Whoever has the filesystem of a template as it was keeps it."""
    patch = {"spec": {"volumeStaging": {"podTemplate": {"metadata": {"annotations": {"edited": "yes"}}}}}}
    with used(node, user("before"), user("with-it")) as (before, _):
        (old,) = wait_for(node, 1)
        has = device(before)
        node.kubectl("patch", "volumetemplate", TEMPLATE, "--type=merge", f"--patch={yaml.safe_dump(patch)}")
        node.kubectl("delete", "pod", "with-it")
        assert [uid_of(each) for each in wait_for(node, 1)] == [uid_of(old)]
        (meanwhile,) = started(node, user("with-it"))
        (new,) = [each for each in wait_for(node, 2) if uid_of(each) != uid_of(old)]
        assert new["metadata"]["annotations"]["edited"] == "yes"
        assert meanwhile.execute(*FIRST).stdout == "first\n"
        try:
            (after,) = started(node, user("after"))
            assert device(after) != device(before) == has
            assert len(mount_pods(node)) == 2
        finally:
            node.kubectl("delete", "pod", "after")


def test_mount_pods_are_as_restricted_as_their_namespace_wants_and_known_to_the_autoscaler(node: ClusterNode) -> None:
    with used(node, user("only")):
        (mount_pod,) = wait_for(node, 1)
        namespace = node.kubectl("get", "namespace", MOUNTS, "--output=jsonpath={.metadata.labels}").stdout
        assert '"pod-security.kubernetes.io/enforce":"restricted"' in namespace
        assert mount_pod["metadata"]["annotations"]["cluster-autoscaler.kubernetes.io/daemonset-pod"] == "true"
        (owner,) = mount_pod["metadata"]["ownerReferences"]
        assert owner["controller"] is True


def test_a_pod_in_a_user_namespace_is_refused(node: ClusterNode) -> None:
    refused = user("refused")
    refused["spec"]["hostUsers"] = False
    tried = node.kubectl("create", "--dry-run=server", "--filename=-", input=yaml.safe_dump(refused), check=False)
    assert "spec.hostUsers: a shared volume is of another user namespace" in tried.stderr
