"""Volumes of claims while everything that has to do with them is killed at random, on a real node and a real S3 server.

A run is the life of one claim, with or without a pod that uses its volume; some are over before the volume is made.
Five run at once, and meanwhile controllers, kubelet, the broker, the pods of volumes and their users are killed, at
moments that the seed says. Afterwards, the server must have the buckets of all PersistentVolumes with `Retain`, and
none of other claims: whatever may have been created for these has been deleted.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import secrets
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import psutil
import pytest
import yaml

from fusermount3_controller.pod_annotations import INJECT
from fusermount3_controller.pod_volumes import PLURAL
from tests.cluster import driver, installed_controller
from tests.cluster.claimed_volumes import Cluster, claim
from tests.cluster.conftest import PATIENCE
from tests.cluster.left import left
from tests.cluster.pods import restricted
from tests.cluster.shared_volumes import MOUNTS, wait_until
from tests.lab import podman
from tests.lab.pace import SLOWNESS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.cluster.left import Left
    from tests.cluster.long.conftest import Figure
    from tests.cluster.node import ClusterNode
    from tests.kubernetes.objects import Object

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.usefixtures("buckets_for_claims")]

RUNS = int(os.environ.get("FUSERMOUNT3PROXY_TEST_RUNS", "200"))
SEED = os.environ.get("FUSERMOUNT3PROXY_TEST_SEED") or str(secrets.randbelow(1_000_000))
AT_ONCE, FAULTS = 5, 4
"""Claims at once, and faults meanwhile."""
GONE = 300.0
"""Seconds in which nothing is left: deletions that fail are tried again after up to a minute."""
_CLASSES = ("s3", "s3", "kept", "waits")
_SHIM = "containerd-shim-runc-v2"
_FORCE = ("--force", "--grace-period=0", "--wait=false", "--ignore-not-found")


class Act(NamedTuple):
    """What is done, so many seconds after the beginning."""

    at: float
    what: Callable[[], object]


class Story:
    """What happens to `AT_ONCE` claims; `seen` of all of them so far."""

    def __init__(self, cluster: Cluster, chance: random.Random, seen: Seen) -> None:
        self.cluster = cluster
        self.kubectl = cluster.node.kubectl
        self.chance = chance
        self.seen = seen
        self.faults: dict[str, Callable[[], object]] = {
            "both controllers": lambda: self._kill_pods(installed_controller.NAMESPACE, 2),
            "a controller": lambda: self._kill_pods(installed_controller.NAMESPACE, 1),
            "the broker": lambda: self._kill_pods(driver.NAMESPACE, 1),
            "kubelet": self._kill_kubelet,
            "a pod's program": lambda: self._kill_programs(MOUNTS),
            "a pod of a volume": lambda: self._kill_pods(MOUNTS, 1),
            "a user": lambda: self._kill_pods("default", 1),
        }

    def happen(self) -> None:
        """Have it happen; return when all claims are gone, and nothing is left of them but what was to be kept."""
        acts = [act for number in range(AT_ONCE) for act in self._life(number)]
        acts += [Act(self.chance.uniform(0, 15), self._fault) for _ in range(FAULTS)]
        begin = time.monotonic()
        for act in sorted(acts, key=lambda each: each.at):
            time.sleep(max(begin + act.at - time.monotonic(), 0))
            act.what()
            self._look()
        give_up = time.monotonic() + SLOWNESS * GONE
        while not (self._look() and self.cluster.is_clean()):
            assert time.monotonic() < give_up, self.cluster.description()
            time.sleep(0.5)

    def _life(self, number: int) -> Iterator[Act]:
        """Yield what is done with one claim."""
        chance, name = self.chance, f"data-{number}"
        asks = claim(chance.choice(_CLASSES))
        asks["metadata"]["name"] = name
        begin = chance.uniform(0, 3)
        yield Act(begin, lambda: self._ask(asks))
        end = begin + chance.uniform(0, 12)
        if chance.random() < 0.7:
            uses = restricted({"persistentVolumeClaim": {"claimName": name}}, f"app-{number}")
            uses["metadata"]["annotations"] = {INJECT: "false"}
            yield Act(begin + chance.uniform(0, 3), lambda: self._create(uses))
            yield Act(end, lambda: self.kubectl("delete", "pod", f"app-{number}", *_FORCE[2:]))
            end += chance.uniform(-1, 2)
        # Both at the latest when all that was to be created has been.
        yield Act(max(end, begin + 3), lambda: self.kubectl("delete", "pvc", name, *_FORCE[2:]))
        yield Act(20, lambda: self.kubectl("delete", "pod", f"app-{number}", *_FORCE[2:]))

    def _ask(self, asks: Object) -> None:
        """Create the claim; note what its volume is called, if that is never deleted."""
        uid = self.kubectl("create", "--filename=-", "--output=jsonpath={.metadata.uid}", input=yaml.safe_dump(asks))
        if asks["spec"]["storageClassName"] == "kept":
            self.seen.of_kept.add(f"pvc-{uid.stdout}")

    def _create(self, manifest: Object) -> None:
        self.kubectl("create", "--filename=-", input=yaml.safe_dump(manifest))

    def _look(self) -> bool:
        """Note what there is, and delete the PersistentVolumes that nobody has any more; return if no claim is left."""
        for volume in self.cluster.items("pv"):
            name, kept = volume["metadata"]["name"], volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
            self.seen.volumes.add(name)
            if kept:
                self.seen.kept.add(name)
                if volume["status"].get("phase") == "Released":
                    self.kubectl("delete", "pv", name, *_FORCE[2:])
        return not self.cluster.items("pvc") and not self.cluster.items("pods")

    # Faults

    def _fault(self) -> None:
        name = self.chance.choice(list(self.faults))
        phases = [each.get("status", {}).get("phase", "Pending") for each in self.cluster.items(PLURAL)]
        self.seen.phases.update(phases)
        self.seen.faults[name] += 1
        self.faults[name]()

    def _kill_kubelet(self) -> None:
        self.cluster.node.end("kubelet")
        self.cluster.node.begin("kubelet")

    def _kill_programs(self, namespace: str) -> list[str]:
        """Kill the programs of a pod, as the kernel does when memory is used up; return the pod's name."""
        pods = self.cluster.items("pods", f"--namespace={namespace}")
        return [self._kill(each) for each in self.chance.sample(pods, min(1, len(pods)))]

    def _kill_pods(self, namespace: str, number: int) -> None:
        """Kill programs, and delete their pods at once: kubelet would wait longer and longer to start them again."""
        pods = self.cluster.items("pods", f"--namespace={namespace}")
        for each in self.chance.sample(pods, min(number, len(pods))):
            self.kubectl("delete", "pod", self._kill(each), f"--namespace={namespace}", *_FORCE)

    def _kill(self, pod: Object) -> str:
        for container in pod["status"].get("containerStatuses") or []:
            identity = (container.get("containerID") or "").partition("://")[2]
            if "running" in container["state"]:
                words = ["ctr", "--namespace", "k8s.io", "tasks", "kill", "--signal", "SIGKILL", identity]
                self.cluster.node.run(words, check=False)  # it may have ended
        return str(pod["metadata"]["name"])


class Seen:
    """What was seen in all runs: PersistentVolumes, and which of them were to be kept; faults, and states then.

    `of_kept`: what the volumes of claims are called whose volumes are to be kept, also of those that got none.
    """

    def __init__(self) -> None:
        self.volumes: set[str] = set()
        self.kept: set[str] = set()
        self.of_kept: set[str] = set()
        self.faults: Counter[str] = Counter()
        self.phases: Counter[str] = Counter()


@pytest.fixture
def cluster(node_of_session: ClusterNode) -> Iterator[Cluster]:
    """The cluster. Afterwards, nothing may be left of pods that are gone, also not of controllers and the driver."""
    node = node_of_session
    before, result = left(node), Cluster(node)
    result.forget_events()
    yield result
    result.wait_until(result.is_clean)
    uids = [each["metadata"]["uid"] for each in result.items("pods", "--all-namespaces")]

    def of_pods_that_are_gone() -> Left:
        more = left(node).beyond(before)
        gone = partial(filter, lambda each: not any(uid in each for uid in uids))
        return more._replace(
            mounts=[*gone(more.mounts)],
            cgroups=[*gone(more.cgroups)],
            directories=[*gone(more.directories)],
            processes=more.processes - Counter({_SHIM: len(_forgotten_shims(node))}),
        )

    def describe() -> str:
        return f"{of_pods_that_are_gone()}\n{_sandboxes(node)}"

    wait_until(lambda: None if any(of_pods_that_are_gone()) else True, describe, PATIENCE)


def _shims(node: ClusterNode) -> dict[str, list[str]]:
    """Return the names of the processes of each of containerd's shims, by the shim's ID, which is its sandbox's."""
    namespace = podman.namespace_of(node.pid)
    found = {}
    for pid in podman.all_pids():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.name() == _SHIM and podman.namespace_of(pid) == namespace:
                words = process.cmdline()
                found[words[words.index("-id") + 1]] = [each.name() for each in process.children()]
    return found


def _forgotten_shims(node: ClusterNode) -> list[str]:
    """Return the IDs of shims that have no process any more, and whose sandbox containerd does not know any more.

    containerd 2.1 sometimes leaves such a shim of a pod whose processes are all killed at once, whatever is in the pod;
    so kubelet ends pods that were deleted while it did not run.
    """
    known = node.run(["ctr", "--namespace", "k8s.io", "containers", "list", "--quiet"]).stdout.split()
    return [identity for identity, processes in _shims(node).items() if not processes and identity not in known]


def _sandboxes(node: ClusterNode) -> str:
    """Return the pods, containerd's shims with their processes, and what it has logged of those that have none."""
    log = (node.directory / "logs/containerd").read_text()
    lines = [node.kubectl("get", "pods", "--all-namespaces", "--output=wide").stdout]
    for identity, processes in _shims(node).items():
        lines.append(f"{identity}: {processes}")
        lines += [] if processes else [line for line in log.splitlines() if identity in line]
    return "\n".join(lines)


def buckets(cluster: Cluster) -> set[str]:
    return set(re.findall("<Name>([^<]+)</Name>", cluster.buckets()))


def test_volumes_of_claims_while_everything_is_killed_at_random(cluster: Cluster, figure: Figure) -> None:
    before, seen, begin = buckets(cluster), Seen(), time.monotonic()
    for number in range(-(-RUNS // AT_ONCE)):
        story = Story(cluster, random.Random(f"{SEED} {number}"), seen)
        story.happen()
        left = buckets(cluster) - before
        told = f"seed {SEED}, story {number}"
        assert left <= seen.of_kept, f"{told}: these should have been deleted: {left - seen.of_kept}"
        assert seen.kept <= left, f"{told}: these should have been kept: {seen.kept - left}"
    figure("seed", SEED)
    figure("runs", RUNS)
    figure("faults", _counted(seen.faults))
    figure("volumes in each state when one came", _counted(seen.phases))
    figure("volumes made", len(seen.volumes))
    figure("of these to be kept, and kept", len(seen.kept))
    figure("lost, or not deleted", 0)
    figure("minutes", round((time.monotonic() - begin) / 60))
    figure("shims that containerd has forgotten", len(_forgotten_shims(cluster.node)))
    installed_controller.wait_until_ready(cluster.node)


def _counted(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common())
