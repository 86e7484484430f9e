"""Pods on a node of the tests: started from objects, looked into with kubectl, and deleted."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

import yaml

from tests.cluster import driver
from tests.kubernetes.objects import Object, the
from tests.lab.pace import SLOWNESS

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cluster.node import ClusterNode

READY = 120
"""Seconds that a pod has to become ready."""


class Pod:
    """A pod, in the namespace `default` unless another one is given."""

    def __init__(self, node: ClusterNode, name: str, namespace: str = "default") -> None:
        self.node = node
        self.name = name
        self._in = f"--namespace={namespace}"

    def wait_until_ready(self, seconds: float = READY) -> None:
        """Return when the pod is ready. AssertionError with what is known of it if it is not."""
        wait = ["wait", "--for=condition=Ready", f"pod/{self.name}", self._in, f"--timeout={SLOWNESS * seconds:.0f}s"]
        assert self.node.kubectl(*wait, check=False).returncode == 0, self.description()

    def description(self) -> str:
        """Return what kubectl says of the pod, with its events and the last lines of its containers and the broker."""
        parts = (
            ["describe", "pod", self.name, self._in],
            ["logs", self.name, self._in, "--all-containers", "--prefix", "--tail=20"],
            ["logs", driver.DAEMONSET, "--namespace", driver.NAMESPACE, "--container=broker", "--tail=20"],
        )
        return "\n".join(self.node.kubectl(*words, check=False).stdout for words in parts)

    def execute(self, *argv: str, container: str = "app", check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command in a container."""
        return self.node.kubectl("exec", self.name, self._in, f"--container={container}", "--", *argv, check=check)

    def status(self, container: str) -> dict[str, Any]:
        """Return the status of a container, as the API has it."""
        status = json.loads(self.node.kubectl("get", "pod", self.name, self._in, "--output=json").stdout)["status"]
        every = [*status.get("initContainerStatuses", []), *status["containerStatuses"]]
        found: dict[str, Any] = next(each for each in every if each["name"] == container)
        return found

    def wait_until_restarted(self, container: str, restarts: int, seconds: float = 60) -> None:
        """Return when kubelet has restarted the container so often, and it runs."""
        give_up = time.monotonic() + SLOWNESS * seconds
        while (status := self.status(container))["restartCount"] < restarts or "running" not in status["state"]:
            assert time.monotonic() < give_up, self.description()
            time.sleep(0.2)

    def identity(self, container: str) -> str:
        """Return the name that the container has in the node's containerd."""
        return str(self.status(container)["containerID"]).partition("://")[2]

    def seen(self, container: str, path: str) -> Path:
        """Return a path at which this process sees what the container has at `path`, an absolute one."""
        listed = self.node.run(["ctr", "--namespace", "k8s.io", "tasks", "list"]).stdout.splitlines()
        (pid,) = [line.split()[1] for line in listed if line.split()[0] == self.identity(container)]
        return self.node.seen(f"/proc/{pid}/root{path}")

    def kill(self, container: str, signal: str = "SIGKILL") -> None:
        """Send the first process of a container a signal, as the kernel does when its memory is used up."""
        identity = self.identity(container)
        self.node.run(["ctr", "--namespace", "k8s.io", "tasks", "kill", "--signal", signal, identity])


def restricted(source: Object, name: str = "app") -> Object:
    """Return a pod as Pod Security `restricted` wants it, whose only container has a volume of this source at /data."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "runAsGroup": 1000,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "app",
                    "image": "busybox:1.37",
                    "command": ["sh", "-c", "trap 'exit 0' TERM; sleep infinity & wait"],
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                }
            ],
            "volumes": [{"name": "data", **source}],
        },
    }


@contextlib.contextmanager
def applied(node: ClusterNode, objects: list[dict[str, Any]]) -> Iterator[Pod]:
    """Create the objects, among them one pod, and delete them after the block."""
    manifests = yaml.safe_dump_all(objects)
    try:
        node.kubectl("apply", "--filename=-", input=manifests)
        yield Pod(node, the("Pod", objects)["metadata"]["name"])
    finally:
        node.kubectl("delete", "--filename=-", "--ignore-not-found", "--timeout=120s", input=manifests)


def wait_until_it_says(pod: Pod, argv: list[str], expected: str, seconds: float = 60) -> None:
    """Wait until the command in the container `app` prints this. AssertionError if it does not."""
    give_up = time.monotonic() + SLOWNESS * seconds
    while (said := pod.execute(*argv, check=False)).stdout != expected:
        assert time.monotonic() < give_up, f"{said}\n{pod.description()}"
        time.sleep(0.2)
