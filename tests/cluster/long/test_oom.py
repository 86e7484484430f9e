"""A FUSE container exceeds the memory that its pod allows it, and the kernel kills it."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.cluster.long import writers
from tests.cluster.long.writers import Watched
from tests.cluster.pods import applied
from tests.kubernetes.objects import containers, the

if TYPE_CHECKING:
    from tests.cluster.long.conftest import Figure
    from tests.cluster.node import ClusterNode

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SEEN = {"Transport endpoint is not connected", "Input/output error", "Software caused connection abort"}
"""What the app may be told: that sshfs has ended, or, if the kernel has killed only its ssh so far, that it fails."""

ENDED = {128 + signal.SIGKILL, 1}
"""The status of a container whose sshfs the kernel has killed, or its ssh first, upon which sshfs has ended by itself.
containerd may call either `Error`: with cgroup v1, it hears of the memory and of the end by two ways."""

LIMIT = "48Mi"
# A file in memory counts for the container that writes it, and its /dev/shm takes 64 MiB. The kernel frees none of that
# when it kills a process, so it kills all of them.
USE_MEMORY = "dd if=/dev/zero of=/dev/shm/file bs=64k"


@pytest.mark.parametrize("name", ["sshfs", "eager"])
def test_the_memory_of_a_fuse_container_is_used_up(node: ClusterNode, figure: Figure, name: str) -> None:
    objects = writers.example(name)
    (sidecar,) = [each for each in containers(the("Pod", objects)) if each["name"] == "sshfs"]
    sidecar["resources"] = {"limits": {"memory": LIMIT}}
    with applied(node, objects) as pod:
        pod.wait_until_ready()
        watched = Watched(pod)
        pod.execute("sh", "-c", USE_MEMORY, container=sidecar["name"], check=False)
        killed = time.monotonic()
        pod.wait_until_restarted(sidecar["name"], 1)
        ended = pod.status(sidecar["name"])["lastState"]["terminated"]
        figure("the container ended with", f"{ended['reason']}, status {ended['exitCode']}")
        assert ended["exitCode"] in ENDED
        failed = watched.recovers()
        figure("seconds until the volume worked again", round(time.monotonic() - killed))
        figure("turns that failed meanwhile", failed)
        assert failed
        seen = {each.rpartition(": ")[2] for each in watched.errors().splitlines() if "/data/" in each}
        figure("the app saw", ", ".join(sorted(seen)))
        assert seen and seen <= SEEN
        assert watched.goes_on().failed == failed
        assert pod.status("app")["restartCount"] == 0
