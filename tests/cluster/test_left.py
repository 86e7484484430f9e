"""What a test leaves on the node is noticed, so that the check after each test can fail."""

from __future__ import annotations

import subprocess
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.cluster.left import Left, left
from tests.lab import cgroups
from tests.lab.podman import PREFIX

if TYPE_CHECKING:
    from tests.cluster.node import ClusterNode

pytestmark = [pytest.mark.e2e, pytest.mark.long]

# Twice "pod" in a cgroup's name, or kubelet would remove it at a time of its own.
POD = f"{PREFIX}pod"
# Not a directory, which kubelet would remove, too.
FILE = f"/var/lib/kubelet/pods/{POD}"


def test_a_file_and_a_mount(node: ClusterNode) -> None:
    before = left(node)
    node.run(["touch", FILE])
    with_file = left(node)
    node.run(["mount", "--bind", FILE, FILE])
    with_mount = left(node)
    node.run(["umount", FILE])
    node.run(["rm", FILE])
    assert with_file == before._replace(directories=sorted([*before.directories, POD]))
    assert with_mount == with_file._replace(mounts=sorted([*before.mounts, FILE]))


def test_a_cgroup(node: ClusterNode) -> None:
    before = left(node)
    cgroup = cgroups.make(f"{node.cgroups}/kubepods/besteffort/pod{POD}")
    found = left(node)
    cgroup.rmdir()
    assert found == before._replace(cgroups=sorted([*before.cgroups, str(cgroup)]))


def test_a_process(node: ClusterNode) -> None:
    before = left(node)
    with subprocess.Popen(node.command("cat"), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"begun\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"begun\n"  # it has its name by now
        found = left(node)
    assert found.processes - before.processes == {"cat": 1}


def test_what_was_there_before_is_not_counted() -> None:
    before = Left(["a"], [], ["pod"], Counter({"sh": 2, "bridge": 1}), "TABLE\nold\n")
    after = Left(["a", "a"], ["cgroup"], [], Counter({"sh": 3}), "TABLE\nnew\n")
    assert after.beyond(before) == Left(["a"], ["cgroup"], [], Counter({"sh": 1}), "new")
    assert not any(before.beyond(before))
