"""The first pod with a volume of the driver, by the commands of docs/kubernetes.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.cluster.commands import execute
from tests.cluster.pods import Pod
from tests.e2e.conftest import wait_until
from tests.e2e.documented import block

if TYPE_CHECKING:
    from tests.cluster.node import ClusterNode

COMMANDS = block("kubernetes.md", "kubectl apply --filename").commands


def reads(node: ClusterNode) -> None:
    """Create the pod, wait until its log has what it reads in the volume, and delete it."""
    apply, logs = COMMANDS
    pod = Pod(node, "sshfs")
    try:
        execute(node, apply)
        pod.wait_until_ready()
        wait_until(lambda: "hello" in execute(node, logs))
    finally:
        node.kubectl("delete", "pod", pod.name)
