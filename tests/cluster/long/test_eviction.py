"""kubelet evicts a pod whose FUSE container writes more into an emptyDir than its sizeLimit allows.

kubelet gives such a pod one second. What the pod's status says of the exit codes is not asserted: kubelet removes the
containers of an evicted pod at once, and if that comes before it has looked at them, it reports the exit code 137 with
the reason ContainerStatusUnknown for a container that ended with 0. containerd knows how they ended.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import yaml

from tests.cluster.left import left
from tests.cluster.long import writers
from tests.cluster.long.writers import Watched
from tests.cluster.pods import Pod, wait_until_it_says
from tests.e2e.conftest import wait_until
from tests.kubernetes.objects import containers, the

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.cluster.long.conftest import Figure
    from tests.cluster.node import ClusterNode

pytestmark = [pytest.mark.e2e, pytest.mark.long]

_FILL = "dd if=/dev/zero of=/scratch/file bs=1M count=4"
DETECTED = 90
"""Seconds in which kubelet notices that the limit is exceeded: it looks at intervals."""
ENDED = 15
"""Seconds in which an evicted pod has ended, also if its app hangs in the volume; kubelet's own limits add up to 4."""


@pytest.mark.parametrize("program", ["works", "hangs"])
@pytest.mark.parametrize("name", ["sshfs", "eager"])
def test_a_pod_is_evicted_whose_fuse_container_exceeds_a_limit(
    node: ClusterNode, figure: Figure, tmp_path: Path, name: str, program: str
) -> None:
    with deployed(node, name):
        (pod,) = pods_of(node, name)
        pod.wait_until_ready()
        assert Watched(pod).goes_on().failed == 0
        of_the_pod = uid(pod)
        identities = {each: pod.identity(each) for each in ("app", "sshfs")}
        with recorded_exits(node, tmp_path / "events") as exits:
            pod.execute("sh", "-c", _FILL, container="sshfs")
            if program == "hangs":
                pod.kill("sshfs", "SIGSTOP")
            wait_until(lambda: "Evicted" in reasons(node, pod), DETECTED)
            evicted = time.monotonic()
            wait_until(lambda: set(identities.values()) <= exits().keys(), ENDED)
            figure("seconds until its containers had ended", round(time.monotonic() - evicted, 1))
            wait_until(lambda: not kept(node, of_the_pod), ENDED)
            figure("seconds until its mounts and cgroups were gone", round(time.monotonic() - evicted, 1))
            status = exits()[identities["app"]]
        figure("exit status of the app", status)
        if program == "works":
            assert status == 0
        (replacement,) = [each for each in pods_of(node, name) if each.name != pod.name]
        replacement.wait_until_ready()
        wait_until_it_says(replacement, *writers.reads(name))
        assert Watched(replacement).goes_on().failed == 0


@contextlib.contextmanager
def deployed(node: ClusterNode, name: str) -> Iterator[None]:
    """Have a Deployment of the example with `writers`, whose FUSE container has an emptyDir with a limit."""
    objects = writers.example(name)
    pod = the("Pod", objects)
    (sidecar,) = [each for each in containers(pod) if each["name"] == "sshfs"]
    sidecar["volumeMounts"].append({"name": "scratch", "mountPath": "/scratch"})
    pod["spec"]["volumes"].append({"name": "scratch", "emptyDir": {"sizeLimit": "1Mi"}})
    labels = {"app": name}
    deployment: dict[str, Any] = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod["spec"]},
        },
    }
    node.kubectl("apply", "--filename=-", input=yaml.safe_dump(deployment))
    try:
        wait_until(lambda: pods_of(node, name))
        yield
    finally:
        node.kubectl("delete", "deployment", name, "--cascade=foreground", "--timeout=120s")


def pods_of(node: ClusterNode, name: str) -> list[Pod]:
    """Return the pods of the Deployment, also those that have ended."""
    names = node.kubectl("get", "pods", f"--selector=app={name}", "--output=jsonpath={.items[*].metadata.name}").stdout
    return [Pod(node, each) for each in names.split()]


def uid(pod: Pod) -> str:
    return pod.node.kubectl("get", "pod", pod.name, "--output=jsonpath={.metadata.uid}").stdout


def kept(node: ClusterNode, of_the_pod: str) -> list[str]:
    """Return the mounts and cgroups of a pod. Its directory stays as long as the API server has the pod."""
    found = left(node)
    return [each for each in (*found.mounts, *found.cgroups) if of_the_pod in each]


def reasons(node: ClusterNode, pod: Pod) -> list[str]:
    """Return the reasons of the pod's events."""
    selector = f"--field-selector=involvedObject.name={pod.name}"
    return node.kubectl("get", "events", selector, "--output=jsonpath={.items[*].reason}").stdout.split()


@contextlib.contextmanager
def recorded_exits(node: ClusterNode, file: Path) -> Iterator[Callable[[], dict[str, int]]]:
    """Yield a function that returns the exit status of each container that has ended since, by containerd's name."""

    def exits() -> dict[str, int]:
        complete = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("}\n")]
        found = [json.loads(line.partition(" /tasks/exit ")[2]) for line in complete if " /tasks/exit " in line]
        return {each["id"]: each.get("exit_status", 0) for each in found}

    with file.open("wb") as output:
        recorder = subprocess.Popen(node.command("ctr", "--namespace", "k8s.io", "events"), stdout=output)
    try:
        yield exits
    finally:
        for each in psutil.Process(recorder.pid).children():  # of nsenter
            each.kill()
        recorder.wait()
