"""The cgroups of the tests' pods: the broker recognizes them as pods', and no other program here uses them."""

from __future__ import annotations

import signal
import subprocess
import uuid

import pytest

from fusermount3_broker.kernel.cgroups import pod_of
from tests.lab import cgroups
from tests.lab.cgroups import CgroupRoot
from tests.lab.node import Node

pytestmark = pytest.mark.e2e

POD = str(uuid.uuid4())


def test_the_broker_knows_them_as_those_of_a_pod() -> None:
    root = CgroupRoot()
    for path in (root.pod(POD), f"{root.pod(POD)}/container", root.pod_by_systemd(POD)):
        assert pod_of(f"0::{path}\n".encode()) == POD


def test_each_node_has_some_of_its_own_which_end_with_it() -> None:
    """Their names are not those of a kubelet that may run on this machine."""
    with Node() as one:
        made = [cgroups.make(path) for path in (one.cgroups.pod(POD), one.cgroups.pod_by_systemd(POD))]
        with Node() as other:
            made.append(cgroups.make(other.cgroups.pod(POD)))
            assert all(path.exists() for path in made)
            tops = [path.relative_to(cgroups.hierarchy()).parts[0] for path in made]
            assert [top.startswith("kubepods") for top in tops] == [False] * 3
        assert [path.exists() for path in made] == [True, True, False]
        assert cgroups.named(f"pod{POD}") == [str(made[0])]
    assert cgroups.named(one.cgroups.path[1:]) == []


def test_one_in_which_a_process_is_left_is_no_success_and_does_not_stay() -> None:
    root = CgroupRoot()
    with subprocess.Popen(["sleep", "infinity"]) as left:
        try:
            (cgroups.make(root.pod(POD)) / "cgroup.procs").write_text(str(left.pid))
            with pytest.raises(OSError, match="busy"):
                root.remove(0.1)
            assert left.wait(10) == -signal.SIGKILL
            assert cgroups.named(root.path[1:]) == []
        finally:
            left.kill()
