"""Mount pods in a cluster: who creates, deletes and reports what, also two at once and after failures."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from typing import TYPE_CHECKING

import pytest

from fusermount3_controller import kept_pods, mount_pod_keeper, mount_pods
from fusermount3_controller.cluster_cache import ClusterCache
from fusermount3_controller.controller_metrics import Metrics
from fusermount3_controller.mount_pod_keeper import MountPodKeeper
from fusermount3_controller.pod_volumes import PROVISIONED_BY, STAGING_RECORDED, VOLUME_LABEL
from fusermount3_controller.wanted_mount_pods import Wanted, wanted
from tests.unit.controller.api_server import ATTACHMENTS, CLASSES, POD_VOLUMES, TEMPLATES, VOLUMES, ApiServer
from tests.unit.controller.cluster import at, known, mount_of, mount_pod, user
from tests.unit.controller.samples import Manifest, claim, inline, pod_of, shared, volume
from tests.unit.controller.test_cluster_cache import CLASS, until
from tests.unit.controller.volumes import DRIVER, manifest_of, run
from tests.unit.controller.volumes import known as provisioning

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from fusermount3_controller.served_volumes import Known

TEAM, MOUNTS = "/api/v1/namespaces/team", "/api/v1/namespaces/fuse-mounts/pods"
USER = f"{TEAM}/pods/app"
NAME = mount_of([user()], known()).name


class Cluster:
    """An API server with a template, a claim that is bound, and a pod that uses it."""

    def __init__(self) -> None:
        self.api = ApiServer()
        self.metrics = Metrics()

    def named(self, path: str) -> list[str]:
        """Return the names of the objects below a path."""
        return sorted(each.removeprefix(f"{path}/") for each in self.api.objects if each.startswith(f"{path}/"))

    def events(self) -> list[tuple[str, str]]:
        events = [each for path, each in self.api.objects.items() if path.startswith(f"{TEAM}/events/")]
        return sorted((each["reason"], each["message"]) for each in events)

    def phases(self) -> list[str]:
        """Return what the attachments say."""
        return [
            each.get("status", {}).get("phase", "")
            for path, each in self.api.objects.items()
            if path.startswith(ATTACHMENTS)
        ]

    def workloads(self) -> list[Manifest]:
        """Return those that the attachments name."""
        status = [each.get("status", {}) for path, each in self.api.objects.items() if path.startswith(ATTACHMENTS)]
        return [each for one in status for each in one.get("workloads", [])]

    async def fill(self, template: Manifest | None = None) -> None:
        manifest = template or shared()
        manifest["metadata"]["generation"] = 1
        await self.api.put(f"{TEMPLATES}/s3", manifest)
        await self.api.put(f"{VOLUMES}/photos", volume())
        await self.api.put(f"{TEAM}/persistentvolumeclaims/photos", claim(volumeName="photos"))
        await self.api.put(USER, user())

    async def change(self, name: str, **status: object) -> None:
        path = f"{MOUNTS}/{name}"
        await self.api.put(path, copy.deepcopy(self.api.objects[path]) | {"status": status})

    @contextlib.asynccontextmanager
    async def kept(self, number: int = 1, interval: float = 0.2) -> AsyncIterator[None]:
        """So many controllers."""
        async with contextlib.AsyncExitStack() as stack:
            tasks = []
            for _ in range(number):
                client = await stack.enter_async_context(self.api.client())
                cache = ClusterCache(client, provisioning=True)
                keeper = MountPodKeeper(client, cache, self.metrics, "fuse-mounts")
                tasks += [asyncio.create_task(each) for each in (cache.follow(), keeper.keep(interval))]
            yield
            assert not any(task.done() for task in tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


READY = {"type": "Ready", "status": "True", "lastTransitionTime": at(7)}


@pytest.mark.parametrize("number", [1, 2])
def test_a_user_gets_a_mount_pod_and_nothing_is_left_of_it(number: int) -> None:
    """Two controllers come to the same."""

    async def run() -> None:
        cluster = Cluster()
        await cluster.fill()
        async with cluster.kept(number):
            await until(lambda: cluster.named(MOUNTS) == [f"{NAME}-0"])
            made = cluster.api.objects[f"{MOUNTS}/{NAME}-0"]
            owner = cluster.api.objects[f"{ATTACHMENTS}/{NAME}"]["metadata"]["uid"]
            assert made["metadata"]["ownerReferences"][0]["uid"] == owner
            await cluster.change(f"{NAME}-0", phase="Running", conditions=[READY])
            attachment = f"{ATTACHMENTS}/{NAME}"
            await until(lambda: cluster.api.objects[attachment].get("status", {}).get("phase") == "Served")
            assert cluster.api.objects[attachment]["status"]["workloads"] == [
                {"namespace": "team", "name": "app", "uid": "uid of app", "attachmentTime": at(0)}
            ]
            assert cluster.named(MOUNTS) == [f"{NAME}-0"]
            told = f"mount pod fuse-mounts/{NAME}-0 is to serve the volume"
            assert cluster.events() == [("MountPodCreated", told)]
            started = "fusermount3_controller_mount_pod_start_seconds_sum 7.0"
            await until(lambda: started in cluster.metrics.exposition().decode())
            exposition = cluster.metrics.exposition().decode()
            assert 'fusermount3_controller_mount_pods{phase="Served",template="s3"} 1.0' in exposition
            await cluster.api.remove(USER)
            await until(lambda: not cluster.named(MOUNTS) and not cluster.named(ATTACHMENTS))

    asyncio.run(run())


def test_many_pods_and_two_controllers_make_one_mount_pod() -> None:
    async def run() -> None:
        cluster = Cluster()
        await cluster.fill()
        async with cluster.kept(2):
            for number in range(50):
                await cluster.api.put(f"{TEAM}/pods/app-{number}", user(f"app-{number}"))
            await until(lambda: len(cluster.workloads()) == 51)
            assert cluster.named(MOUNTS) == [f"{NAME}-0"]
            assert len(cluster.named(ATTACHMENTS)) == 1

    asyncio.run(run())


def test_a_mount_pod_that_fails_is_replaced_and_its_users_are_told() -> None:
    async def run() -> None:
        cluster = Cluster()
        await cluster.fill()
        async with cluster.kept(2):
            await until(lambda: cluster.named(MOUNTS))
            await cluster.change(f"{NAME}-0", phase="Failed", reason="Evicted", message="low on memory")
            await until(lambda: cluster.named(MOUNTS) == [f"{NAME}-1"])
            says = f"mount pod fuse-mounts/{NAME}-0: Evicted: low on memory"
            assert ("MountPodFailed", says) in cluster.events()
            assert len(cluster.events()) == 3

    asyncio.run(run())


def test_a_mount_pod_that_uses_another_volume_gets_a_mount_pod_for_it() -> None:
    """As one does that encrypts what is stored there."""

    async def run() -> None:
        cluster = Cluster()
        await cluster.fill()
        upper = shared("upper")
        pod_of(upper)["volumes"] = [{"name": "base", "persistentVolumeClaim": {"claimName": "lower"}}]
        await cluster.api.put(f"{TEMPLATES}/upper", upper)
        await cluster.api.put(f"{VOLUMES}/lower", volume("lower"))
        await cluster.api.put(f"{VOLUMES}/photos", volume(template="upper"))
        in_mounts = "/api/v1/namespaces/fuse-mounts/persistentvolumeclaims/lower"
        lower = claim("lower", volumeName="lower")
        lower["metadata"]["namespace"] = "fuse-mounts"
        await cluster.api.put(in_mounts, lower)
        async with cluster.kept():
            await until(lambda: len(cluster.named(MOUNTS)) == 1)
            (name,) = cluster.named(MOUNTS)
            made = copy.deepcopy(cluster.api.objects[f"{MOUNTS}/{name}"])
            made["spec"]["nodeName"] = "n1"
            await cluster.api.put(f"{MOUNTS}/{name}", made)
            await until(lambda: len(cluster.named(MOUNTS)) == 2)
            await until(lambda: [each["name"] for each in cluster.workloads() if each["namespace"] != "team"] == [name])

    asyncio.run(run())


def test_a_volume_that_has_to_be_unstaged_gets_its_mount_pod_when_its_node_is_recorded() -> None:
    async def run_() -> None:
        cluster = Cluster()
        await cluster.fill()
        provisioned = volume("photos")
        provisioned["metadata"]["annotations"] = {PROVISIONED_BY: DRIVER, STAGING_RECORDED: "true"}
        await cluster.api.put(f"{VOLUMES}/photos", provisioned)
        recorded = manifest_of(provisioning(volumeUnstaging=run()))
        at_first = recorded | {"status": {"phase": "Created", "stagedNodes": ["n2"], "unstagingNode": "n2"}}
        await cluster.api.put(f"{POD_VOLUMES}/photos", at_first)
        async with cluster.kept(interval=60):
            await until(lambda: cluster.named(ATTACHMENTS) == [NAME])
            says = f"mount pod fuse-mounts/{NAME}-0: waits until the volume is unstaged on n2"
            await until(lambda: cluster.events() == [("MountPodFailed", says)])
            assert not cluster.named(MOUNTS)
            status = {"phase": "Created", "stagedNodes": ["n1"]}
            await cluster.api.put(f"{POD_VOLUMES}/photos", recorded | {"status": status})
            await until(lambda: cluster.named(MOUNTS) == [f"{NAME}-0"])
            made = cluster.api.objects[f"{MOUNTS}/{NAME}-0"]
            assert made["metadata"]["labels"][VOLUME_LABEL] == "photos"
            assert mount_pods.node_of(made) == "n1"

    asyncio.run(run_())


def test_who_waits_for_room_is_told_what_the_scheduler_says() -> None:
    async def run() -> None:
        cluster = Cluster()
        await cluster.fill()
        async with cluster.kept():
            await until(lambda: cluster.named(MOUNTS))
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
            await cluster.change(f"{NAME}-0", phase="Pending", conditions=[condition])
            says = f"mount pod fuse-mounts/{NAME}-0: Unschedulable: no room"
            await until(lambda: ("MountPodFailed", says) in cluster.events())

    asyncio.run(run())


def test_who_waits_for_what_the_api_server_refuses_is_told_why() -> None:
    async def run() -> None:
        cluster = Cluster()
        await cluster.fill()
        cluster.api.refusals[MOUNTS] = "exceeded quota: fuse-mounts"
        async with cluster.kept():
            says = f"mount pod fuse-mounts/{NAME}-0: exceeded quota: fuse-mounts"
            await until(lambda: cluster.events() == [("MountPodFailed", says)])
            cluster.api.refusals.clear()
            await until(lambda: cluster.named(MOUNTS) == [f"{NAME}-0"])

    asyncio.run(run())


def test_an_event_of_one_node_has_no_other_node_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """So ten thousand pods cost as much as there are events, and the webhook answers in the same process."""
    looks: list[set[str]] = []

    def recorded(pods: Iterable[Manifest], known: Known) -> Wanted:
        pods = list(pods)
        looks.append({pod["metadata"]["name"] for pod in pods})
        return wanted(pods, known)

    monkeypatch.setattr(mount_pod_keeper, "wanted", recorded)

    async def run() -> None:
        cluster = Cluster()
        await cluster.fill()
        await cluster.api.put(f"{TEAM}/pods/other", user("other", node="n2"))
        async with cluster.kept(interval=60):
            await until(lambda: len(cluster.named(MOUNTS)) == 2)
            for name in cluster.named(MOUNTS):
                await cluster.change(name, phase="Running", conditions=[READY])
            await until(lambda: cluster.phases() == ["Served", "Served"])
            looks.clear()
            for number in range(5):
                await cluster.api.put(f"{TEAM}/pods/next-{number}", user(f"next-{number}"))
                await until(lambda: any(f"next-{number}" in look for look in looks))  # noqa: B023

    asyncio.run(run())
    # Its own last status may have been heard only then.
    assert looks.count({"other"}) <= 1 < len(looks)
    assert not [look for look in looks if "other" in look and len(look) > 1]


def test_a_volume_that_comes_after_its_user_is_served_at_once() -> None:
    """By hand, a pod can be on a node before its claim is bound."""

    async def run() -> None:
        cluster = Cluster()
        await cluster.fill()
        await cluster.api.put(f"{TEAM}/persistentvolumeclaims/photos", claim(storageClassName="s3"))
        await cluster.api.put(f"{CLASSES}/s3", CLASS)
        async with cluster.kept(interval=60):
            await until(lambda: cluster.metrics.exposition().count(b"reconcile_seconds_count 0.0") == 0)
            assert not cluster.named(MOUNTS)
            await cluster.api.put(f"{TEAM}/persistentvolumeclaims/photos", claim(volumeName="photos"))
            await until(lambda: cluster.named(MOUNTS) == [f"{NAME}-0"])

    asyncio.run(run())


def test_a_template_that_comes_after_its_users_serves_them_at_once() -> None:
    async def run() -> None:
        cluster = Cluster()
        await cluster.fill()
        template = cluster.api.objects[f"{TEMPLATES}/s3"]
        await cluster.api.remove(f"{TEMPLATES}/s3")
        async with cluster.kept(interval=60):
            await until(lambda: cluster.metrics.exposition().count(b"reconcile_seconds_count 0.0") == 0)
            assert not cluster.named(MOUNTS)
            await cluster.api.put(f"{TEMPLATES}/s3", template)
            await until(lambda: cluster.named(MOUNTS) == [f"{NAME}-0"])

    asyncio.run(run())


def test_statuses_that_follow_each_other_are_written_once() -> None:
    async def run() -> None:
        cluster = Cluster()
        await cluster.fill()
        async with cluster.kept(2):
            await until(lambda: cluster.named(MOUNTS))
            for number in range(20):
                await cluster.api.put(f"{TEAM}/pods/app-{number}", user(f"app-{number}"))
                await asyncio.sleep(0.05)
            await until(lambda: len(cluster.workloads()) == 21)
        assert len(cluster.api.patches) <= 6

    asyncio.run(run())


def test_an_api_server_that_fails_is_asked_again() -> None:
    async def run() -> None:
        cluster = Cluster()
        await cluster.fill()
        cluster.api.is_broken = True
        async with cluster.kept():
            await asyncio.sleep(0.2)
            cluster.api.is_broken = False
            await until(lambda: cluster.named(MOUNTS))

    asyncio.run(run())


def test_with_the_identity_of_users_the_pod_is_in_their_namespace() -> None:
    async def run() -> None:
        cluster = Cluster()
        await cluster.fill(shared(identity="ServiceAccount"))
        async with cluster.kept():
            await until(lambda: len(cluster.named(f"{TEAM}/pods")) == 2)
            assert not cluster.named(MOUNTS)
            await cluster.api.remove(USER)
            await until(lambda: not cluster.named(f"{TEAM}/pods") and not cluster.named(ATTACHMENTS))

    asyncio.run(run())


def test_what_is_kept_of_pods_says_the_same_as_all_of_them() -> None:
    """Also of mount pods, which their own volume does not make users."""
    by_hand = user()
    by_hand["spec"]["volumes"].append({"name": "fuse-fd-passing", "emptyDir": {"medium": "Memory"}})
    ephemeral = user()
    template = {"metadata": {"labels": {}}, "spec": {"storageClassName": "c", "volumeName": "photos"}}
    ephemeral["spec"]["volumes"] = [{"name": "data", "ephemeral": {"volumeClaimTemplate": template}}]
    inlined = user(securityContext={"fsGroup": 5}, hostUsers=True, serviceAccountName="x")
    inlined["spec"]["volumes"] = [inline()]
    for pod in (user(), by_hand, ephemeral, inlined, user(hostUsers=False), user(phase="Failed")):
        kept = kept_pods.kept(pod)
        assert kept is not None
        for cluster in (known(), known(identity="ServiceAccount")):
            assert wanted([kept], cluster) == wanted([pod], cluster)
    mount, statuses = mount_of([user()], known()), [{"name": "fuse", "state": {"terminated": {"exitCode": 3}}}]
    for made in (mount_pod(mount), mount_pod(mount, containerStatuses=statuses)):
        kept = kept_pods.kept(made)
        assert kept is not None
        assert mount_pods.existing(kept) == mount_pods.existing(made)
        assert not {"containers", "affinity"} & kept["spec"].keys()


def test_nothing_is_kept_of_pods_without_such_volumes() -> None:
    other = user()
    other["spec"]["volumes"] = [
        {"name": "a", "emptyDir": {}},
        {"name": "b", "secret": {"secretName": "c"}},
        {"name": "d", "csi": {"driver": "other"}},
    ]
    assert kept_pods.kept(other) is None
