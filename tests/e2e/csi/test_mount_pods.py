"""Mount pods: one FUSE program for all pods of a node that use a volume of a template.

There is no controller here: the tests write the mount pod that it would make.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from fusermount3_broker.messages.sharing_key import sharing_key
from tests.e2e.conftest import wait_until
from tests.e2e.csi.conftest import CONFIGURATION
from tests.e2e.csi.pods import DATA, OWN_MOUNTPOINT, consumer, kill, pod, read, serve, starter, wait_for_volume
from tests.e2e.csi.test_broker_restarts import end_at_once, restart
from tests.e2e.csi.test_recovery import GONE, WHEN_LET, go, has_tombstone
from tests.lab.csi import CsiError
from tests.lab.faults import FRONT, MOUNTER
from tests.lab.faults import kill as kill_parts
from tests.lab.kubelet import PodFailed
from tests.lab.manifests import CsiVolume

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from subprocess import CompletedProcess

    from tests.e2e.csi.conftest import RunCluster
    from tests.lab.cluster import Cluster
    from tests.lab.csi import Plugin
    from tests.lab.kubelet import Kubelet, Pod
    from tests.lab.manifests import Pod as Spec

pytestmark = [pytest.mark.e2e, pytest.mark.long]

#: The namespace of mount pods and that of the other pods.
TRUSTED, OWN = "fuse-mounts", "shop"
TEMPLATE = {"volumeTemplate": "s3", "bucket": "photos"}
KEY = sharing_key("", TEMPLATE)


def mount_pod(command: str = serve(), *, namespace: str = TRUSTED, key: str = KEY, **spec: Any) -> Spec:
    """A pod whose program serves all volumes of that key."""
    made = pod([starter(command)], attributes={"share": key}, **spec)
    return replace(made, name="mount-pod", namespace=namespace)


def workload(*names: str, read_only: bool = False, mount: Mapping[str, object] | None = None) -> Spec:
    """A pod of which these containers use a volume of the template, without mountPropagation; `mount` as for them."""
    containers = [consumer(name, propagation="None", mount=mount) for name in names or ["consumer"]]
    made = pod(containers, attributes=TEMPLATE, read_only=read_only)
    return replace(made, namespace=OWN, volumes=tuple(each for each in made.volumes if isinstance(each, CsiVolume)))


def device(running: Pod, container: str = "consumer") -> str:
    """Return the device number of the FUSE filesystem that a container sees."""
    return running[container].fuse_mounts(DATA)[-1].device


def reads(running: Pod, container: str = "consumer", file: str = "hello") -> bool:
    running.check_loop()
    return running[container].exec(["cat", f"{DATA}/{file}"], check=False).stdout == "hello\n"


def publish(plugin: Plugin, running: Pod, patience: float) -> CsiError:
    """Return the error of a call of NodePublishVolume that is given up after so many seconds."""
    request = running.publish_request(running.csi_volume())
    running.target().parent.mkdir(mode=0o750, parents=True, exist_ok=True)
    with pytest.raises(CsiError) as failed:
        plugin.publish(request, patience)
    return failed.value


def unpublish(running: Pod) -> None:
    running.kubelet.plugin.unpublish(running.handle(running.csi_volume()), running.target())


@pytest.fixture
def cluster(run_cluster: RunCluster) -> Cluster:
    """A cluster whose broker looks for dead mounts, as it does unless it is configured otherwise."""
    made = run_cluster(f"dead_mounts_seconds = 2\n{CONFIGURATION}")
    made.kubelet.binds_as_containerd = True
    return made


def test_pods_have_one_filesystem_and_each_its_own_rights(kubelet: Kubelet) -> None:
    """Their containers start when the filesystem is there, so they need no mountPropagation; and it sees who reads."""
    with (
        kubelet.pod(mount_pod(serve("whoamifs"))) as serving,
        kubelet.pod(workload()) as one,
        kubelet.pod(workload(read_only=True)) as other,
    ):
        assert device(one) == device(other) == kubelet.node.mounts(serving.target())[-1].device
        write = ["sh", "-c", f"echo hello > {DATA}/files/new"]
        assert one["consumer"].exec(write).returncode == 0
        assert "Read-only file system" in other["consumer"].exec(write, check=False).stderr
        assert read(other, file="files/new") == "hello\n"
        for running in (one, other):
            said = running["consumer"].exec(["head", "-n1", f"{DATA}/whoami"]).stdout
            assert int(said.partition("pid=")[2]) > 0, said
        with contextlib.ExitStack() as held:
            pods = [held.enter_context(kubelet.pod(workload())) for _ in range(3)]
            assert {device(each) for each in pods} == {device(one)}
        assert read(one, file="files/new") == "hello\n"


def test_a_pod_starts_when_the_program_of_its_mount_pod_answers(kubelet: Kubelet) -> None:
    with kubelet.new_pod(workload()) as running, ThreadPoolExecutor() as beside:
        starting = beside.submit(running.set_up)
        time.sleep(2)
        assert not starting.done()
        with kubelet.pod(mount_pod(f"sleep 1; {serve()}")):
            starting.result()
            assert read(running) == "hello\n"
            assert [call.error for call in running.calls][:1] == [None], "kubelet has asked once"
            running.tear_down()


def test_kubelet_is_told_why_a_pod_does_not_start(kubelet: Kubelet) -> None:
    with kubelet.new_pod(workload()) as running:
        error = publish(kubelet.plugin, running, 70)
        assert error.code == grpc.StatusCode.UNAVAILABLE
        assert error.text.startswith("its mount pod is not ready: none on this node offers the volume")
        assert kubelet.node.mounts(running.directory) == []
        assert not running.target().exists()


@pytest.mark.parametrize("mount", [{}, {"subPath": "files"}], ids=["whole", "part"])
def test_running_containers_read_again_when_the_program_is_back(cluster: Cluster, mount: dict[str, str]) -> None:
    kubelet = cluster.kubelet
    with kubelet.pod(mount_pod(serve("whoamifs"))) as serving, kubelet.pod(workload("a", "b", mount=mount)) as running:
        started = [running[name].pid for name in ("a", "b")]
        for restarts in (1, 2):
            kill(serving)
            serving.wait_until_restarted("starter", restarts)
            for name in ("a", "b"):
                wait_until(partial(writes, running, name, "." if mount else "files"), 30)
        assert [running[name].pid for name in ("a", "b")] == started
        assert running.restarts == {}


def writes(running: Pod, container: str, directory: str) -> bool:
    """Return whether a container can write and read in that directory of its volume."""
    running.check_loop()
    script = f"echo hello > {DATA}/{directory}/new && cat {DATA}/{directory}/new"
    return running[container].exec(["sh", "-c", script], check=False).stdout == "hello\n"


def test_a_container_starts_again_while_the_program_is_away(cluster: Cluster) -> None:
    """As in a pod with a program of its own: it reads an error, and what the program serves as soon as that is back."""
    kubelet = cluster.kubelet
    with kubelet.new_pod(mount_pod(WHEN_LET)) as serving:
        serving.set_up_volumes()
        go(serving).touch()
        serving.start_sandbox()
        serving.start_containers()
        with kubelet.pod(workload("stays", "dies")) as running:
            started = running["stays"].pid
            go(serving).unlink()
            kill(serving)
            wait_until(lambda: has_tombstone(running), 30)
            kill(running, "dies")
            running.wait_until_restarted("dies", 1)
            for name in ("stays", "dies"):
                said = running[name].exec(["ls", DATA], check=False)
                assert GONE in said.stderr, said
            go(serving).touch()
            for name in ("stays", "dies"):
                wait_until(partial(reads, running, name), 30)
            assert running["stays"].pid == started


def test_the_next_mount_pod_heals_what_the_last_one_has_left(cluster: Cluster) -> None:
    kubelet = cluster.kubelet
    with contextlib.ExitStack() as first:
        first.enter_context(kubelet.pod(mount_pod()))
        with kubelet.pod(workload()) as running:
            assert read(running) == "hello\n"
            first.close()
            said = running["consumer"].exec(["cat", f"{DATA}/hello"], check=False)
            assert "not connected" in said.stderr
            with kubelet.pod(mount_pod()):
                wait_until(lambda: reads(running), 30)
                assert running.republish_errors() == []


@contextlib.contextmanager
def stopped(running: Pod, container: str = "starter") -> Iterator[None]:
    """Have the program answer nothing while the block runs."""
    pid = running[container].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_pod_goes_while_the_program_hangs_and_the_others_read_on(kubelet: Kubelet) -> None:
    with (
        kubelet.pod(mount_pod()) as serving,
        kubelet.pod(workload()) as one,
        kubelet.pod(workload()) as other,
        kubelet.new_pod(workload()) as goes,
    ):
        goes.set_up()
        before = device(one)
        with stopped(serving), ThreadPoolExecutor() as beside:
            reading = [beside.submit(read, each) for each in (one, other)]
            goes.stop_loop()
            goes.stop_containers()
            begun = time.monotonic()
            unpublish(goes)
            assert time.monotonic() - begun < 10
            assert kubelet.node.mounts(goes.target()) == []
            assert not any(each.done() for each in reading)
            os.kill(serving["starter"].pid, signal.SIGCONT)
            assert [each.result() for each in reading] == ["hello\n"] * 2
        assert device(one) == device(other) == before


def wait_unused(serving: Pod, seconds: int) -> CompletedProcess[str]:
    command = ["fusermount3-proxy", "--wait-unused", "--timeout", f"{seconds}"]
    return serving["starter"].exec(command, check=False)


def test_a_mount_pod_can_wait_until_it_is_not_used_any_more(kubelet: Kubelet) -> None:
    with (
        kubelet.pod(mount_pod()) as serving,
        kubelet.pod(workload()) as running,
        ThreadPoolExecutor() as beside,
    ):
        said = wait_unused(serving, 0)
        assert (said.returncode, said.stderr) == (
            1,
            "fusermount3-proxy: volumes of other pods that use the filesystem: 1, waited 0 seconds\n",
        )
        waiting = beside.submit(wait_unused, serving, 60)
        time.sleep(1)
        assert not waiting.done()
        running.tear_down()
        assert waiting.result().returncode == 0


def test_a_mount_pod_that_waits_gets_no_new_users(kubelet: Kubelet) -> None:
    """Although it is the newest, whose filesystem a new pod gets otherwise."""
    with kubelet.pod(mount_pod()) as older, kubelet.pod(replace(mount_pod(), name="newer")) as newer:
        for each in (older, newer):
            wait_for_volume(each, "starter", OWN_MOUNTPOINT)
        with kubelet.pod(workload()) as running:
            assert device(running) == kubelet.node.mounts(newer.target())[-1].device
            assert wait_unused(newer, 0).returncode == 1
            with kubelet.pod(workload()) as late:
                assert device(late) == kubelet.node.mounts(older.target())[-1].device
                assert device(running) == kubelet.node.mounts(newer.target())[-1].device


def test_what_anybody_else_offers_is_not_used(kubelet: Kubelet) -> None:
    with kubelet.pod(mount_pod(namespace="attackers")) as forged, kubelet.new_pod(workload()) as running:
        wait_for_volume(forged, "starter", OWN_MOUNTPOINT)
        assert publish(kubelet.plugin, running, 3).code == grpc.StatusCode.DEADLINE_EXCEEDED
        assert kubelet.node.mounts(running.target()) == []
        unpublish(running)


def test_a_program_in_a_user_namespace_serves_no_other_pods(kubelet: Kubelet) -> None:
    command = f"hello_ll -f {OWN_MOUNTPOINT}; sleep infinity"
    with (
        kubelet.pod(mount_pod(command, hostUsers=False)) as serving,
        kubelet.new_pod(workload()) as running,
    ):
        wait_until(lambda: "can't be in a user namespace (hostUsers: false)" in serving["starter"].logs())
        assert publish(kubelet.plugin, running, 3).code == grpc.StatusCode.DEADLINE_EXCEEDED
        assert [mount.fstype for mount in kubelet.node.mounts(serving.target())] == ["tmpfs"]
        unpublish(running)


def end_front(cluster: Cluster) -> None:
    kill_parts(cluster.broker, FRONT)


def end_mounter(cluster: Cluster) -> None:
    kill_parts(cluster.broker, MOUNTER)


@pytest.mark.parametrize("end", [restart, end_at_once, end_front, end_mounter])
def test_a_later_broker_knows_who_has_what(cluster: Cluster, end: Callable[[Cluster], None]) -> None:
    kubelet = cluster.kubelet
    with kubelet.pod(mount_pod()) as serving, kubelet.pod(workload()) as one, kubelet.pod(workload()) as other:
        before = device(one)
        end(cluster)
        for running in (one, other):
            assert device(running) == before
            assert read(running) == "hello\n"
        wait_until(lambda: cluster.broker.status()["borrowers"] == 2)
        with kubelet.pod(workload()) as late:
            assert device(late) == before
        kill(serving)
        serving.wait_until_restarted("starter", 1)
        for running in (one, other):
            wait_until(lambda running=running: reads(running), 30)  # type: ignore[misc]
        (mount,) = [each for each in cluster.broker.mounts() if each["borrowers"]]
        assert sorted(mount["borrowers"]) == sorted(
            str(each.target().relative_to(kubelet.node.kubelet)) for each in (one, other)
        )
        assert mount["share"] == KEY


def test_a_reboot_leaves_nothing_stale(cluster: Cluster) -> None:
    """A reboot keeps kubelet's directories and the broker's tables, but no mount and no process."""
    kubelet = cluster.kubelet
    with (
        kubelet.new_pod(mount_pod()) as serving,
        kubelet.new_pod(workload()) as running,
        kubelet.new_pod(workload()) as other,
    ):
        for each in (serving, running, other):
            each.set_up()
        for each in (serving, running, other):
            each.stop_containers()
        cluster.broker.stop()
        for each in (serving, running, other):
            cluster.node.unmount(each.target())
        cluster.broker.start()
        cluster.wait_until_ready()
        # Kubelet starts two of the pods again, and removes the other.
        other.tear_down()
        for each in (serving, running):
            each.set_up_volume(each.csi_volume())
            each.start_sandbox()
            each.start_containers()
        assert read(running) == "hello\n"


def test_a_pod_may_have_a_program_of_its_own(kubelet: Kubelet) -> None:
    """The controller gives it one if the template says so; the volume still names the template."""
    with kubelet.pod(mount_pod()), kubelet.pod(pod([starter(serve()), consumer()], attributes=TEMPLATE)) as own:
        wait_for_volume(own)
        assert read(own) == "hello\n"
        (mount,) = own["consumer"].fuse_mounts(DATA)
        assert mount.device == own["starter"].fuse_mounts(OWN_MOUNTPOINT)[0].device


def test_a_share_that_cannot_be_is_refused(kubelet: Kubelet) -> None:
    with kubelet.new_pod(mount_pod(key="abc")) as running, pytest.raises(PodFailed, match="'share' must be a key"):
        running.set_up_volumes()
