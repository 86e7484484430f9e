"""csi-sanity against the driver as it runs in the cluster, with volumes of a pod that kubelet has made."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.callers.conftest import or_not_run
from tests.cluster.images import SHELL
from tests.cluster.pods import applied
from tests.csi import build, sanity
from tests.csi.controller import Controller
from tests.csi.protos import described_with_imports
from tests.lab.commands import run

if TYPE_CHECKING:
    from tests.cluster.long.conftest import Figure
    from tests.cluster.node import ClusterNode

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SOCKET = "/var/lib/kubelet/plugins/csi.fusermount3-proxy.dev/csi.sock"
# csi-sanity wants volumes at DIRECTORY/target and DIRECTORY/other_target; the driver has those of a pod at NAME/mount.
_PLACES = {"target": "/mount", "other_target": "-other/mount"}
_LOOK = """#!/bin/sh
case $1 in */target) path=${1%/target}/mount;; *) path=$1;; esac
if [ -d "$path" ]; then echo directory; elif [ -e "$path" ]; then echo other; else echo not_found; fi
"""

POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "sanity"},
    "spec": {
        "containers": [
            {
                "name": "app",
                "image": SHELL,
                "command": ["sh", "-c", "trap 'exit 0' TERM; sleep infinity & wait"],
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                "volumeMounts": [{"name": "fuse-fd-passing", "mountPath": "/run/fusermount3-proxy"}],
            }
        ],
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
        "volumes": [{"name": "fuse-fd-passing", "emptyDir": {}}],
    },
}


def placed(path: str) -> str:
    """Return where the driver has the volume that csi-sanity wants at this path."""
    directory, _, name = path.rpartition("/")
    return directory + _PLACES[name] if name in _PLACES else path


def test_csi_sanity_finds_nothing_wrong_in_the_cluster(node: ClusterNode, figure: Figure) -> None:
    with or_not_run():
        program, proto = build.csi_sanity(), build.official_proto("v1.13.0")
    with applied(node, [POD]) as pod, tempfile.TemporaryDirectory(dir=node.seen("/run")) as temporary:
        pod.wait_until_ready()
        uid = node.kubectl("get", "pod", pod.name, "--output=jsonpath={.metadata.uid}").stdout
        volumes = f"/var/lib/kubelet/pods/{uid}/volumes"
        directory = Path(temporary)
        here = f"/run/{directory.name}"
        shutil.copy(program, directory / program.name)
        (directory / "parameters").write_text(f"csi.storage.k8s.io/pod.uid: {uid}\n")
        (directory / "look").write_text(_LOOK)
        (directory / "look").chmod(0o755)
        csi = node.seen(f"{volumes}/kubernetes.io~csi")
        other = csi / "sanity-other"
        other.mkdir(parents=True)  # as kubelet does with the directory of a volume
        with Controller(
            directory / "sock", node.seen(SOCKET), described_with_imports(proto.parent, proto.name), placed
        ):
            arguments = sanity.arguments(
                f"{here}/sock",
                f"{volumes}/kubernetes.io~csi/sanity",
                f"{here}/staging",
                f"{here}/parameters",
                f"{here}/report",
            )
            command = node.command(f"{here}/{program.name}", f"--csi.checkpathcmd={here}/look", *arguments)
            said = run(command, timeout=300).stdout
        figure("tests passed", sanity.passed(directory / "report", said))
        other.rmdir()
        csi.rmdir()
        assert list(node.seen(f"{volumes}/kubernetes.io~empty-dir/fuse-fd-passing").iterdir()) == []
