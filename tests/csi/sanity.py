"""csi-sanity of kubernetes-csi/csi-test: how it is run, and what its report must say of our node plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    from pathlib import Path

    from tests.lab.commands import Argument

NOT_CLAIMED = {
    "NodeStageVolume": "what a volume needs on a node is made for each pod that has it: there is nothing to stage",
    "NodeUnstageVolume": "as above",
    "NodeExpandVolume": "how large a volume is, is a matter of the FUSE program's",
    "NodeGetStorageHealth": "there is no storage behind the volumes that the broker would know",
}
"""Groups of tests, by the method, and why the plugin doesn't have it."""

_GROUPS = ("Node Service", "Identity Service")


def arguments(
    endpoint: Argument, mounts: Argument, staging: Argument, parameters: Argument, report: Argument
) -> list[str]:
    """Return the arguments: the plugin's socket, two directories that it makes, a file, and one that it writes."""
    return [
        f"--csi.endpoint=unix://{endpoint}",
        f"--csi.mountdir={mounts}",
        f"--csi.stagingdir={staging}",
        f"--csi.testvolumeparameters={parameters}",
        f"--ginkgo.focus={'|'.join(_GROUPS)}",
        "--ginkgo.no-color",
        f"--ginkgo.junit-report={report}",
    ]


def passed(report: Path, said: str) -> int:
    """Return how many tests have passed. AssertionError if one has failed, or was skipped that is not NOT_CLAIMED."""
    results = {
        case.attrib["name"].removeprefix("[It] "): case.attrib["status"]
        for case in ElementTree.parse(report).iter("testcase")
        if case.attrib["name"].removeprefix("[It] ").startswith(_GROUPS)
    }
    skipped = {name for name, status in results.items() if status == "skipped"}
    not_claimed = {name for name in results if name.split()[2] in NOT_CLAIMED}
    assert skipped == not_claimed, said
    assert {name.split()[2] for name in skipped} == NOT_CLAIMED.keys()
    assert {status for name, status in results.items() if name not in skipped} == {"passed"}
    for expected in ("should work", "should be idempotent", "NodeUnpublishVolume should remove target path"):
        assert f"Node Service {expected}" in results
    return len(results) - len(skipped)
