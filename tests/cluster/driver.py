"""The driver on a node of the tests, installed by the commands in docs/kubernetes.md from packaging/kubernetes."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tests.cluster.commands import execute
from tests.e2e.documented import block, blocks
from tests.kubernetes.objects import BASE, KUSTOMIZATION, PACKAGING, objects

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.node import ClusterNode

PAGE = "kubernetes.md"
NAMESPACE = "fusermount3-proxy"
DAEMONSET = "daemonset/fusermount3-broker"
NAME = "csi.fusermount3-proxy.dev"
STATE = f"/var/lib/fusermount3-broker-csi/{NAME}"
STAYS = (STATE, f"/var/lib/kubelet/plugins/{NAME}")
"""The directories that a node keeps when the driver is removed."""


@contextlib.contextmanager
def kustomization(manifests: Path = BASE) -> Iterator[Path]:
    """Yield a directory with the kustomization.yaml of docs/kubernetes.md, for these manifests and the node's image."""
    (page,) = [each.text for each in blocks() if each.page == PAGE and each.text.startswith(f"# {KUSTOMIZATION}")]
    overlay = yaml.safe_load(page.replace("REGISTRY/", "localhost/"))
    with tempfile.TemporaryDirectory() as directory:
        # kustomize takes no absolute path.
        overlay["resources"] = [os.path.relpath(manifests, Path(directory).resolve())]
        Path(directory, KUSTOMIZATION).write_text(yaml.safe_dump(overlay))
        yield Path(directory)


def install(node: ClusterNode) -> None:
    """Apply the base, and wait until the driver runs."""
    with kustomization() as directory:
        execute(node, block(PAGE, "kubectl apply --kustomize").text, directory)


def remove(node: ClusterNode) -> None:
    with kustomization() as directory:
        execute(node, block(PAGE, "kubectl delete --kustomize").text, directory)


def what_there_is(node: ClusterNode) -> str:
    """Return the names of the driver's objects in the cluster."""
    namespace = ("get", "namespace", NAMESPACE, "--output=name", "--ignore-not-found")
    return node.kubectl(*namespace).stdout + node.kubectl("get", "csidriver", "--output=name").stdout


def is_installed(node: ClusterNode) -> bool:
    return bool(node.kubectl("--namespace", NAMESPACE, "get", DAEMONSET, "--ignore-not-found").stdout)


def example(name: str) -> list[dict[str, Any]]:
    """Return the objects of an example; the node has their images (`images.load`)."""
    return objects((PACKAGING / "examples" / f"{name}.yaml").read_text())


def broker(node: ClusterNode, *words: str) -> str:
    """Return what fusermount3-broker says in the DaemonSet's pod."""
    command = ["exec", DAEMONSET, "--container", "broker", "--", "fusermount3-broker", *words]
    return node.kubectl("--namespace", NAMESPACE, *command).stdout
