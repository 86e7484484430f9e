"""What pods leave on a node when they are gone, or rather must not."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from tests.cluster import driver
from tests.lab import cgroups, podman

if TYPE_CHECKING:
    from tests.cluster.node import ClusterNode

_PODS = "/var/lib/kubelet/pods"


class Left(NamedTuple):
    """What there is of pods. Of the pods that stay, only what does not change while they run."""

    mounts: list[str]
    """The mountpoints of FUSE filesystems, and those of all in kubelet's directory of pods."""
    cgroups: list[str]
    """The pods' cgroups, in all hierarchies."""
    directories: list[str]
    """kubelet's directories of pods."""
    processes: Counter[str]
    """The names of the processes outside of pods; zombies, too."""
    broker: str
    """What the broker has mounted; empty if there is no broker."""

    def beyond(self, before: Left) -> Left:
        """Return what there is now and was not there before; of the broker's answer, the lines that are new."""
        return Left(
            sorted((Counter(self.mounts) - Counter(before.mounts)).elements()),
            sorted((Counter(self.cgroups) - Counter(before.cgroups)).elements()),
            sorted((Counter(self.directories) - Counter(before.directories)).elements()),
            self.processes - before.processes,
            "\n".join((Counter(self.broker.splitlines()) - Counter(before.broker.splitlines())).elements()),
        )


def left(node: ClusterNode) -> Left:
    """Return what there is of pods on the node now."""
    found = node.mounts()
    return Left(
        sorted(each.mountpoint for each in found if each.is_fuse or each.mountpoint.startswith(f"{_PODS}/")),
        sorted(
            f"{directory}/{name}"
            for top in cgroups.hierarchies()
            for directory, names, _ in os.walk(f"{top}{node.cgroups}")
            for name in names
            if name.startswith("pod")
        ),
        sorted(path.name for path in node.seen(_PODS).iterdir()),
        Counter(_outside_of_pods(node)),
        driver.broker(node, "mounts") if driver.is_installed(node) else "",
    )


def _outside_of_pods(node: ClusterNode) -> list[str]:
    """Return the names of the node's processes that are in no pod's cgroup, and of zombies that process 1 forgets."""
    namespace = Path(f"/proc/{node.pid}/ns/pid").readlink()
    adopted = {each.pid for each in psutil.Process(node.pid).children()}
    names = []
    for pid in podman.all_pids():
        # A zombie has no namespaces any more.
        if podman.namespace_of(pid) == namespace or pid in adopted:
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if f"{node.cgroups}/" not in Path(f"/proc/{pid}/cgroup").read_text():
                    names.append(psutil.Process(pid).name())
    return names
