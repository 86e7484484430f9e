"""A FUSE program is killed, as the kernel does when its memory is used up; kubelet restarts its container.

And kubelet loses the driver, without which no pod with its volumes starts or ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.cluster import driver
from tests.cluster.pods import applied, restricted, wait_until_it_says
from tests.e2e.conftest import wait_until
from tests.kubernetes.objects import the

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.node import ClusterNode

pytestmark = [pytest.mark.e2e, pytest.mark.long]

REGISTERED = 60
"""Seconds in which kubelet's probes find that the driver is not registered, and its registrar is restarted."""


def with_the_volume_in_its_own_container() -> list[dict[str, Any]]:
    """Return the example, but its sidecar mounts on the volume and waits there, like that of ros3fs.yaml."""
    objects = driver.example("sshfs")
    (sidecar,) = the("Pod", objects)["spec"]["initContainers"]
    sidecar["command"] = ["fuse-starter", "--", "sshfs", "-f", "-F", "/etc/sshfs/config", "server:", "{}"]
    sidecar["startupProbe"]["exec"]["command"][-1] = "/data"
    sidecar["volumeMounts"].append({"name": "data", "mountPath": "/data", "mountPropagation": "HostToContainer"})
    return objects


@pytest.mark.parametrize("name", ["sshfs", "fs-group", "persistent", "two-containers", "eager"])
def test_the_other_container_reads_again_without_a_restart(node: ClusterNode, name: str) -> None:
    with applied(node, driver.example(name)) as pod:
        pod.wait_until_ready()
        pod.kill("sshfs")
        pod.wait_until_restarted("sshfs", 1)
        wait_until_it_says(pod, ["cat", "/data/hello"], "hello\n")
        assert pod.status("app")["restartCount"] == 0


def test_a_directory_of_the_volume_is_read_again(node: ClusterNode) -> None:
    with applied(node, driver.example("subpath")) as pod:
        pod.wait_until_ready()
        pod.kill("sshfs")
        pod.wait_until_restarted("sshfs", 1)
        wait_until_it_says(pod, ["cat", "/reports/first"], "first\n")


@pytest.mark.parametrize(
    ("name", "file", "content"), [("sshfs", "/data/hello", "hello\n"), ("subpath", "/reports/first", "first\n")]
)
def test_a_container_that_ends_while_there_is_no_program_starts_when_there_is_one(
    node: ClusterNode, name: str, file: str, content: str
) -> None:
    with applied(node, driver.example(name)) as pod:
        pod.wait_until_ready()
        pod.kill("sshfs")
        pod.wait_until_restarted("sshfs", 1)
        pod.kill("sshfs")  # kubelet now waits ten seconds before it restarts it
        pod.kill("app")
        pod.wait_until_restarted("sshfs", 2)
        wait_until_it_says(pod, ["cat", file], content)


def test_a_program_whose_own_container_has_the_volume(node: ClusterNode) -> None:
    with applied(node, with_the_volume_in_its_own_container()) as pod:
        pod.wait_until_ready()
        pod.kill("sshfs")
        pod.wait_until_restarted("sshfs", 1)
        wait_until_it_says(pod, ["cat", "/data/hello"], "hello\n")


def test_the_driver_is_registered_again_when_its_registration_socket_was_removed(node: ClusterNode) -> None:
    """A registrar that ends does so, also with that of its successor, if its pod was deleted by force."""
    socket = node.seen(f"/var/lib/kubelet/plugins_registry/{driver.NAME}-reg.sock")
    before = socket.stat().st_ino
    socket.unlink()
    wait_until(lambda: is_another(socket, before), REGISTERED)
    with applied(node, driver.example("sshfs")) as pod:
        pod.wait_until_ready()
        wait_until_it_says(pod, ["cat", "/data/hello"], "hello\n")


def test_a_pod_whose_volume_was_refused_ends_though_kubelet_was_killed_meanwhile(node: ClusterNode) -> None:
    """A kubelet that finds a volume at its start, and then gets a final error, can't tear it down any more."""
    pod = yaml.safe_dump(restricted({"csi": {"driver": driver.NAME}}, "lacks-an-emptydir"))
    try:
        uid = node.kubectl("create", "--filename=-", "--output=jsonpath={.metadata.uid}", input=pod).stdout
        volume = node.seen(f"/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~csi/data")
        wait_until((volume / "vol_data.json").exists)  # from now on, the broker looks for the emptyDir for 2.5 seconds
        node.end("kubelet")
        node.begin("kubelet")
        wait_until(lambda: "open the emptyDir" in node.kubectl("get", "events", "--output=yaml").stdout, 60)
        node.kubectl("delete", "pod", "lacks-an-emptydir", "--timeout=60s")
        assert not volume.exists()
    finally:
        node.kubectl("delete", "pod", "lacks-an-emptydir", "--ignore-not-found", "--force", "--grace-period=0")


def is_another(file: Path, inode: int) -> bool:
    try:
        return file.stat().st_ino != inode
    except FileNotFoundError:
        return False
