"""The controller on a node of the tests: its image, built as `make controller-image` builds it, and its manifests."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from tests.cluster import configuration, images
from tests.cluster.commands import execute
from tests.cluster.pods import Pod
from tests.e2e.documented import block, blocks
from tests.kubernetes.objects import CONTROLLER, KUSTOMIZATION
from tests.lab.cache import Cache, recipe_hash
from tests.lab.commands import run
from tests.lab.pypi import ENVIRONMENT, SOURCES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.node import ClusterNode

PAGE = "templates.md"
NAME = NAMESPACE = "fusermount3-controller"
DEPLOYMENT = f"deployment/{NAME}"
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:{NAME}"

#: What is in the image.
_IN_IMAGE = ("controller", "broker/fusermount3_broker/messages", "fusermount3_proxy/__init__.py", "packaging/container")
_WHEELS = "packaging/container/controller_wheels.py"
_DAYS = 3


def image() -> Path:
    """Return the directory with the archive of the image, of this working tree."""
    paths = sorted(path for name in _IN_IMAGE for path in _files(SOURCES / name))
    parts = [part for path in paths for part in (str(path.relative_to(SOURCES)), path.read_bytes())]
    of_wheels = recipe_hash(*((SOURCES / name).read_text() for name in ("constraints.txt", "setup.cfg", _WHEELS)))

    def fetch(directory: Path) -> None:
        run([sys.executable, SOURCES / _WHEELS, directory], timeout=600)

    wheels = Cache().entry("controller-wheels", of_wheels, fetch)

    def build(directory: Path) -> None:
        script = SOURCES / "packaging/container/build-controller"
        run(["env", f"PIP={ENVIRONMENT}/bin/pip", script, wheels, directory], timeout=600)

    found = Cache().entry("controller-image", recipe_hash(of_wheels, *parts), build)
    for other in found.parent.glob("controller-image-*"):
        if other != found and time.time() - other.stat().st_mtime > _DAYS * 86400:
            shutil.rmtree(other)
    return found


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file() and each.suffix != ".pyc"]


@contextlib.contextmanager
def installed(node: ClusterNode, manifests: Path = CONTROLLER) -> Iterator[None]:
    """Install it from these manifests as docs/templates.md says, with the template for sshfs; then remove it.

    The node has no kube-proxy, so nobody is behind the address of the API server's Service: the pods are told another.
    """
    for archive in image().glob("*.tar"):
        images.load_archive(node, archive)
    where = {"KUBERNETES_SERVICE_HOST": configuration.ADDRESS, "KUBERNETES_SERVICE_PORT": "6443"}
    env = [{"name": name, "value": value} for name, value in where.items()]
    patch = [{"op": "add", "path": "/spec/template/spec/containers/0/env", "value": env}]
    with tempfile.TemporaryDirectory() as directory:
        (page,) = [each.text for each in blocks() if each.page == PAGE and each.text.startswith(f"# {KUSTOMIZATION}")]
        overlay = yaml.safe_load(page.replace("REGISTRY/", "localhost/"))
        # kustomize takes no absolute path.
        overlay["resources"] = [os.path.relpath(manifests, Path(directory).resolve())]
        overlay["patches"] = [{"target": {"kind": "Deployment"}, "patch": yaml.safe_dump(patch)}]
        Path(directory, KUSTOMIZATION).write_text(yaml.safe_dump(overlay))
        Path(directory, "packaging").symlink_to(SOURCES / "packaging")
        try:
            execute(node, block(PAGE, "kubectl apply --kustomize").text, Path(directory))
            wait_until_ready(node)
            yield
        finally:
            node.kubectl("delete", "--kustomize", directory, "--timeout=120s", check=False)


def wait_until_ready(node: ClusterNode) -> None:
    """Return when both replicas are ready."""
    rolled = node.kubectl(
        *("--namespace", NAMESPACE, "rollout", "status", DEPLOYMENT, "--timeout=180s"), check=False, timeout=200
    )
    assert rolled.returncode == 0, description(node)


def kill(node: ClusterNode) -> None:
    """Kill both replicas, which kubelet starts again."""
    names = node.kubectl("--namespace", NAMESPACE, "get", "pods", "--output=jsonpath={.items[*].metadata.name}").stdout
    for name in names.split():
        Pod(node, name, NAMESPACE).kill("controller")


def description(node: ClusterNode) -> str:
    """Return what kubectl says of the pods, and what they have logged."""
    parts = (
        ["describe", "pods"],
        ["logs", "--selector", f"app.kubernetes.io/name={NAME}", "--tail=40", "--prefix"],
    )
    return "\n".join(node.kubectl("--namespace", NAMESPACE, *words, check=False).stdout for words in parts)
