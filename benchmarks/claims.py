"""Volumes of claims on a real node: how long until a pod reads one, and whether it is as fast as in its mount pod.

    .venv/bin/python -m benchmarks.claims [--pods 30] [--quick] [--write]

In turn, a pod with an emptyDir, one with a claim that Kubernetes' own hostpath provisioner serves (that of
kube-controller-manager), and one with a claim of ours are created, and write and read a file. Both classes wait for the
pod. Of ours, the creation pod does nothing, and the mount pod runs bindfs on its memory. The time ends with the line
that the pod has logged, which the runtime stamps; a watch tells of the steps until then.

Then fio runs on one of our volumes, in turn as its user sees it and as the mount pod does. With ``--write`` the report
goes into docs/performance.md. Ends with status 1 if a bound is missed.
"""

import argparse
import asyncio
import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, TypeVar

import psutil
import yaml

from benchmarks import page
from benchmarks.datapath import AT_ONCE, KINDS, MIB, fio
from benchmarks.machine import processor
from benchmarks.results import GENUINE, PROXY, SAME_WITHIN, Job, percentile
from benchmarks.section import Section
from fusermount3_controller.pod_rules import CONTAINER, MOUNTPOINT
from fusermount3_controller.pod_volumes import PLURAL, STAGE_LABEL
from fusermount3_controller.volume_templates import API_VERSION
from tests.cluster import binaries, configuration, driver, images, installed_controller
from tests.cluster.api import Api
from tests.cluster.node import ClusterNode
from tests.cluster.pods import Pod, restricted
from tests.cluster.shared_volumes import MOUNTS
from tests.kubernetes.objects import PROVISIONING, Object
from tests.lab.checkout import commit
from tests.lab.images import DEBIAN, image_tag

ResultT = TypeVar("ResultT")

REPORT = Section(Path(__file__).parents[1] / "docs/performance.md", "make bench-claims")
ADDED = 1.0
"""Seconds that we may add to what a claim and our pods need by themselves, in 95 of 100 cases."""
PATIENCE = 120.0
NOTHING, HOSTPATH, OURS = "an emptyDir", "a claim, Kubernetes' hostpath provisioner", "a claim, ours"
IMAGE, STORE, FILE_SIZE = "docker.io/example/bindfs:1.0", "/store", 32 * MIB
#: When a job needs no more rounds: an interval as wide as `SAME_WITHIN` allows decides for a ratio of 1.00 only.
PRECISE = SAME_WITHIN / 2
_LOG = "/var/log/pods/{namespace}_{name}_{uid}/{container}/0.log"
_READ = "echo hello > /data/hello && cat /data/hello; trap 'exit 0' TERM; sleep infinity & wait"
_USER = {"runAsUser": 1000, "runAsGroup": 1000}
_PODS, _CLAIMS = "/api/v1/namespaces/default/pods", "/api/v1/namespaces/default/persistentvolumeclaims"


class WithHostpath(configuration.Machine):
    """A node whose kube-controller-manager has a provisioner of its own."""

    @property
    def services(self) -> Sequence[Sequence[str]]:
        return [
            (*each, "--enable-hostpath-provisioner") if each[0] == "kube-controller-manager" else each
            for each in super().services
        ]


class Steps(NamedTuple):
    """When what happened until a pod with a claim of ours has read its volume; seconds of the time of day."""

    asked: float
    creation_pod: float
    created: float
    bound: float
    scheduled: float
    mount_pod: float
    program: float
    read: float

    def lasted(self) -> list[float]:
        """Return the seconds of each step."""
        return [end - begin for begin, end in itertools.pairwise(self)]


#: What the steps are called, and whether they are the run of one of our pods.
_STEPS = (
    ("until the creation pod is there", False),
    ("until Kubernetes says that it has ended: the pod's own run", True),
    ("until the claim is bound", False),
    ("until the scheduler has put the pod on the node: it looks at the claim each second", False),
    ("until the mount pod is there", False),
    ("until its program begins: the pod's own run", True),
    ("until the pod has read", False),
)


@dataclass
class Measured:
    """Seconds until a pod with each kind of volume has read; the steps of ours; what fio measured."""

    until_read: dict[str, list[float]] = field(default_factory=dict)
    steps: list[Steps] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)

    def added(self) -> list[float]:
        """Return what we add to the median of the other provisioner's claims and the runs of our two pods."""
        alone = percentile(self.until_read[HOSTPATH], 50)
        runs = [is_run for _, is_run in _STEPS]
        return [
            each.read
            - each.asked
            - alone
            - sum(lasted for lasted, is_run in zip(each.lasted(), runs, strict=True) if is_run)
            for each in self.steps
        ]

    def missed(self) -> list[str]:
        """Return the bounds that were missed."""
        added = percentile(self.added(), 95)
        result = [f"added, p95: {added:.2f} s, not ≤ {ADDED} s"] if added > ADDED else []
        return result + [f"{each.title()}: not the same" for each in self.jobs if each.is_same() is not True]


def measure(pods: int, fewest: int, most: int, seconds: float) -> Measured:
    """Measure so many pods of each kind, and fio in at least `fewest`, at most `most` rounds of so many seconds."""
    machine = WithHostpath(configuration.NAME, configuration.ADDRESS, configuration.FIRST.pods, True)
    with tempfile.TemporaryDirectory() as temporary, ClusterNode(Path(temporary) / "node", machine=machine) as node:
        images.load(node)
        images.load_one(node, IMAGE, images.with_proxy(image_tag(DEBIAN), {}))
        driver.install(node)
        with installed_controller.installed(node, PROVISIONING):
            node.kubectl("create", "--filename=-", input=yaml.safe_dump_all([_template(), *_classes()]))
            result = node.in_network(lambda: asyncio.run(_measured(node, pods)))
            with _used(node) as (target, own):
                result.jobs = _compared(target, own, fewest, most, seconds)
            return result


# What is created --------------------------------------------------------------------------------------------------


def _template() -> Object:
    run = {"name": "run", "image": images.SHELL, "command": ["true"], "securityContext": _USER}
    nothing = {"podTemplate": {"spec": {"containers": [run]}}}
    program = {
        "name": CONTAINER,
        "image": IMAGE,
        "command": ["sh", "-c", f"echo begins; exec bindfs -f --multithreaded {STORE} {{{{ mountpoint | tobash }}}}"],
        # libfuse gives up unless it can open something at /dev/fuse: any file will do.
        "terminationMessagePath": "/dev/fuse",
        "securityContext": _USER,
        "volumeMounts": [{"name": "store", "mountPath": STORE}],
    }
    store = {"name": "store", "emptyDir": {"medium": "Memory"}}
    return {
        "apiVersion": API_VERSION,
        "kind": "VolumeTemplate",
        "metadata": {"name": "memory"},
        "spec": {
            "placement": "Shared",
            "provisioningModes": ["Dynamic"],
            "volumeCreation": nothing,
            "volumeDeletion": nothing,
            "volumeStaging": {"podTemplate": {"spec": {"containers": [program], "volumes": [store]}}},
        },
    }


def _classes() -> Iterator[Object]:
    of_ours = {"parameters": {"volumeTemplate": "memory"}}
    for name, provisioner, more in (("hostpath", "kubernetes.io/host-path", {}), ("ours", driver.NAME, of_ours)):
        yield {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": name},
            "provisioner": provisioner,
            "volumeBindingMode": "WaitForFirstConsumer",
            **more,
        }


def _claim(of_class: str) -> Object:
    requests = {"storage": "1Gi"}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "data"},
        "spec": {"storageClassName": of_class, "accessModes": ["ReadWriteOnce"], "resources": {"requests": requests}},
    }


def _user(kind: str) -> Object:
    """Return a pod that writes a file and reads it."""
    pod = restricted({"emptyDir": {}} if kind == NOTHING else {"persistentVolumeClaim": {"claimName": "data"}})
    if kind == HOSTPATH:
        # To whom the volume belongs.
        pod["spec"]["securityContext"] = {"runAsUser": 0}
    (container,) = pod["spec"]["containers"]
    container["command"] = ["sh", "-c", _READ]
    return pod


# Until a pod reads ------------------------------------------------------------------------------------------------


class Watched:
    """What a watch has told of pods and claims: which there are, and when it was first heard that something is so."""

    def __init__(self) -> None:
        self.heard: dict[tuple[str, str], float] = {}
        self.pods: dict[str, Object] = {}

    async def follow(self, api: Api, path: str) -> None:
        async for kind, found in api.watch(path):
            now, metadata, status = time.time(), found["metadata"], found.get("status") or {}
            if kind == "DELETED":
                self.pods.pop(metadata["uid"], None)
                continue
            if found["kind"] == "Pod":
                self.pods[metadata["uid"]] = found
            true = [each["type"] for each in status.get("conditions") or [] if each["status"] == "True"]
            for fact in ("there", status.get("phase", ""), *true):
                self.heard.setdefault((metadata["uid"], fact), now)

    async def until(self, uid: str, fact: str) -> float:
        """Return when it was heard of the object."""
        return await _until(lambda: self.heard.get((uid, fact)), f"{uid} {fact}")

    async def until_logged(self, node: ClusterNode, pod: Object, container: str) -> float:
        """Return when a container of the pod has written its first line."""
        metadata = pod["metadata"]
        names = {name: metadata[name] for name in ("namespace", "name", "uid")}
        return await _until(lambda: _logged(node.seen(_LOG.format(**names, container=container))), str(names))

    def mount_pod(self, stage: str = "") -> Object | None:
        """Return the pod that creates the volume, or without a stage the one that mounts it."""
        found = [each for each in self.pods.values() if each["metadata"]["namespace"] == MOUNTS]
        return next((each for each in found if each["metadata"]["labels"].get(STAGE_LABEL, "") == stage), None)


async def _until(known: Callable[[], ResultT | None], what: str) -> ResultT:
    give_up = time.monotonic() + PATIENCE
    while not (result := known()):
        assert time.monotonic() < give_up, what
        await asyncio.sleep(0.01)
    return result


def _logged(log: Path) -> float | None:
    """Return the time of the first line; None, if there is none."""
    try:
        line = log.read_text().partition("\n")[0]
    except FileNotFoundError:
        return None
    assert not line or " stdout " in line, line
    return datetime.fromisoformat(line.split()[0]).timestamp() if line else None


async def _measured(node: ClusterNode, pods: int) -> Measured:
    result, watched = Measured({NOTHING: [], HOSTPATH: [], OURS: []}), Watched()
    async with Api(node.root) as api:
        followed = [asyncio.create_task(watched.follow(api, path)) for path in ("/api/v1/pods", _CLAIMS)]
        for _ in range(pods):
            for kind in result.until_read:
                async with _asked(api, kind) as (asked, pod, claim):
                    read = await watched.until_logged(node, pod, "app")
                    result.until_read[kind].append(read - asked)
                    if kind == OURS:
                        result.steps.append(await _steps(node, watched, asked, pod, claim, read))
        for each in followed:
            each.cancel()
    return result


@contextlib.asynccontextmanager
async def _asked(api: Api, kind: str) -> AsyncIterator[tuple[float, Object, Object]]:
    """Yield when a pod with that kind of volume was asked for, the pod, and its claim; remove all afterwards."""
    asked, claim = time.time(), {}
    if kind != NOTHING:
        (claim,) = await api.made(_CLAIMS, _claim("ours" if kind == OURS else "hostpath"))
    (pod,) = await api.made(_PODS, _user(kind))
    yield asked, pod, claim
    await api.ask("DELETE", f"{_PODS}/app")
    if claim:
        await api.ask("DELETE", f"{_CLAIMS}/data")
    give_up = time.monotonic() + PATIENCE
    volumes = ("/api/v1/persistentvolumes", f"/apis/{API_VERSION}/{PLURAL}", f"/api/v1/namespaces/{MOUNTS}/pods")
    while left := [each for path in (_PODS, _CLAIMS, *volumes) for each in await api.listed(path)]:
        assert time.monotonic() < give_up, left
        await asyncio.sleep(0.2)


async def _steps(node: ClusterNode, watched: Watched, asked: float, pod: Object, claim: Object, read: float) -> Steps:
    creation = next(uid for uid, fact in reversed(watched.heard) if fact == "Succeeded")
    mount_pod = await _until(watched.mount_pod, "a mount pod")
    return Steps(
        asked,
        await watched.until(creation, "there"),
        await watched.until(creation, "Succeeded"),
        await watched.until(claim["metadata"]["uid"], "Bound"),
        await watched.until(pod["metadata"]["uid"], "PodScheduled"),
        await watched.until(mount_pod["metadata"]["uid"], "there"),
        await watched.until_logged(node, mount_pod, CONTAINER),
        read,
    )


# fio --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _used(node: ClusterNode) -> Iterator[tuple[Path, Path]]:
    """Yield the volume as its user sees it, and as the mount pod does."""
    objects = yaml.safe_dump_all([_claim("ours"), _user(OURS)])
    node.kubectl("create", "--filename=-", input=objects)
    app = Pod(node, "app")
    app.wait_until_ready()
    # In a directory with the sticky bit, nobody, not even root, may open another one's file to create it.
    app.execute("mkdir", "/data/files")
    for number in range(AT_ONCE):
        app.execute("dd", "if=/dev/urandom", f"of=/data/files/data.{number}", "bs=1M", f"count={FILE_SIZE // MIB}")
    words = ("get", "pods", f"--namespace={MOUNTS}", "--output=jsonpath={.items[*].metadata.name}")
    own = Pod(node, node.kubectl(*words).stdout, MOUNTS).seen(CONTAINER, f"{MOUNTPOINT}/files")
    target = app.seen("app", "/data/files")
    assert target.stat() == own.stat(), "these are two filesystems"
    yield target, own
    node.kubectl("delete", "--filename=-", input=objects)


def _compared(target: Path, own: Path, fewest: int, most: int, seconds: float) -> list[Job]:
    """Run each job in both places in each round; the mount pod's are taken for those of the genuine helper."""
    jobs = [Job(kind.name, kind.block_size, number, [], []) for kind in KINDS for number in (1, AT_ONCE)]
    for number in range(most):
        for job in [job for job in jobs if number < fewest or not job.is_precise(PRECISE)]:
            sides = [(GENUINE, own), (PROXY, target)]
            for side, place in sides if number % 2 else reversed(sides):
                job.of(side).append(fio(job, place, FILE_SIZE, seconds, user=0))
    return jobs


# The report -------------------------------------------------------------------------------------------------------


def report(measured: Measured) -> str:
    """Return what docs/performance.md says."""
    lines = [
        f"{len(measured.steps)} pods of each kind. Measured on {datetime.now(UTC).date().isoformat()}: {processor()}, "
        f"{psutil.cpu_count()} processors, which the control plane and the node share; Kubernetes "
        f"{binaries.KUBERNETES.version}; fusermount3-proxy {commit()}.",
        "",
        "| a pod has written and read, from when it is created with | p50 | p95 | bound |",
        "| --- | --- | --- | --- |",
        *(f"| {kind} | {_both(seconds)} | |" for kind, seconds in measured.until_read.items()),
        "| what we add to the other provisioner's p50 and the runs of creation pod and mount pod | "
        f"{_both(measured.added())} | p95 ≤ {ADDED:.0f} s |",
        "",
        "| of these, with a claim of ours | p50 | p95 |",
        "| --- | --- | --- |",
        *(
            f"| {name} | {_both([each.lasted()[number] for each in measured.steps])} |"
            for number, (name, _) in enumerate(_STEPS)
        ),
        "",
    ]
    header = ["fio", "rounds", "mount pod, MB/s", "user, MB/s", "ratio (95 % interval)", "the same"]
    header += ["latency, p50: mount pod, user", "p99"]
    return "\n".join(lines) + "\n" + page.table(header, [page.job_row(job) for job in measured.jobs])


def _both(seconds: Sequence[float]) -> str:
    return " | ".join(f"{percentile(seconds, part):.2f} s" for part in (50, 95))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.claims")
    parser.add_argument("--pods", type=int, default=30, help="of each kind; %(default)s")
    parser.add_argument("--write", action="store_true", help="put the report into docs/performance.md")
    parser.add_argument("--quick", action="store_true", help="in short, to see that it runs; numbers mean nothing then")
    arguments = parser.parse_args()
    measured = measure(2, 2, 2, 0.1) if arguments.quick else measure(arguments.pods, 20, 120, 1)
    text = report(measured)
    print(text)
    if arguments.write:
        REPORT.write(text)
    missed = measured.missed()
    for each in missed:
        print(f"MISSED {each}")
    sys.exit(1 if missed and not arguments.quick else 0)


if __name__ == "__main__":
    main()
