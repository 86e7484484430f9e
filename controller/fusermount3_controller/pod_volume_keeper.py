"""Keeps the volumes that are created for claims: finds the claims, and takes one step after another with each volume.

The cache only says where something may be to do. What is done is decided on what the API server says then: first the
PodVolume is read, and after it all else, so nothing that the PodVolume names can be missing because it is too new.
"""

import asyncio
import contextlib
import datetime
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from itertools import chain
from typing import Any, NoReturn

from lightkube import ApiError, AsyncClient
from lightkube.types import PatchType

from fusermount3_broker.messages.untrusted_text import visible
from fusermount3_controller import (
    claims,
    events,
    held_templates,
    mount_pods,
    pod_volume_steps,
    pod_volumes,
    run_results,
    volume_templates,
)
from fusermount3_controller.api_errors import CONFLICT, NOT_FOUND, already
from fusermount3_controller.cluster_cache import (
    ATTACHMENT,
    CLAIM,
    NODE,
    POD,
    POD_VOLUME,
    TEMPLATE,
    VOLUME,
    ClusterCache,
)
from fusermount3_controller.controller_metrics import Metrics
from fusermount3_controller.event_writer import EventWriter
from fusermount3_controller.events import Involved
from fusermount3_controller.faults import Invalid
from fusermount3_controller.packing import unpacked
from fusermount3_controller.pod_volume_steps import (
    CreatePersistentVolume,
    CreateRun,
    DeletePersistentVolume,
    DeleteRun,
    Event,
    Finish,
    Forget,
    Grow,
    ReleasePersistentVolume,
    SetStatus,
    Step,
    Ungate,
    View,
    Wait,
    next_step,
)
from fusermount3_controller.pod_volumes import FINALIZER, Phase, PodVolume
from fusermount3_controller.rendering import TEMPLATE_LABEL
from fusermount3_controller.served_volumes import Kind, Manifest

#: Seconds between looks while nothing is heard.
INTERVAL = 10.0
#: Seconds after a look in which what is heard is collected.
_COLLECTING = 0.1
#: Seconds until the next try, if the API server can't be asked.
_PAUSE = 2.0
#: Steps that one look takes with a volume at most; the next look goes on.
_STEPS = 8
#: Volumes with which steps are taken at the same time.
_AT_ONCE = 16
#: Phases of a volume that may still get its handle.
_NEW = (Phase.PENDING, Phase.CREATING, Phase.UNDOING)

Labels = dict[str, Any]

_log = logging.getLogger(__name__)


class PodVolumeKeeper:
    """Keeps the PodVolumes; `namespace`: of the pods that create and delete volumes."""

    def __init__(self, client: AsyncClient, cache: ClusterCache, metrics: Metrics, namespace: str) -> None:
        self._client = client
        self._cache = cache
        self._changed = asyncio.Event()
        #: The pods that PodVolumes own, by the UID of that and their names.
        self._runs: dict[str, dict[str, Manifest]] = {}
        cache.listen(self._hear)
        self._metrics = metrics
        self._namespace = namespace
        self._events = EventWriter(client)
        #: How many volumes templates have, once all say so.
        self._held: Counter[str] | None = None

    def _hear(self, kind: Kind, before: Any, after: Any) -> None:
        # Most pods of a cluster are not ours, and what becomes of them changes nothing here.
        if kind is not Kind.POD or self._note_pod(before, after):
            self._changed.set()

    def _note_pod(self, before: bytes | None, after: bytes | None) -> bool:
        """Keep a pod that a PodVolume owns as it is now, None if it is gone; return whether it is one."""
        pods = [(each is after, unpacked(each)) for each in (before, after) if each is not None]
        owned = [(is_there, pod, uid) for is_there, pod in pods if (uid := run_results.owner(pod))]
        for is_there, pod, uid in owned:
            runs = self._runs.setdefault(uid, {})
            runs.pop(pod["metadata"]["name"], None)
            if is_there:
                runs[pod["metadata"]["name"]] = pod
            if not runs:
                del self._runs[uid]
        return bool(owned)

    async def keep(self, interval: float = INTERVAL) -> NoReturn:
        """Look whenever something is heard, when a time has come, and from time to time."""
        try:
            await self._keep(interval)
        finally:
            self._held = None  # another replica may change it
            self._metrics.show_pod_volumes({})

    async def _keep(self, interval: float) -> NoReturn:
        while True:
            now = datetime.datetime.now(datetime.UTC)
            pause = _COLLECTING
            self._changed.clear()
            due = None
            try:
                due = await self.look(now)
            except Exception as error:
                # Whatever it was: who does not look any more keeps all claims waiting.
                pause = _PAUSE
                _log.warning("can't look after the volumes of claims: %r; trying again in %.0f s", error, pause)
                self._changed.set()
            await asyncio.sleep(pause)
            seconds = interval if due is None else min(interval, max(0.0, (due - now).total_seconds()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()

    async def look(self, now: datetime.datetime) -> datetime.datetime | None:
        """Do what is to be done; return when there is more.

        Raises httpx2.HTTPError, if the API server can't be asked.
        """
        if not self._cache.is_full():
            return None
        known = {each["metadata"]["name"]: each for each in self._cache.objects(Kind.POD_VOLUME)}
        volumes = [pod_volumes.parse(each) for each in known.values()]
        self._metrics.show_pod_volumes(
            Counter((str(each.spec.get("volumeTemplate")), str(each.status.phase)) for each in volumes)
        )
        waiting = [each for each in self._cache.objects(Kind.CLAIM) if claims.is_ours(each)]
        todo = [self._provide(each, now) for each in waiting if claims.name_of(each) not in known]
        due: datetime.datetime | None = None
        runs = {uid: list(pods.values()) for uid, pods in self._runs.items()}
        for volume, step in await asyncio.to_thread(self._decided, volumes, runs, now):
            # Only the API server says whether a node is gone.
            if not isinstance(step, Wait) or volume.status.unstaging:
                todo.append(self._advance(volume.name, now))
            if isinstance(step, Wait) and step.until:
                due = min(step.until, due or step.until)
        limit = asyncio.Semaphore(_AT_ONCE)
        await asyncio.gather(*(_limited(each, limit) for each in todo))
        await self._remove_orphans(known)
        await self._hold_templates(Counter(str(each.spec.get("volumeTemplate")) for each in volumes), now)
        return due

    def _decided(
        self, volumes: list[PodVolume], pods: Mapping[str, list[Manifest]], now: datetime.datetime
    ) -> list[tuple[PodVolume, Step]]:
        """Return what would be to do, if the cluster was as the cache has it; `pods`: by the UID of their PodVolume."""
        known = self._cache.known()
        by_uid = {uid: each for each in known.claims.values() if (uid := (each.get("metadata") or {}).get("uid"))}
        served = _served(self._cache.objects(Kind.ATTACHMENT))
        result = []
        for volume in volumes:
            existing = known.volumes.get(volume.name)
            runs = (run_results.existing(pod, volume.uid) for pod in pods.get(volume.uid, []))
            view = View(
                volume,
                tuple(each for each in runs if each),
                by_uid.get(_claim_ref(volume, existing).get("uid", "")),
                existing,
                _nodes(volume, served),
                taken=self._taken(volume),
            )
            result.append((volume, next_step(view, now)))
        return result

    def _taken(self, volume: PodVolume) -> frozenset[str]:
        """Return the handles that a volume can't get, as long as it may get one."""
        if volume.status.phase not in _NEW:
            return frozenset()
        template = volume.spec.get("volumeTemplate")
        return frozenset(
            handle
            for each in self._cache.objects(Kind.POD_VOLUME)
            if each["metadata"]["name"] != volume.name
            and each["spec"].get("volumeTemplate") == template
            and (handle := (each.get("status") or {}).get("handle"))
        )

    async def _provide(self, cached: Manifest, now: datetime.datetime) -> None:
        """Create the PodVolume of a claim, unless it has to wait or can't have one."""
        metadata = cached["metadata"]
        known = self._cache.known()
        storage_class = known.classes.get(str(cached["spec"].get("storageClassName")))
        if storage_class is None or not claims.is_due(cached, storage_class):
            return
        claim = await self._got(CLAIM, metadata["name"], metadata["namespace"])
        if claim is None or claim["metadata"]["uid"] != metadata["uid"] or not claims.is_ours(claim):
            return
        try:
            manifest = claims.pod_volume(claim, storage_class, known)
        except Invalid as error:
            await self._tell(_involved_claim(claim["metadata"]), Event(pod_volume_steps.FAILED, str(error)), now)
            return
        with already(CONFLICT):
            await self._client.create(POD_VOLUME(manifest))
            _log.info("%s: created for the claim %s/%s", claims.name_of(claim), metadata["namespace"], metadata["name"])
        await self._advance(claims.name_of(claim), now)

    # Steps

    async def _advance(self, name: str, now: datetime.datetime) -> None:
        """Take steps with a volume until it has to wait."""
        for _ in range(_STEPS):
            manifest = await self._got(POD_VOLUME, name)
            if manifest is None:
                return
            view = await self._view(pod_volumes.parse(manifest))
            step = next_step(view, now)
            if isinstance(step, Wait):
                return
            try:
                if not await self._do(view, step, now):
                    return
            except Invalid as error:
                _log.warning("%s", visible(f"{name}: {error}"))
                return
            except ApiError as error:
                if error.status.code != CONFLICT:
                    await self._refused(view, step, error, now)
                return

    async def _view(self, volume: PodVolume) -> View:
        """Return what the API server says now of all that has to do with a volume."""
        existing = await self._got(VOLUME, volume.name)
        ref = _claim_ref(volume, existing)
        pods = {each: await self._pods(volume, each) for each in self._namespaces(volume, ref)}
        runs = [run_results.existing(each, volume.uid) for each in pods[self._namespace]]
        claim = await self._got(CLAIM, ref["name"], ref["namespace"]) if ref else None
        template: Labels = {TEMPLATE_LABEL: str(volume.spec.get("volumeTemplate"))}
        served = _served([each.to_dict() async for each in self._client.list(ATTACHMENT, labels=template)])
        # A mount pod may be there for longer than its MountPodAttachment.
        nodes = _nodes(volume, served).union(filter(None, map(mount_pods.node_of, chain(*pods.values()))))
        left = [node for node in volume.status.staged if node not in nodes]
        return View(
            volume,
            tuple(each for each in runs if each),
            claim if claim and claim["metadata"]["uid"] == ref.get("uid") else None,
            existing,
            nodes,
            frozenset([node for node in left if not await self._got(NODE, node)]),
            self._taken(volume),
        )

    def _namespaces(self, volume: PodVolume, claim: Mapping[str, Any]) -> set[str]:
        """Return where pods of a volume may be: its own, and mount pods, which have no other namespaces than these."""
        template = self._cache.known().templates.get(str(volume.spec.get("volumeTemplate")))
        others = (template.namespace if template else "", claim.get("namespace", ""))
        return {self._namespace, *filter(None, others)}

    async def _pods(self, volume: PodVolume, namespace: str) -> list[Manifest]:
        """Return the pods of a namespace that have the volume's label."""
        labels: Labels = {pod_volumes.VOLUME_LABEL: volume.name}
        return [each.to_dict() async for each in self._client.list(POD, namespace=namespace, labels=labels)]

    async def _do(self, view: View, step: Step, now: datetime.datetime) -> bool:
        """Take one step; return whether another one may follow at once."""
        volume, client = view.volume, self._client
        match step:
            case CreateRun(stage, number, requested):
                pod = pod_volumes.run_pod(volume, stage, number, self._namespace, requested)
                with already(CONFLICT):
                    await client.create(POD(pod))
            case Ungate(pod):
                patch: Manifest = {"metadata": {"uid": pod.uid}, "spec": {"schedulingGates": None}}
                with already(NOT_FOUND):
                    await client.patch(POD, pod.name, patch, namespace=self._namespace, patch_type=PatchType.MERGE)
            case DeleteRun(pod):
                with already(NOT_FOUND):
                    await client.delete(POD, pod.name, namespace=self._namespace)
            case SetStatus(status, event):
                patch = {"metadata": _precondition(volume), "status": pod_volumes.status_manifest(status)}
                await client.patch(POD_VOLUME.Status, volume.name, patch, patch_type=PatchType.MERGE)
                self._count(view, status)
                if event:
                    await self._tell(_involved(view), event, now)
            case CreatePersistentVolume():
                with already(CONFLICT):
                    await client.create(VOLUME(pod_volumes.persistent_volume(volume)))
            case DeletePersistentVolume():
                with already(NOT_FOUND):
                    await client.delete(VOLUME, volume.name)
            case ReleasePersistentVolume():
                await self._release(view.persistent_volume or {})
            case Grow(capacity):
                await self._grow(view, capacity)
            case Forget(annotation):
                patch = {"metadata": {"annotations": {annotation: None}}}
                await client.patch(POD_VOLUME, volume.name, patch, patch_type=PatchType.MERGE)
            case Finish():
                await self._finish(volume)
            case Wait():
                return False
        return True

    async def _finish(self, volume: PodVolume) -> None:
        if not volume.is_ending:
            with already(NOT_FOUND):
                await self._client.delete(POD_VOLUME, volume.name)
            return
        patch = {"metadata": {**_precondition(volume), "finalizers": None}}
        with already(NOT_FOUND):
            await self._client.patch(POD_VOLUME, volume.name, patch, patch_type=PatchType.MERGE)
            _log.info("%s: nothing is left of it", volume.name)

    async def _release(self, volume: Mapping[str, Any]) -> None:
        metadata = volume["metadata"]
        others = [each for each in metadata.get("finalizers") or [] if each != FINALIZER]
        patch = {"metadata": {"resourceVersion": metadata["resourceVersion"], "finalizers": others}}
        with already(NOT_FOUND):
            await self._client.patch(VOLUME, metadata["name"], patch, patch_type=PatchType.MERGE)

    async def _grow(self, view: View, capacity: int) -> None:
        assert view.claim is not None
        storage = {"capacity": {"storage": str(capacity)}}
        await self._client.patch(VOLUME, view.volume.name, {"spec": storage}, patch_type=PatchType.MERGE)
        metadata = view.claim["metadata"]
        await self._client.patch(
            CLAIM.Status,
            metadata["name"],
            {"status": storage},
            namespace=metadata["namespace"],
            patch_type=PatchType.MERGE,
        )

    async def _remove_orphans(self, known: Mapping[str, Manifest]) -> None:
        """Delete PersistentVolumes that came too late: their volumes are deleted, and so is their PodVolume."""
        for each in self._cache.objects(Kind.VOLUME):
            spec, metadata = each.get("spec") or {}, each.get("metadata") or {}
            is_released = (each.get("status") or {}).get("phase") == "Released"
            is_ours = pod_volumes.is_provisioned(each) and spec.get("persistentVolumeReclaimPolicy") == "Delete"
            name = metadata.get("name", "")
            if not (is_ours and is_released) or name in known or await self._got(POD_VOLUME, name):
                continue
            if existing := await self._got(VOLUME, name):
                with already(NOT_FOUND):
                    await self._client.delete(VOLUME, name)
                await self._release(await self._got(VOLUME, name) or existing)

    async def _hold_templates(self, volumes: Counter[str], now: datetime.datetime) -> None:
        """Have templates say how many volumes they have, and keep those that have any."""
        is_any_ending = any(each.is_ending for each in self._cache.known().templates.values())
        if volumes == self._held and not is_any_ending:
            return
        complete = True
        async for each in self._client.list(TEMPLATE):
            template = held_templates.parse(each.to_dict())
            number = volumes[template.name]
            for patch, of_status in held_templates.patches(template, number):
                complete = False
                with already(CONFLICT):
                    resource = TEMPLATE.Status if of_status else TEMPLATE
                    await self._client.patch(resource, template.name, patch, patch_type=PatchType.MERGE)
            if text := held_templates.message(template, number):
                complete = False
                involved = Involved(
                    volume_templates.API_VERSION, volume_templates.KIND, "", template.name, template.uid
                )
                await self._tell(involved, Event(held_templates.HELD, text), now)
        self._held = volumes if complete else None

    # What is told

    def _count(self, view: View, status: pod_volumes.Status) -> None:
        """Count the pod whose result is written."""
        run = view.status.run
        if run and not status.run:
            failed = status.failures.get(run.stage, pod_volumes.Failures()).number
            self._metrics.count_run(run.stage, has_succeeded=failed == 0)

    async def _refused(self, view: View, step: Step, error: ApiError, now: datetime.datetime) -> None:
        """Tell why the API server does not do what is to be done; the next look tries again."""
        text = f"{type(step).__name__}: the API server refuses: {error.status.message or error}"
        _log.warning("%s", visible(f"{view.volume.name}: {text}"))
        await self._tell(_involved(view), Event(pod_volume_steps.FAILED, text), now)

    async def _tell(self, involved: Involved, event: Event, now: datetime.datetime) -> None:
        is_warning = event.reason in pod_volume_steps.WARNINGS
        await self._events.write(events.event(involved, event.reason, event.text, now, is_warning=is_warning))

    async def _got(self, resource: Any, name: str, namespace: str = "") -> Manifest | None:
        """Return an object; None, if there is none."""
        where = {"namespace": namespace} if namespace else {}
        try:
            found: Manifest = (await self._client.get(resource, name, **where)).to_dict()
        except ApiError as error:
            if error.status.code == NOT_FOUND:
                return None
            raise
        return found


async def _limited(todo: Any, limit: asyncio.Semaphore) -> None:
    async with limit:
        await todo


def _claim_ref(volume: PodVolume, existing: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the claim that counts: of the PersistentVolume, once it is there."""
    return (existing.get("spec") or {}).get("claimRef") or {} if existing else volume.claim


def _served(attachments: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], set[str]]:
    """Return the nodes where mount pods serve a PersistentVolume, by "" and its name, and by template and handle."""
    result: dict[tuple[str, str], set[str]] = {}
    for each in attachments:
        spec = each.get("spec") or {}
        of_name = ("", str(spec.get("persistentVolumeName")))
        for served in (of_name, (str(spec.get("volumeTemplate")), str(spec.get("volumeID")))):
            result.setdefault(served, set()).add(str(spec.get("nodeName")))
    return result


def _nodes(volume: PodVolume, served: Mapping[tuple[str, str], Set[str]]) -> frozenset[str]:
    """Return the nodes on which a mount pod serves the volume, or is about to."""
    nodes = frozenset(served.get(("", volume.name), ()))
    if handle := volume.status.handle:
        nodes |= served.get((str(volume.spec.get("volumeTemplate")), handle), set())
    return nodes


def _precondition(volume: PodVolume) -> Manifest:
    return {"resourceVersion": volume.version}


def _involved_claim(metadata: Mapping[str, Any]) -> Involved:
    return Involved("v1", Kind.CLAIM, metadata["namespace"], metadata["name"], metadata["uid"])


def _involved(view: View) -> Involved:
    """Return what an event is about: the claim, as long as it is there."""
    if view.claim is not None:
        return _involved_claim(view.claim["metadata"])
    return Involved(volume_templates.API_VERSION, pod_volumes.KIND, "", view.volume.name, view.volume.uid)
