"""Simulated nodes, and pods that come to them at a steady rate; what the API server and a watch tell of them."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from fusermount3_controller.mount_pods import ATTACHMENTS
from tests.cluster.api import MERGE_PATCH
from tests.cluster.bare_controllers import MOUNTS
from tests.unit.controller.samples import claim, claimed, pod, shared, volume

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from tests.cluster.api import Api
    from tests.kubernetes.objects import Object

TEAM = "team"
TEMPLATE = "s3"
_PODS, _NODES, _VOLUMES = f"/api/v1/namespaces/{TEAM}/pods", "/api/v1/nodes", "/api/v1/persistentvolumes"
_CLAIMS = f"/api/v1/namespaces/{TEAM}/persistentvolumeclaims"
_OF_MOUNTS = f"/api/v1/namespaces/{MOUNTS}/pods"
_OF_ATTACHMENTS = f"/apis/fusermount3-proxy.dev/v1alpha1/{ATTACHMENTS}"
_KUBELETS = 32
"""Requests of all kubelets at once."""
_PADDING = {"example.com/notes": "x" * 2000}
"""So that a pod has about the size of those that there are in clusters."""


class Extent(NamedTuple):
    """How many nodes and pods there are; `rate`: pods that come in a second; `on_node`: volumes used on each node.

    `idle`: seconds in which nothing happens then; `asking`: for which pods are admitted.
    """

    nodes: int
    workloads: int
    rate: float
    volumes: int = 100
    on_node: int = 2
    idle: float = 65.0
    asking: float = 60.0

    def place(self, number: int) -> tuple[str, str]:
        """Return the node and the volume of a pod: they come to one node after the other."""
        node, turn = number % self.nodes, number // self.nodes
        return f"node-{node}", f"v{(node * self.on_node + turn % self.on_node) % self.volumes}"


def template() -> Object:
    return shared(TEMPLATE, allowInline=False)


class Simulation:
    """The nodes, and what is seen of their pods."""

    def __init__(self, api: Api, extent: Extent) -> None:
        self.api, self.extent = api, extent
        #: When the first pod of a place was sent to the API server, and when its mount pod was there.
        self.wanted: dict[tuple[str, str], float] = {}
        self.created: dict[tuple[str, str], float] = {}
        #: What went wrong in a task.
        self.failures: list[str] = []
        self._served: set[tuple[str, str]] = set()
        self._users: dict[tuple[str, str], list[str]] = {}
        self._places: dict[str, tuple[str, str]] = {}
        self._requests: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._limit = asyncio.Semaphore(_KUBELETS)

    async def prepare(self) -> None:
        """Make the nodes, volumes and claims."""
        names = [f"v{number}" for number in range(self.extent.volumes)]
        await self.api.made(_VOLUMES, *(_volume(each) for each in names))
        await self.api.made(_CLAIMS, *(_claim(each) for each in names))
        for first in range(0, self.extent.nodes, _KUBELETS):
            numbers = range(first, min(first + _KUBELETS, self.extent.nodes))
            await asyncio.gather(*(self.api.made(_NODES, _node(f"node-{number}")) for number in numbers))

    async def come(self) -> None:
        """Have all pods come; return when each place has its mount pod and all attachments say who uses them."""
        watching = asyncio.create_task(self._watch())
        try:
            await self._at_rate(self.extent.rate, self._user_comes)
            number = self.extent.workloads
            await self._until(lambda attachments: sum(map(_count, attachments)) == number)
        finally:
            watching.cancel()
            await asyncio.gather(watching, *self._tasks, return_exceptions=True)

    async def go(self) -> float:
        """Have all pods go; return the seconds from then until nothing is left."""
        watching = asyncio.create_task(self._watch())
        try:
            await self._at_rate(2 * self.extent.rate, self._user_goes)
            begin = time.monotonic()
            await self._until(lambda attachments: not attachments)
            while await self.api.listed(_OF_MOUNTS):
                await asyncio.sleep(0.5)
            return time.monotonic() - begin
        finally:
            watching.cancel()
            await asyncio.gather(watching, *self._tasks, return_exceptions=True)

    async def writes(self) -> Counter[str]:
        """Return what others than the simulation have written to objects that the controller writes."""
        found: Counter[str] = Counter()
        for labels, value in re.findall(
            r"^apiserver_request_total\{(.*)\} (\S+)$", await self.api.text("/metrics"), re.M
        ):
            label = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            if (label["verb"], label["resource"]) not in _WRITES or label["group"] == "events.k8s.io":
                continue
            if label["subresource"] in ("", "status") and not (label["resource"] == "pods" and label["subresource"]):
                name = f"{label['verb']} {label['resource']}"
                found[name if label["code"].startswith("2") else f"{name}: {label['code']}"] += int(float(value))
        for name, number in self._requests.items():
            found[name] -= number
        return found

    async def _at_rate(self, rate: float, each: Any) -> None:
        begin = time.monotonic()
        for number in range(self.extent.workloads):
            await asyncio.sleep(begin + number / rate - time.monotonic())
            self._do(each(number))

    def _do(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self.failures.append(repr(error))

    async def _until(self, true: Any) -> None:
        give_up = time.monotonic() + 300
        while not true(await self.api.listed(_OF_ATTACHMENTS)):
            assert not self.failures, self.failures
            assert time.monotonic() < give_up, "the attachments do not say what is so"
            await asyncio.sleep(1)

    async def _user_comes(self, number: int) -> None:
        node, name = place = self.extent.place(number)
        self.wanted.setdefault(place, time.monotonic())
        manifest = pod(claimed(claim=name), nodeName=node)
        manifest["metadata"] |= {"name": f"app-{number}", "annotations": _PADDING}
        answer = await self.api.ask("POST", _PODS, manifest)
        assert answer.good, answer
        self._requests["POST pods"] += 1
        if place in self._served:
            await self._runs(f"app-{number}")
        else:
            self._users.setdefault(place, []).append(f"app-{number}")

    async def _user_goes(self, number: int) -> None:
        await self._delete(f"{_PODS}/app-{number}")

    # In the place of kubelets

    async def _watch(self) -> None:
        async for event, each in self.api.watch(_OF_MOUNTS):
            metadata, name = each["metadata"], each["metadata"]["name"]
            place = self._places.setdefault(name, _place_of(each))
            if event == "ADDED":
                self.created.setdefault(place, time.monotonic())
            if event == "DELETED":
                continue
            if metadata.get("deletionTimestamp"):
                self._do(self._delete(f"{_OF_MOUNTS}/{name}"))
            elif each["spec"].get("nodeName") and place not in self._served:
                self._served.add(place)
                self._do(self._serves(name, place))

    async def _serves(self, name: str, place: tuple[str, str]) -> None:
        await self._patch(f"{_OF_MOUNTS}/{name}/status", _running())
        for user in self._users.pop(place, []):
            await self._runs(user)

    async def _runs(self, name: str) -> None:
        await self._patch(f"{_PODS}/{name}/status", _running())

    async def _patch(self, path: str, status: Object) -> None:
        async with self._limit:
            answer = await self.api.ask("PATCH", path, {"status": status}, MERGE_PATCH)
            assert answer.good, answer

    async def _delete(self, path: str) -> None:
        async with self._limit:
            answer = await self.api.ask("DELETE", f"{path}?gracePeriodSeconds=0")
            if answer.good:
                self._requests["DELETE pods"] += 1
            else:
                assert answer.status == 404, answer
                self._requests["DELETE pods: 404"] += 1


_WRITES = {
    *(("POST", name) for name in ("pods", "events", ATTACHMENTS)),
    *(("DELETE", name) for name in ("pods", ATTACHMENTS)),
    *((verb, ATTACHMENTS) for verb in ("PATCH", "PUT", "APPLY")),
}


def _place_of(mount_pod: Object) -> tuple[str, str]:
    """Return the node and the volume of a mount pod."""
    (affinity,) = mount_pod["spec"]["affinity"]["nodeAffinity"].values()
    node = affinity["nodeSelectorTerms"][0]["matchFields"][0]["values"][0]
    return node, str(mount_pod["spec"]["containers"][0]["args"][1]).removeprefix("bucket-")


def _count(attachment: Object) -> int:
    status = attachment.get("status") or {}
    return int(status.get("workloadCount") or 0) if status.get("phase") == "Served" else 0


def _running() -> Object:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": now} for kind in ("PodScheduled", "Initialized", "Ready")
    ]
    return {"phase": "Running", "conditions": conditions, "startTime": now}


def _node(name: str) -> Object:
    room = {"cpu": "64", "memory": "256Gi", "pods": "250"}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "simulated"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}},
        "status": {"capacity": room, "allocatable": room, "conditions": [ready]},
    }


_OF_CLAIM: Object = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}


def _volume(name: str) -> Object:
    result = volume(name, TEMPLATE, bucket=f"bucket-{name}")
    result["spec"] |= {**_OF_CLAIM, "capacity": {"storage": "1Gi"}, "claimRef": {"namespace": TEAM, "name": name}}
    return result


def _claim(name: str) -> Object:
    result = claim(name, volumeName=name)
    result["spec"] |= {**_OF_CLAIM, "resources": {"requests": {"storage": "1Gi"}}}
    return result
