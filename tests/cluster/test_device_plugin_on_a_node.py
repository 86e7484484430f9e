"""The device plugin with a real kubelet: sshfs mounts in place, in an image that has only what Debian has packaged."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.cluster import images
from tests.cluster.commands import execute
from tests.cluster.pods import applied
from tests.e2e.documented import block

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.node import ClusterNode

pytestmark = [pytest.mark.e2e, pytest.mark.long]

RESOURCE = "fusermount3-proxy.dev/fuse"
NAMESPACE = NAME = "fusermount3-device-plugin"
ALLOCATABLE = "jsonpath={.status.allocatable.fusermount3-proxy\\.dev/fuse}"
CDI = "/etc/cdi/fusermount3-proxy.json"


@contextlib.contextmanager
def plugin(node: ClusterNode, manifests: str = "device-plugin") -> Iterator[None]:
    """Install the plugin from this directory of packaging/kubernetes, and remove it, with the commands of the page."""

    def on_the_page(beginning: str) -> str:
        text = block("containers.md", beginning).text
        assert text.endswith("/device-plugin\n")
        return text.replace("/device-plugin\n", f"/{manifests}\n")

    try:
        execute(node, on_the_page("kubectl apply"))
        node.kubectl("--namespace", NAMESPACE, "rollout", "status", f"daemonset/{NAME}", "--timeout=180s")
        node.kubectl("wait", "nodes", "--all", f"--for={ALLOCATABLE}=1k", "--timeout=60s")
        yield
    finally:
        execute(node, on_the_page("kubectl delete"))
        node.kubectl("wait", "nodes", "--all", f"--for={ALLOCATABLE}=0", "--timeout=60s")


@pytest.mark.parametrize("manifests", ["device-plugin", "device-plugin-cdi"])
def test_a_container_mounts_in_place(node: ClusterNode, manifests: str) -> None:
    with plugin(node, manifests), applied(node, [pod()]) as running:
        running.wait_until_ready()
        for _ in range(2):
            running.execute("sshfs", "-F", "/etc/sshfs/config", "server:", "/home/user/mnt")
            assert running.execute("cat", "/home/user/mnt/hello").stdout == "hello\n"
            running.execute("fusermount3", "-u", "/home/user/mnt")
        assert running.execute("ls", "/home/user/mnt").stdout == ""
    file = node.seen(CDI)
    assert file.exists() == (manifests == "device-plugin-cdi")
    file.unlink(missing_ok=True)


def test_a_pod_that_kubelet_starts_while_there_is_no_plugin_fails_until_it_is_deleted(node: ClusterNode) -> None:
    with plugin(node):
        pass
    # No scheduler is asked whether the node has the resource: after a reboot, that was long ago.
    node.kubectl("apply", "--filename=-", input=yaml.safe_dump(pod(nodeName="node")))
    try:
        node.kubectl("wait", "--for=jsonpath={.status.phase}=Failed", "pod/device", "--timeout=60s")
        described = node.kubectl("describe", "pod", "device").stdout
        assert "UnexpectedAdmissionError" in described
        assert f"cannot allocate unhealthy devices {RESOURCE}, which is unexpected" in described
        execute(node, block("troubleshooting.md", "kubectl delete pods").text)
        assert node.kubectl("get", "pods", "--output=name").stdout == ""
    finally:
        node.kubectl("delete", "pod", "device", "--ignore-not-found")


def pod(**spec: str) -> dict[str, Any]:
    """Return a pod of one container that requests the device and is idle."""
    container = {
        "name": "app",
        "image": images.DEBIANS_SSHFS,
        "command": ["sh", "-c", "trap 'exit 0' TERM; sleep infinity & wait"],
        "resources": {"limits": {RESOURCE: 1}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "secret", "mountPath": "/etc/sshfs", "readOnly": True}],
    }
    restricted = {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "device"},
        "spec": {
            "containers": [container],
            "securityContext": restricted,
            "volumes": [{"name": "secret", "secret": {"secretName": "sshfs"}}],
            **spec,
        },
    }
