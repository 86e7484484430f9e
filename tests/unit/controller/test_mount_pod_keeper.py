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
from fusermount3_controller.mount_pod_steps import GRACE_OF_REPLACED
from fusermount3_controller.mount_pods import Phase
from fusermount3_controller.pod_volumes import PROVISIONED_BY, STAGING_RECORDED, VOLUME_LABEL
from fusermount3_controller.wanted_mount_pods import Wanted, wanted
from tests.unit.controller.api_server import ATTACHMENTS, CLASSES, POD_VOLUMES, TEMPLATES, VOLUMES, ApiServer
from tests.unit.controller.cluster import NOW, at, known, mount_of, mount_pod, serving, user
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


def test_who_does_not_lead_any_more_counts_no_mount_pods() -> None:
    """Another one does, and a sum over both would have them twice."""

    async def run() -> None:
        cluster = Cluster()
        await cluster.fill()
        await cluster.api.put(USER, user(phase="Pending"))
        counted = 'fusermount3_controller_mount_pods{phase="Pending",template="s3"} 1.0'
        waiting = "fusermount3_controller_workloads_waiting 1.0"
        async with cluster.kept():
            await until(lambda: counted in cluster.metrics.exposition().decode())
            assert waiting in cluster.metrics.exposition().decode()
        exposition = cluster.metrics.exposition().decode()
        assert "fusermount3_controller_mount_pods{" not in exposition
        assert "fusermount3_controller_workloads_waiting 0.0" in exposition

    asyncio.run(run())


def test_who_leads_again_counts_them_at_once() -> None:
    """Also those of nodes of which nothing is heard."""
    counted = 'fusermount3_controller_mount_pods{phase="Served",template="s3"} 1.0'

    async def run() -> None:
        cluster = Cluster()
        await cluster.fill()
        async with looking(cluster) as keeper:
            for _ in range(2):
                leading = asyncio.create_task(keeper.keep(interval=60))
                await until(lambda: cluster.named(MOUNTS))
                if cluster.phases() != ["Served"]:
                    await cluster.change(f"{NAME}-0", phase="Running", conditions=[READY])
                await until(lambda: cluster.phases() == ["Served"] and not keeper._unsettled)
                await until(lambda: counted in cluster.metrics.exposition().decode())
                leading.cancel()
                await asyncio.gather(leading, return_exceptions=True)
                assert counted not in cluster.metrics.exposition().decode()

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
            attachment = f"{ATTACHMENTS}/{NAME}"
            await until(lambda: "message" in cluster.api.objects[attachment].get("status", {}))
            await cluster.change(f"{NAME}-0", phase="Running", conditions=[READY])
            await until(lambda: cluster.phases() == ["Served"])
            assert "message" not in cluster.api.objects[attachment]["status"]

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


@contextlib.asynccontextmanager
async def looking(cluster: Cluster) -> AsyncIterator[MountPodKeeper]:
    """A controller that looks at a node when the test says so."""
    async with cluster.api.client() as client:
        cache = ClusterCache(client)
        keeper = MountPodKeeper(client, cache, cluster.metrics, "fuse-mounts")
        task = asyncio.create_task(cache.follow())
        await until(cache.is_full)
        yield keeper
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_a_node_is_looked_at_again_when_something_may_be_due() -> None:
    async def run() -> None:
        cluster = Cluster()
        await cluster.fill()
        async with looking(cluster) as keeper:

            async def again() -> float | None:
                return await keeper.look("n1", NOW, interval=20)

            assert await again() == 20
            await until(lambda: keeper._index.attachments("n1") and keeper._index.mount_pods([NAME]))
            # The status is written later, with what else has changed by then.
            seconds = await again()
            assert seconds and 0 < seconds <= mount_pod_keeper._STATUS_DELAY
            keeper._statuses[NAME] = 0.0
            await again()
            await until(lambda: keeper._index.attachments("n1")[0].get("status", {}).get("phase") == "Pending")
            assert await again() == 20
            await cluster.change(f"{NAME}-0", phase="Running", conditions=[READY])
            await until(lambda: keeper._index.mount_pods([NAME])[0].phase is Phase.SERVED)
            keeper._statuses[NAME] = 0.0
            await again()
            await until(lambda: keeper._index.attachments("n1")[0].get("status", {}).get("phase") == "Served")
            assert await again() == mount_pod_keeper._RESYNC
            assert not keeper._unsettled and not keeper._statuses
            await cluster.api.remove(USER)
            await until(lambda: not keeper._index.users("n1"))
            await again()
            await until(lambda: not keeper._index.mount_pods([NAME]))
            await again()
            await until(lambda: not keeper._index.attachments("n1"))
            assert await again() is None
            assert not keeper._unsettled

    asyncio.run(run())


def test_a_node_with_an_idle_mount_pod_is_looked_at_again_soon() -> None:
    """Nothing is heard when its time is over."""

    async def run() -> None:
        cluster = Cluster()
        await cluster.fill(shared(idleSeconds=60))
        await cluster.api.remove(USER)
        mount = mount_of([user()], known(idleSeconds=60))
        idle = {"phase": "Served", "workloadCount": 0, "workloads": [], "idleSince": at(0)}
        idle["mountPod"] = {"namespace": "fuse-mounts", "name": f"{NAME}-0", "uid": "uid of 0"}
        await cluster.api.put(f"{ATTACHMENTS}/{NAME}", mount_pods.attachment(mount) | {"status": idle})
        await cluster.api.put(f"{MOUNTS}/{NAME}-0", serving(mount))
        async with looking(cluster) as keeper:
            assert await keeper.look("n1", NOW, interval=20) == 20
            assert not cluster.api.deletions and not cluster.api.patches

    asyncio.run(run())


def test_nothing_is_done_before_all_is_known() -> None:
    """Who knows of a mount pod and not of its users yet would delete it."""

    async def run() -> None:
        cluster = Cluster()
        await cluster.fill()
        async with looking(cluster) as keeper:
            is_full = keeper._cache.is_full
            keeper._cache.is_full = lambda: False  # type: ignore[method-assign]
            keeping = asyncio.create_task(keeper.keep())
            for _ in range(100):
                await asyncio.sleep(0)
            assert keeper._index.nodes() == {"n1"}
            assert not keeper._queue._taken and not cluster.named(ATTACHMENTS)
            keeper._cache.is_full = is_full  # type: ignore[method-assign]
            await until(lambda: cluster.named(MOUNTS))
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    asyncio.run(run())


def test_what_the_api_server_refuses_keeps_nothing_else_from_being_done() -> None:
    async def run() -> None:
        cluster = Cluster()
        await cluster.fill()
        cluster.api.refusals[MOUNTS] = "exceeded quota: fuse-mounts"
        unused = mount_pods.attachment(mount_of([user()], known()))
        # What is done about it comes later, whatever the key of the volume is.
        unused["spec"]["key"] = "z"
        await cluster.api.put(f"{ATTACHMENTS}/mp-unused", unused)
        async with looking(cluster) as keeper:
            await keeper.look("n1", NOW)
            await until(lambda: [each["metadata"]["name"] for each in keeper._index.attachments("n1")] == [NAME])
            # It is tried again soon.
            keeper._statuses[NAME] = float("inf")
            assert await keeper.look("n1", NOW, interval=20) == 20
        assert [each[0] for each in cluster.events()] == ["MountPodFailed"]
        assert cluster.named(ATTACHMENTS) == [NAME]

    asyncio.run(run())


def test_nobody_asks_for_the_volumes_of_pods_that_have_finished() -> None:
    async def run() -> None:
        cluster = Cluster()
        await cluster.fill()
        await cluster.api.remove(f"{TEAM}/persistentvolumeclaims/photos")
        await cluster.api.put(USER, user(phase="Succeeded"))
        async with looking(cluster) as keeper:
            await keeper.look("n1", NOW)
            assert not [each for each in cluster.api.requests if each.endswith("/persistentvolumeclaims/photos")]
            await cluster.api.put(USER, user())
            await until(lambda: keeper._index.users("n1")[0]["status"]["phase"] == "Running")
            await keeper.look("n1", NOW)
            assert [each for each in cluster.api.requests if each.endswith("/persistentvolumeclaims/photos")]

    asyncio.run(run())


def test_a_mount_pod_that_can_not_be_written_is_told_to_its_users() -> None:
    """Its template may not be for the parameters of every volume."""

    async def run() -> None:
        cluster = Cluster()
        template = shared()
        pod_of(template)["containers"][0]["args"] = ["{{ params.bucket | int }}"]
        await cluster.fill(template)
        async with looking(cluster) as keeper:
            await keeper.look("n1", NOW)
        ((reason, message),) = cluster.events()
        assert reason == "MountPodFailed"
        assert message.startswith(f"mount pod fuse-mounts/{NAME}-0: ")
        assert "'photos' is not a whole number" in message
        assert not cluster.named(MOUNTS)

    asyncio.run(run())


def test_a_program_that_is_replaced_has_half_a_minute_to_write_back_what_it_holds() -> None:
    async def run() -> None:
        cluster = Cluster()
        await cluster.fill(shared(upgrade="Replace"))
        old, new = (mount_of([user()], known(number, upgrade="Replace")) for number in (1, 2))
        template = shared(upgrade="Replace")
        template["metadata"]["generation"] = 2
        await cluster.api.put(f"{TEMPLATES}/s3", template)
        for each in (old, new):
            await cluster.api.put(f"{ATTACHMENTS}/{each.name}", mount_pods.attachment(each))
            await cluster.api.put(f"{MOUNTS}/{each.name}-0", serving(each))
        async with looking(cluster) as keeper:
            await keeper.look("n1", NOW)
        assert cluster.api.deletions == [(f"{MOUNTS}/{old.name}-0", GRACE_OF_REPLACED)]

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
