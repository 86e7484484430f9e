"""Block volumes: a pod has the device that a mount pod offers.

There is no controller here: the tests write the mount pod that it would make.
"""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from fusermount3_broker.csi import csi_pb2 as csi
from fusermount3_broker.messages.sharing_key import sharing_key
from tests.e2e.conftest import wait_until
from tests.e2e.csi.pods import pod, starter
from tests.e2e.csi.test_broker_restarts import end_at_once, restart
from tests.e2e.csi.test_mount_pods import OWN, TRUSTED, end_front, end_mounter
from tests.lab import images, loop, podman
from tests.lab.csi import CsiError
from tests.lab.kubelet import ACCESS_MODES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.e2e.csi.conftest import RunCluster
    from tests.lab.cluster import Cluster
    from tests.lab.kubelet import Kubelet, Pod
    from tests.lab.manifests import Pod as Spec

pytestmark = [pytest.mark.e2e, pytest.mark.long]

TEMPLATE = {"volumeTemplate": "disks", "pool": "fast"}
HANDLE = "disk-1"
KEY = sharing_key(HANDLE, TEMPLATE, block=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A block device of this machine."""
    with loop.device(tmp_path / "disk") as device:
        yield device


@pytest.fixture
def cluster(run_cluster: RunCluster, disk: Path) -> Cluster:
    """A cluster in which the image "disk" stands for one whose container may use the device."""
    made = run_cluster()
    made.kubelet.images["disk"] = replace(made.kubelet.images["starter"], devices=[disk])
    return made


def mount_pod(
    command: str, image: str = "disk", *, namespace: str = TRUSTED, add: Sequence[str] = (), **attributes: str
) -> Spec:
    """A pod whose program, which has the capabilities `add`, offers a device for the volume."""
    serving = starter(command, image=image, securityContext={"capabilities": {"add": [*add]}})
    made = pod([serving], attributes={"share": KEY, **attributes})
    return replace(made, name="mount-pod", namespace=namespace)


def offer(device: Path, *options: str) -> str:
    return " ".join(["exec fusermount3-proxy --offer-device", str(device), *options])


class BlockPod:
    """A pod that has the block volume: what kubelet does for that, and a container with the device."""

    def __init__(self, kubelet: Kubelet, *, read_only: bool = False, template: dict[str, str] = TEMPLATE) -> None:
        self._kubelet = kubelet
        self.uid = str(uuid.uuid4())
        directory = kubelet.node.kubelet / "plugins/kubernetes.io/csi/volumeDevices/publish/pv"
        self.target = directory / self.uid
        pod_info = {
            "csi.storage.k8s.io/pod.name": "app",
            "csi.storage.k8s.io/pod.namespace": OWN,
            "csi.storage.k8s.io/pod.uid": self.uid,
            "csi.storage.k8s.io/serviceAccount.name": "default",
            "csi.storage.k8s.io/ephemeral": "false",
        }
        capability = csi.VolumeCapability(
            block=csi.VolumeCapability.BlockVolume(),
            access_mode=csi.VolumeCapability.AccessMode(mode=ACCESS_MODES["ReadWriteOnce"]),
        )
        self.request = csi.NodePublishVolumeRequest(
            volume_id=HANDLE,
            target_path=str(self.target),
            volume_capability=capability,
            readonly=read_only,
            volume_context={**template, **pod_info},
        )
        directory.mkdir(mode=0o750, parents=True, exist_ok=True)

    def publish(self, patience: float = 60) -> None:
        self._kubelet.plugin.publish(self.request, patience)

    def error(self, patience: float = 3) -> CsiError:
        with pytest.raises(CsiError) as failed:
            self.publish(patience)
        return failed.value

    def unpublish(self) -> None:
        self._kubelet.plugin.unpublish(HANDLE, self.target)

    def number(self) -> int:
        """Return the device number of the device at the target; 0 without one."""
        seen = self._kubelet.node.seen(self.target)
        return seen.stat().st_rdev if seen.is_block_device() else 0

    def run(self, script: str) -> str:
        """Return what a script writes in a container that has the device at /dev/disk."""
        extra = ["--device", f"{self.target}:/dev/disk"]
        command = self._kubelet.node.command("podman")
        options = podman.Options(extra=extra)
        with podman.Container(images.image_tag(images.BUSYBOX), ["sleep", "infinity"], options, command) as container:
            return container.exec(["sh", "-c", script]).stdout


@contextlib.contextmanager
def block_pod(kubelet: Kubelet, *, read_only: bool = False) -> Iterator[BlockPod]:
    """Run a pod with the volume; remove it when the block ends."""
    made = BlockPod(kubelet, read_only=read_only)
    made.publish()
    try:
        yield made
    finally:
        made.unpublish()
        assert not made.target.exists()


def logs(running: Pod) -> str:
    return running.last_logs.get("starter", "") + running["starter"].logs()


def test_a_pod_has_the_device_of_its_mount_pod(cluster: Cluster, disk: Path, tmp_path: Path) -> None:
    kubelet = cluster.kubelet
    with kubelet.pod(mount_pod(offer(disk), shareCapacity=f"{loop.SIZE}")) as serving, block_pod(kubelet) as one:
        assert one.number() == disk.stat().st_rdev
        assert one.run("head -c 5 /dev/disk; printf world | dd of=/dev/disk conv=fsync 2>/dev/null") == "hello"
        assert (tmp_path / "disk").read_bytes()[:5] == b"world"
        (usage,) = kubelet.plugin.stats(HANDLE, one.target).usage
        assert (usage.unit, usage.total, usage.available) == (csi.VolumeUsage.BYTES, loop.SIZE, 0)
        with block_pod(kubelet, read_only=True) as other:
            assert other.run("head -c 5 /dev/disk") == "world"
        unused = ["fusermount3-proxy", "--wait-unused", "--timeout", "0"]
        assert serving["starter"].exec(unused, check=False).returncode == 1
        one.publish()
        assert one.number() == disk.stat().st_rdev


def test_a_pod_waits_for_the_device(cluster: Cluster, disk: Path) -> None:
    kubelet = cluster.kubelet
    early = BlockPod(kubelet)
    with ThreadPoolExecutor() as beside:
        publishing = beside.submit(early.publish)
        with kubelet.pod(mount_pod(f"sleep 1; {offer(disk)}")):
            publishing.result()
            assert early.number() == disk.stat().st_rdev
            early.unpublish()


def test_a_node_that_the_pod_has_only_made_is_a_key_to_nothing(cluster: Cluster, disk: Path) -> None:
    """The pod has CAP_MKNOD, as by containerd's defaults, but no permission for the device."""
    kubelet = cluster.kubelet
    number = disk.stat().st_rdev
    make = f"mknod /tmp/disk b {os.major(number)} {os.minor(number)} && echo made"
    command = f"{make}; fusermount3-proxy --offer-device /tmp/disk; sleep infinity"
    with kubelet.pod(mount_pod(command, "starter", add=["MKNOD"])) as forging:
        wait_until(lambda: "Operation not permitted" in logs(forging))
        said = logs(forging)
        assert said.splitlines() == ["made", "fusermount3-proxy: can't open /tmp/disk: Operation not permitted"]
        late = BlockPod(kubelet)
        assert late.error().code == grpc.StatusCode.DEADLINE_EXCEEDED
        assert late.number() == 0
        late.unpublish()
        assert not late.target.exists()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            lambda disk: mount_pod(offer(disk), shareCapacity="2097152"),
            "the device has 1048576 bytes, and the volume must",
        ),
        (lambda _: mount_pod(offer(Path("/dev/null"))), "can't offer the device: Block device required"),
        (lambda disk: mount_pod(offer(disk, "--nonsense")), "exactly one device is required"),
    ],
    ids=["too small", "no block device", "wrong command"],
)
def test_the_program_is_told_what_is_wrong(
    cluster: Cluster, disk: Path, spec: Callable[[Path], Spec], said: str
) -> None:
    with cluster.kubelet.pod(spec(disk)) as serving:
        wait_until(lambda: said in logs(serving))


def test_a_device_for_readers_is_for_readers_only(cluster: Cluster, disk: Path) -> None:
    kubelet = cluster.kubelet
    with kubelet.pod(mount_pod(offer(disk, "--read-only"))), block_pod(kubelet, read_only=True) as reader:
        assert reader.run("head -c 5 /dev/disk") == "hello"
        writer = BlockPod(kubelet)
        assert "for reading only" in writer.error().text
        assert not writer.target.exists()


def test_what_anybody_else_offers_is_not_used(cluster: Cluster, disk: Path) -> None:
    kubelet = cluster.kubelet
    with kubelet.pod(mount_pod(offer(disk), namespace="attackers")):
        late = BlockPod(kubelet)
        assert late.error().code == grpc.StatusCode.DEADLINE_EXCEEDED
        late.unpublish()


def test_a_volume_without_a_template_has_no_device(cluster: Cluster) -> None:
    error = BlockPod(cluster.kubelet, template={}).error()
    assert error.code == grpc.StatusCode.INVALID_ARGUMENT
    assert error.text.startswith("a volume with volumeMode Block needs the attribute 'volumeTemplate'")


@pytest.mark.parametrize("end", [restart, end_at_once, end_front, end_mounter])
def test_a_later_broker_offers_it_again(cluster: Cluster, disk: Path, end: Callable[[Cluster], None]) -> None:
    kubelet = cluster.kubelet
    number = disk.stat().st_rdev
    with kubelet.pod(mount_pod(offer(disk))) as serving, block_pod(kubelet) as one:
        end(cluster)
        assert one.number() == number
        one.publish()
        with block_pod(kubelet) as late:
            assert late.number() == number
        assert serving.restarts == {}


def test_a_volume_keeps_its_device_when_the_mount_pod_has_gone(cluster: Cluster, disk: Path) -> None:
    kubelet = cluster.kubelet
    with contextlib.ExitStack() as held:
        running = held.enter_context(kubelet.pod(mount_pod(offer(disk))))
        one = held.enter_context(block_pod(kubelet))
        os.kill(running["starter"].pid, signal.SIGKILL)
        running.wait_until_restarted("starter", 1)
        assert one.run("head -c 5 /dev/disk") == "hello"
    one = BlockPod(kubelet)
    with kubelet.pod(mount_pod(offer(disk))):
        one.publish()
    one.publish()
    assert one.number() == disk.stat().st_rdev
    one.unpublish()


def test_no_container_starts_with_another_disk_of_the_same_number(cluster: Cluster, disk: Path, tmp_path: Path) -> None:
    kubelet = cluster.kubelet
    one = BlockPod(kubelet)
    with kubelet.pod(mount_pod(offer(disk))):
        one.publish()
    loop.detach(disk)
    (tmp_path / "secret").write_bytes(bytes(loop.SIZE))
    loop.attach(tmp_path / "secret", disk)
    assert "the device that it had offered is gone" in one.error().text
    assert one.number() == 0
    with kubelet.pod(mount_pod(offer(disk))):
        wait_until(partial(publishes, one))
        assert one.number() == disk.stat().st_rdev
    one.unpublish()


def publishes(block: BlockPod) -> bool:
    with contextlib.suppress(CsiError):
        block.publish()
        return True
    return False
