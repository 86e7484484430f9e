"""Pods that use their volumes all the time, so that a test can count what failed while something happened to the node.

What they count is in an emptyDir, where it can be read on the node, whether or not the API server answers.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.cluster import driver
from tests.e2e.conftest import wait_until
from tests.kubernetes.objects import the
from tests.lab.pace import SLOWNESS

if TYPE_CHECKING:
    from tests.cluster.node import ClusterNode
    from tests.cluster.pods import Pod

_WRITE = "echo $n > /data/{name} && read -r m < /data/{name} && [ $m = $n ]"
_READ = "read -r m < {file} && [ $m = {content} ]"
USES = {
    **{
        name: _WRITE.format(name=f"by-{name}")
        for name in ("sshfs", "eager", "fs-group", "persistent", "two-containers", "user-namespace")
    },
    "read-only": _READ.format(file="/data/hello", content="hello"),
    "subpath": _READ.format(file="/reports/first", content="first"),
}
"""What the container `app` of each example with sshfs does again and again; $n is the number of the turn."""

# The first turn comes when the volume works. mv(1), so that nobody reads half of the counts.
_LOOP = """
trap 'exit 0' TERM
n=0 failed=0
until {use}; do sleep 1; done 2>/dev/null
while :; do
    n=$((n + 1))
    {use} || {{ failed=$((failed + 1)); date >> /counts/errors; }}
    echo $n $failed > /counts/new && mv /counts/new /counts/now
    sleep 0.1 & wait $!
done 2>> /counts/errors
"""


def reads(name: str) -> tuple[list[str], str]:
    """Return the command that reads a file in the volume of an example, and what it says then."""
    if name == "subpath":
        return ["cat", "/reports/first"], "first\n"
    return ["cat", "/data/hello"], "hello\n"


class Counts(NamedTuple):
    """How often a container has used its volume, and how often that failed."""

    turns: int
    failed: int


def example(name: str) -> list[dict[str, Any]]:
    """Return the objects of an example whose container `app` uses its volume all the time."""
    objects = driver.example(name)
    use_all_the_time(the("Pod", objects), USES[name])
    return objects


def use_all_the_time(pod: dict[str, Any], use: str) -> None:
    """Have the container `app` of a pod do what `use` says, in a shell, again and again, and count that."""
    spec = pod["spec"]
    (app,) = [each for each in spec["containers"] if each["name"] == "app"]
    app["command"] = ["sh", "-c", _LOOP.format(use=use)]
    app["volumeMounts"].append({"name": "counts", "mountPath": "/counts"})
    spec["volumes"].append({"name": "counts", "emptyDir": {}})


class Watched:
    """The counts of a pod that `example` describes, whose volume works."""

    def __init__(self, pod: Pod) -> None:
        self._node: ClusterNode = pod.node
        uid = json.loads(pod.node.kubectl("get", "pod", pod.name, "--output=json").stdout)["metadata"]["uid"]
        self._directory = f"/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~empty-dir/counts"
        self.name = pod.name
        self.goes_on(beyond=0)

    def counts(self) -> Counts:
        """Return what was counted so far; FileNotFoundError before the first turn."""
        turns, failed = (self._node.seen(self._directory) / "now").read_text().split()
        return Counts(int(turns), int(failed))

    def forget(self) -> None:
        """Remove the counts, as the next turn writes them; the node may be off."""
        (self._node.root / self._directory.lstrip("/") / "now").unlink()

    def errors(self) -> str:
        """Return what the failed turns said; empty if none has."""
        path = self._node.seen(self._directory) / "errors"
        return path.read_text() if path.exists() else ""

    def goes_on(self, beyond: int | None = None, seconds: float = 60) -> Counts:
        """Return the counts when there are more turns than now, or than `beyond`. AssertionError if there are none."""
        before = self.counts().turns if beyond is None else beyond
        give_up = time.monotonic() + SLOWNESS * seconds
        while True:
            try:
                if (now := self.counts()).turns > before:
                    return now
            except FileNotFoundError:
                pass
            assert time.monotonic() < give_up, f"{self.name} does not go on: {self.errors()}"
            time.sleep(0.1)

    def recovers(self) -> int:
        """Wait until a turn has failed, and then until they don't any more; return how many have."""
        wait_until(lambda: self.counts().failed)
        failed = -1
        while failed != (failed := self.goes_on().failed):
            time.sleep(1)
        return failed
