"""Test the real broker as node plugin with csi-sanity of kubernetes-csi/csi-test.

Its tests of node plugins need volumes, which only a controller creates; so a `Controller` stands in front of the
plugin. Its tests of controllers are excluded, because the controller is not part of this project. It skips tests of
capabilities that the plugin doesn't claim: `sanity.NOT_CLAIMED`. No other test is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.csi import sanity
from tests.csi.controller import Controller
from tests.csi.protos import described_with_imports
from tests.lab.broker import Broker
from tests.lab.commands import run
from tests.lab.podman import mountinfo

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e

POD = "0d4f6a2e-7b7a-4b54-9f5e-3f9fd3a1a111"


@pytest.fixture
def kubelet_directory(tmp_path: Path) -> Path:
    """The directory of kubelet, in which a pod has an emptyDir for the socket."""
    tmp_path.chmod(0o755)
    directory = tmp_path / "kubelet"
    (directory / "pods" / POD / "volumes/kubernetes.io~empty-dir/fuse-fd-passing").mkdir(parents=True)
    return directory


@pytest.fixture
def plugin(tmp_path: Path, kubelet_directory: Path) -> Iterator[Path]:
    """The socket of a broker that is the node plugin. Afterwards, no mount or file of a volume may be left."""
    endpoint = tmp_path / "csi.sock"
    options = (f"--endpoint=unix://{endpoint}", "--node-id=node-1", f"--kubelet-dir={kubelet_directory}")
    with Broker(service=("csi", *options)) as broker:
        broker.wait_for("the CSI plugin serves on")
        yield endpoint
        assert broker.records("internal error") == []
        # Only here: other tests start containers meanwhile, which have mounts of their own.
        assert [mount for mount in mountinfo() if mount.mountpoint.startswith(f"{tmp_path}/")] == []
        assert [path for path in kubelet_directory.rglob("*") if not path.is_dir()] == []


def test_csi_sanity_finds_nothing_wrong(
    tmp_path: Path, kubelet_directory: Path, plugin: Path, csi_sanity: Path, official_protos: dict[str, Path]
) -> None:
    proto = official_protos["v1.13.0"]
    parameters = tmp_path / "parameters.yaml"
    parameters.write_text(f"csi.storage.k8s.io/pod.uid: {POD}\n")
    report = tmp_path / "report.xml"
    with Controller(tmp_path / "all.sock", plugin, described_with_imports(proto.parent, proto.name)):
        mounts, staging = kubelet_directory / "sanity", tmp_path / "staging"
        arguments = sanity.arguments(tmp_path / "all.sock", mounts, staging, parameters, report)
        said = run([csi_sanity, *arguments], timeout=300).stdout
    sanity.passed(report, said)
