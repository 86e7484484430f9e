"""The driver on a node of the tests, installed by the commands in docs/kubernetes.md from packaging/kubernetes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tests.cluster.images import BROKER, LIVENESSPROBE, REGISTRAR, SHELL, SSHFS_WITH_PROXY
from tests.kubernetes.objects import BASE, PACKAGING, objects

if TYPE_CHECKING:
    from tests.cluster.node import ClusterNode

NAMESPACE = "fusermount3-proxy"
DAEMONSET = "daemonset/fusermount3-broker"
_IMAGES = {
    "fusermount3-broker": BROKER,
    "registry.k8s.io/sig-storage/csi-node-driver-registrar": REGISTRAR,
    "registry.k8s.io/sig-storage/livenessprobe": LIVENESSPROBE,
}
_OF_EXAMPLES = {"busybox:1.37": SHELL, "example/app:1.0": SSHFS_WITH_PROXY, "example/sshfs:1.0": SSHFS_WITH_PROXY}


def install(node: ClusterNode) -> None:
    """Apply the base with the images that the node has, and wait until the driver runs."""
    images = [
        {"name": name, "newName": image.partition(":")[0], "newTag": image.partition(":")[2]}
        for name, image in _IMAGES.items()
    ]
    with tempfile.TemporaryDirectory() as overlay:
        # kustomize takes no absolute path.
        kustomization = {"resources": [os.path.relpath(BASE, Path(overlay).resolve())], "images": images}
        Path(overlay, "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        node.kubectl("apply", "--kustomize", overlay)
    node.kubectl("--namespace", NAMESPACE, "rollout", "status", DAEMONSET, "--timeout=180s")


def example(name: str) -> list[dict[str, Any]]:
    """Return the objects of an example, with the images that the node has for sshfs and the shell."""
    found = objects((PACKAGING / "examples" / f"{name}.yaml").read_text())
    for each in found:
        if each["kind"] == "Pod":
            for container in (*each["spec"].get("initContainers", []), *each["spec"]["containers"]):
                container["image"] = _OF_EXAMPLES[container["image"]]
    return found


def broker(node: ClusterNode, *words: str) -> str:
    """Return what fusermount3-broker says in the DaemonSet's pod."""
    command = ["exec", DAEMONSET, "--container", "broker", "--", "fusermount3-broker", *words]
    return node.kubectl("--namespace", NAMESPACE, *command).stdout
