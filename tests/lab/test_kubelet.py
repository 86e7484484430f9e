"""The lab's kubelet handles a pod as kubelet does, as its containers see it; here without a volume of a driver."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import wait_until
from tests.lab import cgroups, manifests
from tests.lab.csi import Plugin
from tests.lab.images import BUSYBOX, image_tag
from tests.lab.kubelet import Image, Kubelet, PodFailed
from tests.lab.manifests import EmptyDir
from tests.lab.node import Node
from tests.lab.podman import mountinfo

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.e2e

POD = """
kind: Pod
metadata: {name: pod}
spec:
  securityContext: {fsGroup: 2000}
  initContainers:
  - name: first
    image: image
    command: [sh, -c, echo first > /work/file]
    volumeMounts: [{name: work, mountPath: /work}]
  - name: sidecar
    image: image
    restartPolicy: Always
    command: [sh, -c, sleep 1; touch /work/started; sleep infinity]
    startupProbe: {exec: {command: [test, -e, /work/started]}, periodSeconds: 1, failureThreshold: 10}
    volumeMounts: [{name: work, mountPath: /work}]
  containers:
  - name: main
    image: image
    command: [sh, -c, "ls /work > /work/seen; exec sleep infinity"]
    securityContext: {runAsUser: 1000, runAsGroup: 1000, capabilities: {drop: [ALL]}}
    volumeMounts:
    - {name: work, mountPath: /work}
    - {name: work, mountPath: /part, subPath: some/part}
    - {name: work, mountPath: /following, mountPropagation: HostToContainer}
  volumes:
  - {name: work, emptyDir: {}}
"""


def namespace(pid: int, kind: str) -> Path:
    return Path(f"/proc/{pid}/ns/{kind}").readlink()


@pytest.fixture
def node() -> Iterator[Node]:
    with Node() as node:
        yield node


@pytest.fixture
def kubelet(node: Node) -> Iterator[Kubelet]:
    kubelet = Kubelet(node, "no.driver", Plugin(node.directory / "none"), {"image": Image(image_tag(BUSYBOX))})
    yield kubelet
    assert kubelet.left() == []


def test_containers_are_started_in_order(kubelet: Kubelet) -> None:
    with kubelet.pod(manifests.parse(POD)) as pod:

        def seen() -> list[str]:
            return pod["main"].exec(["cat", "/work/seen"], check=False).stdout.split()

        wait_until(seen, 60)  # a container without a probe is ready before its command has done anything
        assert seen() == ["file", "seen", "some", "started"]


def test_a_container_is_who_the_manifest_says(kubelet: Kubelet) -> None:
    with kubelet.pod(manifests.parse(POD)) as pod:
        status = pod["main"].exec(["cat", "/proc/1/status"]).stdout
        assert "Uid:\t1000\t1000\t1000\t1000\n" in status and "Gid:\t1000\t1000\t1000\t1000\n" in status
        assert re.search(r"Groups:\t.*\b2000\b", status)
        assert "CapEff:\t0000000000000000\n" in status
        pod["main"].exec(["touch", "/work/mine"])
        assert pod["main"].exec(["stat", "-c", "%u:%g", "/work/mine"]).stdout == "1000:2000\n"


def test_a_pod_has_a_cgroup_and_a_network_of_its_own(kubelet: Kubelet) -> None:
    root = kubelet.node.cgroups.path
    with kubelet.pod(manifests.parse(POD)) as pod:
        main, sidecar = pod["main"], pod["sidecar"]
        for container in (main, sidecar):
            assert f":{root}/kubepods/besteffort/pod{pod.uid}/" in (container.root() / "proc/1/cgroup").read_text()
        assert namespace(main.pid, "net") == namespace(sidecar.pid, "net")
        assert namespace(main.pid, "net") != namespace(os.getpid(), "net")
    assert cgroups.named(f"pod{pod.uid}") == []


def test_a_pod_may_have_a_user_namespace_of_its_own(kubelet: Kubelet) -> None:
    with kubelet.pod(manifests.parse(POD.replace("securityContext: {fsGroup: 2000}", "hostUsers: false"))) as pod:
        main, sidecar = pod["main"], pod["sidecar"]
        assert namespace(main.pid, "user") == namespace(sidecar.pid, "user")
        assert namespace(main.pid, "user") != namespace(os.getpid(), "user")
        assert "100000" in main.exec(["cat", "/proc/self/uid_map"]).stdout


def test_part_of_a_volume_is_bound_as_kubelet_does(kubelet: Kubelet) -> None:
    with kubelet.pod(manifests.parse(POD)) as pod:
        pod["main"].exec(["touch", "/part/file"])
        pod["main"].exec(["test", "-e", "/work/some/part/file"])
        assert [mount.mountpoint for mount in kubelet.node.mounts()] == [
            str(pod.directory / "volume-subpaths/work/main/1")
        ]


def test_mounts_propagate_to_who_asks_for_it(kubelet: Kubelet) -> None:
    with kubelet.pod(manifests.parse(POD)) as pod:
        volume = pod.volume_path(EmptyDir("work"))
        (volume / "mountpoint").mkdir()
        kubelet.node.run(["mount", "-t", "tmpfs", "tmpfs", volume / "mountpoint"])
        mounted = [mount.mountpoint for mount in pod["main"].mountinfo() if mount.mountpoint.endswith("/mountpoint")]
        assert mounted == ["/following/mountpoint"]
        kubelet.node.unmount(volume / "mountpoint")


def test_this_machine_sees_nothing_of_a_node(kubelet: Kubelet, node: Node) -> None:
    with kubelet.pod(manifests.parse(POD)):
        assert len(node.mounts()) == 1
        assert [mount for mount in mountinfo() if mount.mountpoint.startswith(str(node.directory))] == []


def test_what_ends_is_started_again(kubelet: Kubelet) -> None:
    with kubelet.pod(manifests.parse(POD)) as pod:
        first = pod["sidecar"].pid
        os.kill(first, 9)
        assert pod.wait_until_restarted("sidecar", 1).pid != first


def test_what_is_unhealthy_is_started_again(kubelet: Kubelet) -> None:
    probe = (
        "livenessProbe: {exec: {command: [test, -e, /work/seen]}, periodSeconds: 1, failureThreshold: 2}\n    command"
    )
    with kubelet.pod(manifests.parse(POD.replace('command: [sh, -c, "ls', f'{probe}: [sh, -c, "ls'))) as pod:
        wait_until(lambda: pod["main"].exec(["rm", "/work/seen"], check=False).returncode == 0, 60)
        pod.wait_until_restarted("main", 1)


def test_a_container_that_fails_is_told(kubelet: Kubelet) -> None:
    failing = POD.replace("echo first > /work/file", "echo because >&2; exit 3")
    with (
        pytest.raises(PodFailed, match=r"(?s)container first ended with 3.*because"),
        kubelet.pod(manifests.parse(failing)),
    ):
        pass


def test_what_is_left_of_a_pod_is_told(kubelet: Kubelet) -> None:
    with kubelet.new_pod(manifests.parse(POD)) as pod:
        (pod.directory / "left").touch()
        with pytest.raises(PodFailed, match="left"):
            pod.tear_down()
        (pod.directory / "left").unlink()
