"""Volumes of claims in a cluster: from the claim to the PersistentVolume and back, also with two controllers."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import datetime
from typing import TYPE_CHECKING

import pytest
from lightkube import ApiError

from fusermount3_controller import pod_volumes
from fusermount3_controller.cluster_cache import ClusterCache
from fusermount3_controller.controller_metrics import Metrics
from fusermount3_controller.held_templates import FINALIZER
from fusermount3_controller.packing import packed
from fusermount3_controller.pod_volume_keeper import PodVolumeKeeper
from fusermount3_controller.pod_volume_steps import Finish, SetStatus, View
from fusermount3_controller.pod_volumes import ABANDON, RETRY
from fusermount3_controller.rendering import on_node
from fusermount3_controller.served_volumes import Kind
from tests.unit.controller.api_server import ATTACHMENTS, CLASSES, POD_VOLUMES, TEMPLATES, VOLUMES, ApiServer
from tests.unit.controller.cluster import user
from tests.unit.controller.test_cluster_cache import until
from tests.unit.controller.volumes import claim, dynamic, known, manifest_of, run, storage_class

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.unit.controller.samples import Manifest

TEAM, MOUNTS = "/api/v1/namespaces/team", "/api/v1/namespaces/fuse-mounts/pods"
CLAIM = f"{TEAM}/persistentvolumeclaims/data"
NAME = "pvc-1"
VOLUME, POD_VOLUME = f"{VOLUMES}/{NAME}", f"{POD_VOLUMES}/{NAME}"


class Cluster:
    """An API server with a template, a class and a claim; `ran` are the stages of pods that have ended."""

    def __init__(self) -> None:
        self.api = ApiServer()
        self.metrics = Metrics()
        self.ran: list[str] = []

    async def fill(self, asked: Manifest | None = None, template: Manifest | None = None, **fields: object) -> None:
        template = template or dynamic()
        template["metadata"]["generation"] = 1
        await self.api.put(f"{TEMPLATES}/s3", template)
        await self.api.put(f"{CLASSES}/s3", storage_class(**fields))
        await self.api.put(CLAIM, asked or claim())

    def template(self) -> Manifest:
        return self.api.objects[f"{TEMPLATES}/s3"]

    def pods(self) -> list[Manifest]:
        return [each for path, each in self.api.objects.items() if path.startswith(MOUNTS)]

    def events(self) -> set[str]:
        return {each["reason"] for path, each in self.api.objects.items() if "/events/" in path}

    async def end(self, phase: str = "Succeeded", message: str = "") -> None:
        """Let the only pod end that may run."""
        await until(
            lambda: any(not each["spec"].get("schedulingGates") and "status" not in each for each in self.pods())
        )
        (pod,) = [each for each in self.pods() if not each["spec"].get("schedulingGates") and "status" not in each]
        ended = {"exitCode": 0 if phase == "Succeeded" else 1, "message": message}
        status = {"phase": phase, "containerStatuses": [{"name": "tool", "state": {"terminated": ended}}]}
        self.ran.append(f"{pod['metadata']['labels']['fusermount3-proxy.dev/stage']} {phase}")
        await self.api.put(f"{MOUNTS}/{pod['metadata']['name']}", copy.deepcopy(pod) | {"status": status})

    async def bind(self) -> None:
        await until(lambda: VOLUME in self.api.objects)
        await self.set(VOLUME, status={"phase": "Bound"})
        spec = {**self.api.objects[CLAIM]["spec"], "volumeName": NAME}
        await self.set(CLAIM, spec=spec, status={"phase": "Bound"})

    async def release(self) -> None:
        await self.api.remove(CLAIM)
        await self.set(VOLUME, status={"phase": "Released"})

    async def set(self, path: str, **fields: object) -> None:
        await self.api.put(path, copy.deepcopy(self.api.objects[path]) | fields)

    def is_empty(self) -> bool:
        return not self.pods() and POD_VOLUME not in self.api.objects and VOLUME not in self.api.objects

    @contextlib.asynccontextmanager
    async def kept(self, number: int = 1) -> AsyncIterator[None]:
        """So many controllers."""
        async with contextlib.AsyncExitStack() as stack:
            tasks = []
            for _ in range(number):
                client = await stack.enter_async_context(self.api.client())
                cache = ClusterCache(client, provisioning=True)
                keeper = PodVolumeKeeper(client, cache, self.metrics, "fuse-mounts")
                tasks += [asyncio.create_task(each) for each in (cache.follow(), keeper.keep(0.2))]
            yield
            assert not any(task.done() for task in tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("number", [1, 2])
def test_a_claim_gets_a_volume_and_nothing_is_left_of_it(number: int) -> None:
    async def run() -> None:
        cluster = Cluster()
        await cluster.fill()
        async with cluster.kept(number):
            await cluster.end(message='{"handle": "bucket-7", "capacity": "2Gi"}')
            await cluster.bind()
            spec = cluster.api.objects[VOLUME]["spec"]
            assert spec["capacity"] == {"storage": str(2**31)}
            assert spec["csi"] == {
                "driver": "csi.fusermount3-proxy.dev",
                "volumeHandle": "bucket-7",
                "volumeAttributes": {"volumeTemplate": "s3", "bucket": "photos"},
            }
            assert spec["claimRef"]["uid"] == "1" and spec["persistentVolumeReclaimPolicy"] == "Delete"
            await until(lambda: not cluster.pods())
            await until(lambda: cluster.template().get("status") == {"volumes": 1})
            await until(lambda: cluster.template()["metadata"].get("finalizers") == [FINALIZER])
            metadata = {**cluster.template()["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}
            await cluster.set(f"{TEMPLATES}/s3", metadata=metadata)
            await cluster.api.remove(f"{CLASSES}/s3")
            await until(lambda: "VolumeTemplateHasVolumes" in cluster.events())
            await cluster.release()
            await until(lambda: bool(cluster.pods()))
            (pod,) = cluster.pods()
            assert pod["spec"]["containers"][0]["args"] == ["rb", "bucket-7"]
            await cluster.end()
            await until(cluster.is_empty)
            await until(lambda: f"{TEMPLATES}/s3" not in cluster.api.objects)
        assert cluster.ran == ["volumeCreation Succeeded", "volumeDeletion Succeeded"]
        told = {"Provisioning", "ProvisioningSucceeded", "VolumeDeleted", "VolumeTemplateHasVolumes"}
        assert cluster.events() == told
        exposition = cluster.metrics.exposition().decode()
        assert 'pod_runs_total{result="succeeded",stage="volumeCreation"} 1.0' in exposition

    asyncio.run(run())


def test_what_a_failed_creation_left_is_deleted() -> None:
    async def run() -> None:
        cluster = Cluster()
        await cluster.fill()
        async with cluster.kept():
            await cluster.end("Failed", '{"error": "no such region", "handle": "half"}')
            await until(lambda: any("rb" in each["spec"]["containers"][0]["args"] for each in cluster.pods()))
            (pod,) = [each for each in cluster.pods() if "rb" in each["spec"]["containers"][0]["args"]]
            assert pod["spec"]["containers"][0]["args"] == ["rb", "half"]
            await cluster.end()
            await cluster.api.remove(CLAIM)
            await until(cluster.is_empty)
        (told,) = [
            each["message"]
            for path, each in cluster.api.objects.items()
            if "/events/" in path and "Failed" in each["reason"]
        ]
        assert told == f"pod {NAME}-0: no such region; trying again in 5 s"

    asyncio.run(run())


def test_what_is_to_be_kept_is_kept() -> None:
    async def run() -> None:
        cluster = Cluster()
        await cluster.fill(reclaimPolicy="Retain")
        async with cluster.kept():
            await cluster.end()
            await cluster.bind()
            await cluster.release()
            await asyncio.sleep(0.5)
            assert not cluster.pods() and VOLUME in cluster.api.objects and POD_VOLUME in cluster.api.objects
            metadata = {**cluster.api.objects[VOLUME]["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}
            await cluster.set(VOLUME, metadata=metadata)
            await until(cluster.is_empty)
        assert cluster.ran == ["volumeCreation Succeeded"]

    asyncio.run(run())


def test_somebody_can_take_a_volume_as_deleted() -> None:
    async def run() -> None:
        cluster = Cluster()
        await cluster.fill()
        async with cluster.kept():
            await cluster.end()
            await cluster.bind()
            await cluster.release()
            await cluster.end("Failed", "the server is gone")
            await until(lambda: "VolumeFailedDelete" in cluster.events())
            await cluster.set(
                POD_VOLUME, metadata={**cluster.api.objects[POD_VOLUME]["metadata"], "annotations": {ABANDON: ""}}
            )
            await until(cluster.is_empty)
        assert "VolumeAbandoned" in cluster.events()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "asked", "says"),
    [
        ({"parameters": {}}, claim(), "parameters.volumeTemplate: is missing"),
        ({"parameters": {"volumeTemplate": "s4"}}, claim(), "there is no VolumeTemplate 's4'"),
        ({"parameters": {"volumeTemplate": "s3", "bukcet": "x"}}, claim(), "unknown 'bukcet'"),
        ({}, claim(volumeMode="Block"), "spec.volumeMode: must be Filesystem, not Block"),
        (
            {"mountOptions": ["ro"]},
            claim(volumeMode="Block"),
            "StorageClass s3: mountOptions: a volume with volumeMode",
        ),
        ({}, claim(selector={"matchLabels": {}}), "spec.selector: chooses among volumes that exist"),
        ({}, claim(dataSource={"kind": "VolumeSnapshot", "name": "x"}), "a template creates only empty volumes"),
    ],
)
def test_a_claim_that_can_have_no_volume_is_told_why(fields: Manifest, asked: Manifest, says: str) -> None:
    async def run() -> None:
        cluster = Cluster()
        await cluster.fill(asked, **fields)
        async with cluster.kept():
            await until(lambda: cluster.events() == {"ProvisioningFailed"})
        (told,) = [each["message"] for path, each in cluster.api.objects.items() if "/events/" in path]
        assert says in told
        assert POD_VOLUME not in cluster.api.objects

    if "selector" in asked["spec"]:
        asked["spec"]["selector"] = {"matchLabels": {"a": "b"}}
    asyncio.run(run())


def test_a_volume_waits_for_its_first_consumer() -> None:
    async def run() -> None:
        cluster = Cluster()
        await cluster.fill(volumeBindingMode="WaitForFirstConsumer")
        async with cluster.kept():
            await asyncio.sleep(0.5)
            assert POD_VOLUME not in cluster.api.objects
            annotations = {"volume.kubernetes.io/selected-node": "n1"}
            await cluster.set(CLAIM, metadata=claim(annotations=annotations)["metadata"])
            await until(lambda: POD_VOLUME in cluster.api.objects)
            assert cluster.api.objects[POD_VOLUME]["spec"]["nodeName"] == "n1"

    asyncio.run(run())


def test_a_volume_grows_with_its_claim() -> None:
    async def run() -> None:
        cluster = Cluster()
        template = dynamic(volumeExpansion={"podTemplate": dynamic()["spec"]["volumeCreation"]["podTemplate"]})
        await cluster.fill()
        await cluster.api.put(f"{TEMPLATES}/s3", template)
        async with cluster.kept():
            await cluster.end()
            await cluster.bind()
            spec = {**cluster.api.objects[CLAIM]["spec"], "resources": {"requests": {"storage": "3Gi"}}}
            await cluster.set(CLAIM, spec=spec)
            await cluster.end()
            size = {"storage": str(3 * 2**30)}
            await until(lambda: cluster.api.objects[VOLUME]["spec"]["capacity"] == size)
            await until(lambda: cluster.api.objects[CLAIM]["status"].get("capacity") == size)
        assert "VolumeResizeSuccessful" in cluster.events()

    asyncio.run(run())


@pytest.mark.parametrize("is_there", [True, False])
def test_a_volume_is_unstaged_before_it_is_deleted(is_there: bool) -> None:
    """Or the node is gone."""

    async def run_() -> None:
        cluster = Cluster()
        await cluster.fill(template=dynamic(volumeUnstaging=run("sync", "{{ node.metadata.name }}")))
        node, attachment = "/api/v1/nodes/n1", f"{ATTACHMENTS}/mp-1"
        await cluster.api.put(node, {})
        async with cluster.kept(2):
            await cluster.end()
            await cluster.bind()
            assert pod_volumes.is_staging_recorded(cluster.api.objects[VOLUME])
            spec = {"volumeTemplate": "s3", "persistentVolumeName": NAME, "volumeID": NAME, "nodeName": "n1"}
            labels = {"fusermount3-proxy.dev/template": "s3"}
            await cluster.api.put(attachment, {"metadata": {"labels": labels}, "spec": spec})
            await until(lambda: cluster.api.objects[POD_VOLUME]["status"].get("stagedNodes") == ["n1"])
            await cluster.release()
            if not is_there:
                await cluster.api.remove(node)
            await cluster.api.remove(attachment)
            if is_there:
                await until(
                    lambda: [each["spec"]["containers"][0]["args"] for each in cluster.pods()] == [["sync", "n1"]]
                )
                await cluster.end("Failed", "busy")
                await until(lambda: "VolumeUnstagingFailed" in cluster.events())
                retry = {**cluster.api.objects[POD_VOLUME]["metadata"], "annotations": {RETRY: ""}}
                await cluster.set(POD_VOLUME, metadata=retry)
                await cluster.end()
            await cluster.end()
            await until(cluster.is_empty)
        unstaged = ["volumeUnstaging Failed", "volumeUnstaging Succeeded"] if is_there else []
        assert cluster.ran == ["volumeCreation Succeeded", *unstaged, "volumeDeletion Succeeded"]
        assert ("VolumeUnstaged" if is_there else "VolumeNodeGone") in cluster.events()

    asyncio.run(run_())


@pytest.mark.parametrize(
    ("namespace", "nodes"), [("fuse-mounts", {"n1"}), ("team", {"n1"}), ("devices", {"n1"}), ("foreign", set())]
)
def test_a_volume_is_in_use_for_as_long_as_a_mount_pod_is_there(namespace: str, nodes: set[str]) -> None:
    """Also if somebody has deleted its MountPodAttachment, and it waits for its users. Other namespaces have none."""

    async def run() -> None:
        cluster = Cluster()
        manifest, template = manifest_of(known()), dynamic()
        template["spec"]["volumeStaging"]["namespace"] = "devices"
        await cluster.fill(template=template)
        name = f"mp-{'0' * 20}"
        owner = {"kind": "MountPodAttachment", "name": name, "controller": True}
        metadata = {"labels": {pod_volumes.VOLUME_LABEL: NAME}, "ownerReferences": [owner]}
        pod = {"metadata": metadata, "spec": on_node({}, "n1")}
        await cluster.api.put(f"/api/v1/namespaces/{namespace}/pods/{name}-0", pod)
        async with cluster.api.client() as client:
            cache = ClusterCache(client, provisioning=True)
            await cache._list(Kind.TEMPLATE)
            keeper = PodVolumeKeeper(client, cache, cluster.metrics, "fuse-mounts")
            assert (await keeper._view(pod_volumes.parse(manifest))).nodes == nodes

    asyncio.run(run())


def test_a_status_is_written_only_on_what_it_was_decided() -> None:
    async def run() -> None:
        cluster = Cluster()
        manifest = manifest_of(known())
        await cluster.api.put(POD_VOLUME, manifest)
        stale = pod_volumes.parse(cluster.api.objects[POD_VOLUME])
        await cluster.set(POD_VOLUME, status={"phase": "Creating"})
        async with cluster.api.client() as client:
            keeper = PodVolumeKeeper(client, ClusterCache(client, provisioning=True), cluster.metrics, "fuse-mounts")
            now = datetime.datetime.now(datetime.UTC)
            for step in (SetStatus(stale.status), Finish()):
                ending = stale._replace(is_ending=True)
                with pytest.raises(ApiError, match="has been modified"):
                    await keeper._do(View(ending), step, now)
        assert cluster.api.objects[POD_VOLUME]["status"] == {"phase": "Creating"}

    asyncio.run(run())


def test_who_leads_again_looks_at_what_another_one_may_have_changed() -> None:
    """Here, at a template that says again that it has no volume."""

    async def run() -> None:
        cluster = Cluster()
        await cluster.fill()
        await cluster.api.put(POD_VOLUME, manifest_of(known()))

        def is_held() -> bool:
            template = cluster.template()
            volumes = template.get("status", {}).get("volumes")
            return template["metadata"].get("finalizers") == [FINALIZER] and bool(volumes == 1)

        async with cluster.api.client() as client:
            cache = ClusterCache(client, provisioning=True)
            following = asyncio.create_task(cache.follow())
            keeper = PodVolumeKeeper(client, cache, cluster.metrics, "fuse-mounts")
            for _ in range(2):
                leading = asyncio.create_task(keeper.keep(0.05))
                await until(lambda: is_held() and keeper._held)
                leading.cancel()
                await asyncio.gather(leading, return_exceptions=True)
                assert "pod_volumes{" not in cluster.metrics.exposition().decode()
                metadata = cluster.template()["metadata"] | {"finalizers": []}
                await cluster.set(f"{TEMPLATES}/s3", metadata=metadata, status={})
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    asyncio.run(run())


def test_what_becomes_of_pods_of_others_has_nobody_look() -> None:
    """A cluster has many of them; a pod of a PodVolume is kept as long as it is there."""

    async def run() -> None:
        cluster = Cluster()
        await cluster.fill()
        async with cluster.api.client() as client:
            keeper = PodVolumeKeeper(client, ClusterCache(client, provisioning=True), cluster.metrics, "fuse-mounts")
            keeper._hear(Kind.POD, None, packed(user()))
            keeper._hear(Kind.POD, packed(user()), None)
            assert not keeper._changed.is_set()
            owner = {"kind": pod_volumes.KIND, "uid": "1", "controller": True}
            before = {"metadata": {"name": f"{NAME}-0", "ownerReferences": [owner]}}
            after = {**before, "status": {"phase": "Succeeded"}}
            keeper._hear(Kind.POD, None, packed(before))
            assert keeper._changed.is_set()
            keeper._hear(Kind.POD, packed(before), packed(after))
            assert keeper._runs == {"1": {f"{NAME}-0": after}}
            keeper._hear(Kind.POD, packed(after), None)
            assert keeper._runs == {}

    asyncio.run(run())
