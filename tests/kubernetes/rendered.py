"""What helm and kustomize make of packaging/kubernetes, by the names of the objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.kubernetes import objects as known
from tests.kubernetes.objects import CHART, name_of, objects
from tests.lab.commands import run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kubernetes.objects import Object
    from tests.lab.commands import Argument

NAMESPACE = "fusermount3-proxy"
#: helm doesn't know which Kubernetes version it is built for, so its command line names one.
OLDEST = ("--kube-version", known.OLDEST)
OLD_DRIVER = "meta-fuse-csi-plugin.csi.storage.pfn.io"


def rendered_by_helm(
    helm: Path, *options: str, release: str = "fusermount3-broker", namespace: str = NAMESPACE
) -> dict[str, Object]:
    """Return the objects that the chart makes, by their names."""
    command: list[Argument] = [helm, "template", release, CHART, "--namespace", namespace, *OLDEST, *options]
    output = run(command).stdout
    return {name_of(each): each for each in objects(output)}


def rendered_by_kustomize(kustomize: Path, directory: Path) -> dict[str, Object]:
    output = run([kustomize, "build", directory]).stdout
    return {name_of(each): each for each in objects(output)}
