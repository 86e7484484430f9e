"""`make cluster`, in a directory of its own; beside the node of the other tests, of which it must not know."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster.node import ClusterNode
from tests.lab.cgroups import CGROUPS
from tests.lab.commands import run

if TYPE_CHECKING:
    from tests.lab.commands import Argument

pytestmark = [pytest.mark.e2e, pytest.mark.long]

ROOT = Path(__file__).parents[2]


def test_it_tells_of_a_pod_that_reads_a_file_and_is_removed(node: ClusterNode, tmp_path: Path) -> None:
    directory = tmp_path / "node"
    command: list[Argument] = ["env", "--chdir", ROOT, sys.executable, "-m", "tests.cluster"]
    told = run([*command, "up", directory], timeout=600).stdout
    try:
        assert "cat /data/hello\n   | hello\n" in told
        pods = run([directory / "kubectl", "get", "pods", "--all-namespaces", "--output=name"]).stdout.split()
        cgroup = ClusterNode(directory).cgroups
        assert [*CGROUPS.glob(f"*{cgroup}/kubepods")]
        assert {"pod/server", "pod/sshfs"} <= set(pods)
        assert "pod/sshfs" not in node.kubectl("get", "pods", "--output=name").stdout
        assert run([directory / "in", "cat", "/proc/1/comm"]).stdout == "catatonit\n"
    finally:
        run([*command, "down", directory])
    assert not directory.exists()
    assert [*CGROUPS.glob(f"*{cgroup}")] == []
