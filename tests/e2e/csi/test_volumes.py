"""A FUSE program in one container of a pod, and its filesystem in the others: what kubelet and the author of a pod can
request of a volume.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import grpc
import pytest
import yaml

from tests.e2e.conftest import wait_until
from tests.e2e.csi import pods
from tests.e2e.csi.pods import (
    DATA,
    DRIVER,
    OWN_MOUNTPOINT,
    SOCKET,
    SOCKETS,
    consumer,
    kill,
    pod,
    read,
    serve,
    starter,
    wait_for_mount,
    wait_for_volume,
)
from tests.lab import manifests
from tests.lab.csi import CsiError
from tests.lab.manifests import EmptyDir

if TYPE_CHECKING:
    from tests.lab.cluster import Cluster
    from tests.lab.kubelet import Kubelet, Pod
    from tests.lab.podman import Mount

pytestmark = pytest.mark.e2e

ONE, TWO = consumer("one"), consumer("two")


def volume_of(running: Pod, container: str = "consumer", at: str = DATA) -> Mount:
    """Return the topmost mount of a container at that path."""
    return running[container].fuse_mounts(at)[-1]


@pytest.mark.parametrize(
    "spec",
    [pod([ONE, TWO, starter(serve())]), pod([ONE, TWO], init=[starter(serve(), sidecar=True)])],
    ids=["consumers first", "the starter first"],
)
def test_what_a_program_mounts_shows_up_in_each_container(kubelet: Kubelet, spec: manifests.Pod) -> None:
    with kubelet.pod(spec) as running:
        for name in ("one", "two"):
            wait_for_volume(running, name)
            assert read(running, name) == "hello\n"
        running["one"].exec(["sh", "-c", f"echo from one > {DATA}/hello"])
        assert read(running, "two") == "from one\n"
        (own,) = running["starter"].fuse_mounts(OWN_MOUNTPOINT)
        assert own.device == volume_of(running, "one").device
        assert {"nosuid", "nodev"} <= volume_of(running, "two").options


def test_a_volume_without_a_program_is_empty_and_cannot_be_written(kubelet: Kubelet) -> None:
    with kubelet.pod(pod([consumer()])) as running:
        assert running["consumer"].exec(["ls", "-a", DATA]).stdout.split() == [".", ".."]
        said = running["consumer"].exec(["touch", f"{DATA}/file"], check=False)
        assert "Read-only file system" in said.stderr


@pytest.mark.parametrize("sidecar", [False, True], ids=["consumer first", "the starter first"])
def test_a_read_only_volume_is_so_for_all(kubelet: Kubelet, sidecar: bool) -> None:
    serving = starter(serve("whoamifs"), sidecar=sidecar)
    containers = [consumer()] if sidecar else [consumer(), serving]
    with kubelet.pod(pod(containers, init=[serving] if sidecar else [], read_only=True)) as running:
        wait_for_volume(running)
        for name, at in (("consumer", DATA), ("starter", OWN_MOUNTPOINT)):
            said = running[name].exec(["touch", f"{at}/files/new"], check=False)
            assert "Read-only file system" in said.stderr
        assert "ro" in volume_of(running).super_options


def test_the_group_of_the_pod_is_that_of_the_volume(kubelet: Kubelet) -> None:
    containers = [consumer(), starter(serve(), securityContext={"runAsUser": 1000, "runAsGroup": 1000})]
    with kubelet.pod(pod(containers, securityContext={"fsGroup": 2000})) as running:
        wait_for_volume(running)
        assert {"user_id=1000", "group_id=2000", "allow_other"} <= volume_of(running).super_options
        assert read(running) == "hello\n"


def test_the_program_is_a_plain_user_in_a_read_only_root(kubelet: Kubelet) -> None:
    context = {
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "runAsNonRoot": True,
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    serving = starter(serve(), sidecar=True, securityContext=context)
    serving["volumeMounts"].append({"name": "mountpoint", "mountPath": OWN_MOUNTPOINT})
    with kubelet.pod(pod([consumer()], init=[serving], directories=["mountpoint"])) as running:
        assert {"user_id=1000", "group_id=1000"} <= volume_of(running).super_options
        assert read(running) == "hello\n"


def test_part_of_a_volume(kubelet: Kubelet) -> None:
    part = consumer("part", mount={"subPath": "files"})
    serving = starter(serve("whoamifs"), sidecar=True)
    with kubelet.pod(pod([consumer(), part], init=[serving])) as running:
        running["consumer"].exec(["sh", "-c", f"echo content > {DATA}/files/new"])
        assert read(running, "part", "new") == "content\n"
        assert volume_of(running, "part").root == "/files"


@pytest.mark.parametrize("sidecar", [False, True], ids=["consumer first", "the starter first"])
def test_a_pod_with_a_user_namespace_of_its_own(kubelet: Kubelet, sidecar: bool) -> None:
    serving = starter(serve(), sidecar=sidecar, securityContext={"runAsUser": 1000, "runAsGroup": 1000})
    containers = [consumer()] if sidecar else [consumer(), serving]
    with kubelet.pod(pod(containers, init=[serving] if sidecar else [], hostUsers=False)) as running:
        wait_for_volume(running)
        assert read(running) == "hello\n"
        assert running["consumer"].exec(["stat", "-c", "%u:%g", f"{DATA}/hello"]).stdout == "1000:1000\n"
        assert running["starter"].exec(["stat", "-c", "%u:%g", f"{OWN_MOUNTPOINT}/hello"]).stdout == "1000:1000\n"


CLAIM = """
kind: PersistentVolume
metadata: {{name: remote}}
spec:
  accessModes: [ReadWriteMany]
  mountOptions: [noatime]
  csi:
    driver: {driver}
    volumeHandle: remote
    volumeAttributes: {{mountOptions: "noexec,max_read=65536"}}
---
kind: PersistentVolumeClaim
metadata: {{name: claim}}
spec: {{volumeName: remote, accessModes: [ReadWriteMany]}}
---
"""


def test_two_pods_with_claims_of_one_volume(kubelet: Kubelet) -> None:
    volumes = [
        {"name": SOCKETS, "emptyDir": {}},
        {"name": pods.VOLUME, "persistentVolumeClaim": {"claimName": "claim"}},
    ]
    containers = [consumer(), starter(serve())]
    document = {"kind": "Pod", "metadata": {"name": "pod"}, "spec": {"containers": containers, "volumes": volumes}}
    spec = manifests.parse(CLAIM.format(driver=DRIVER) + yaml.safe_dump(document))
    with kubelet.pod(spec) as first, kubelet.pod(spec) as second:
        for running in (first, second):
            wait_for_volume(running)
            assert read(running) == "hello\n"
            assert {"noatime", "noexec"} <= volume_of(running).options
            assert "max_read=65536" in volume_of(running).super_options
        assert volume_of(first).device != volume_of(second).device


def test_a_program_that_takes_a_descriptor(kubelet: Kubelet) -> None:
    serving = starter("exec fuse-starter -- whoamifs -f {}")
    with kubelet.pod(pod([consumer(), serving])) as running:
        wait_for_volume(running)
        who = running["consumer"].exec(["sh", "-c", f"read -r who < {DATA}/whoami; echo $who"]).stdout
        assert who.startswith("uid=0 gid=0 ")
        assert running["starter"].fuse_mounts() == []


def test_others_may_be_kept_out(kubelet: Kubelet) -> None:
    serving = starter(serve(), securityContext={"runAsUser": 1000, "runAsGroup": 1000})
    with kubelet.pod(pod([consumer(), serving], attributes={"allowOther": "false"})) as running:
        wait_for_mount(running)
        assert "allow_other" not in volume_of(running).super_options
        said = running["consumer"].exec(["cat", f"{DATA}/hello"], check=False)
        assert "Permission denied" in said.stderr


def test_publishing_again_and_again_changes_nothing(kubelet: Kubelet) -> None:
    with kubelet.pod(pod([consumer()], init=[starter(serve(), sidecar=True)])) as running:
        socket = running.volume_path(EmptyDir(SOCKETS)) / SOCKET
        before = (socket.stat().st_ino, kubelet.node.mounts(running.directory))
        calls = len(running.calls)
        wait_until(lambda: len(running.calls) > calls + 20, 60)
        assert (socket.stat().st_ino, kubelet.node.mounts(running.directory)) == before
        assert running.republish_errors() == []
        assert read(running) == "hello\n"


def test_stats_tell_how_full_and_how_well_a_volume_is(kubelet: Kubelet) -> None:
    with kubelet.pod(pod([consumer()])) as running:
        assert running.stats().volume_condition.abnormal
    with kubelet.pod(pod([consumer()], init=[starter(serve("whoamifs"), sidecar=True)])) as running:
        stats = running.stats()
        assert not stats.volume_condition.abnormal, stats.volume_condition.message
        inodes, size = sorted(stats.usage, key=lambda usage: -usage.unit)
        assert inodes.unit != size.unit


def test_a_volume_may_come_before_the_directory_of_its_socket(kubelet: Kubelet) -> None:
    with kubelet.new_pod(pod([consumer(), starter(serve())])) as running:
        with pytest.raises(CsiError) as failed:
            running.publish(running.csi_volume())
        assert failed.value.code != grpc.StatusCode.INVALID_ARGUMENT
        assert SOCKETS in failed.value.text
        assert kubelet.node.mounts(running.directory) == []
        running.set_up()
        wait_for_volume(running)


def test_a_volume_waits_for_the_directory_of_its_socket(kubelet: Kubelet) -> None:
    """Kubelet makes the directory while it calls NodePublishVolume, and need not repeat the call because of that."""
    with kubelet.new_pod(pod([consumer()])) as running, ThreadPoolExecutor() as beside:
        publishing = beside.submit(running.publish, running.csi_volume())
        time.sleep(0.5)
        assert not publishing.done()
        running.set_up_volume(EmptyDir(SOCKETS))
        publishing.result(60)
        assert (running.volume_path(EmptyDir(SOCKETS)) / SOCKET).is_socket()


def test_a_volume_may_go_after_the_directory_of_its_socket(kubelet: Kubelet) -> None:
    with kubelet.pod(pod([consumer()], init=[starter(serve(), sidecar=True)])) as running:
        running.stop_containers()
        for volume in running.spec.volumes:
            running.tear_down_volume(volume)


def test_kubelet_may_unpublish_what_it_never_published_and_twice(kubelet: Kubelet) -> None:
    with kubelet.new_pod(pod([consumer()])) as running:
        for _ in range(2):
            kubelet.plugin.unpublish(running.handle(running.csi_volume()), running.target())


def test_a_mount_that_is_refused_is_told_where_a_user_looks(cluster: Cluster) -> None:
    serving = starter(f"hello_ll -f -o blkdev {OWN_MOUNTPOINT}; sleep infinity")
    with cluster.kubelet.pod(pod([consumer(), serving])) as running:
        wait_until(lambda: "option blkdev is privileged" in running["starter"].logs())
        refused = [each for each in cluster.broker.records("volume refused") if each["pod"] == running.uid]
        place = f"{OWN_MOUNTPOINT} and on volume {running.handle(running.csi_volume())} of pod {running.uid}"
        assert refused[0]["message"].startswith(f"refused to mount on {place} for uid ")
        assert ": option blkdev is privileged (request " in refused[0]["message"]
        assert running["consumer"].fuse_mounts() == []


def test_the_socket_is_made_again_when_the_pod_removes_it(kubelet: Kubelet) -> None:
    with kubelet.pod(pod([consumer()], init=[starter(serve(), sidecar=True)])) as running:
        socket = running.volume_path(EmptyDir(SOCKETS)) / SOCKET
        running["starter"].exec(["rm", f"/sockets/{SOCKET}"])
        wait_until(socket.is_socket)
        kill(running)
        running.wait_until_restarted("starter", 1)
        wait_until(lambda: "hello" in running["consumer"].exec(["cat", f"{DATA}/hello"], check=False).stdout)


def test_a_socket_with_a_long_name(kubelet: Kubelet) -> None:
    name = "s" * 64  # together with kubelet's directory, the path is longer than an address may be (unix(7))
    serving = starter(serve())
    serving["env"] = [{"name": "FUSERMOUNT3PROXY_FDPASSING_SOCKPATH", "value": f"/sockets/{name}"}]
    with kubelet.pod(pod([consumer(), serving], attributes={"fdPassingSocketName": name})) as running:
        assert len(str(running.volume_path(EmptyDir(SOCKETS)) / name)) > 107
        wait_for_volume(running)
        assert read(running) == "hello\n"
