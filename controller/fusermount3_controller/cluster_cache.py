"""The objects of the cluster by which volumes are resolved, and the pods that use or serve them, kept by watches.

Of each kind there is a list, and a watch from there on. As a watch can die without a word, all is listed again from
time to time. What was created a moment ago may not have come yet, so `looked_up` asks for what is missing.
"""

import asyncio
import contextlib
import logging
import time
from collections import ChainMap
from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple, NoReturn

from lightkube import ALL_NS, ApiError, AsyncClient
from lightkube.generic_resource import create_global_resource, create_namespaced_resource

from fusermount3_controller import claims, kept_pods, mount_pods, pod_volumes, volume_templates
from fusermount3_controller.api_errors import NOT_FOUND
from fusermount3_controller.faults import Invalid
from fusermount3_controller.packing import packed, unpacked
from fusermount3_controller.rendering import DRIVER
from fusermount3_controller.served_volumes import Kind, Known, Reference
from fusermount3_controller.volume_templates import VolumeTemplate

#: Seconds after which all objects of a kind are listed again: what a dead watch costs at most.
RESYNC = 60.0
#: Seconds between tries to reach the API server: the first, and the longest.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 15.0
#: Objects in one answer to a list: while it is parsed, the webhook waits.
_CHUNK = 100
#: How often what was found leads to what has to be found: a claim, its class or volume, the template, the namespace.
_STEPS = 4

_log = logging.getLogger(__name__)

#: A claim's namespace and name; the name of all others.
Key = tuple[str, str] | str
Objects = Mapping[Kind, Mapping[Any, Any]]
#: Is told the kind of an object, and what was kept of it before and is after; None, if there was or is none. Pods and
#: MountPodAttachments are packed.
Listener = Callable[[Kind, Any, Any], None]


class _Watched(NamedTuple):
    """A kind of objects, and what is kept of one: None, if it does not count."""

    resource: Any
    kept: Callable[[Mapping[str, Any]], Any]
    namespaced: bool = False


def _claim(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what volumes need of a claim; and what its volume needs, if that is ours to provide."""
    result = {"spec": _some(manifest.get("spec"), "volumeName", "storageClassName")}
    metadata = manifest.get("metadata") or {}
    annotations = _some(metadata.get("annotations"), *claims.ANNOTATIONS)
    if DRIVER not in annotations.values():
        return result
    names = ("name", "namespace", "uid", "deletionTimestamp")
    spec = {**result["spec"], **_some(manifest.get("spec"), "resources")}
    status = _some(manifest.get("status"), "phase", "capacity")
    return {"metadata": {**_some(metadata, *names), "annotations": annotations}, "spec": spec, "status": status}


def _volume(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    spec = manifest.get("spec") or {}
    csi = _some(spec.get("csi"), "driver", "readOnly", "volumeAttributes", "volumeHandle")
    claim = {"claimRef": _some(spec["claimRef"], "namespace", "name", "uid")} if spec.get("claimRef") else {}
    fields = _some(spec, "accessModes", "capacity", "mountOptions", "volumeMode")
    result = {"metadata": _some(manifest.get("metadata"), "name"), "spec": {**fields, **claim, "csi": csi}}
    if pod_volumes.is_provisioned(manifest):
        result["metadata"] |= _some(manifest["metadata"], "deletionTimestamp", "finalizers", "annotations")
        result["spec"] |= _some(spec, "persistentVolumeReclaimPolicy")
        result["status"] = _some(manifest.get("status"), "phase")
    return result


def _class(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    return _some(manifest, *claims.CLASS_FIELDS)


def _namespace(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"metadata": {"labels": (manifest.get("metadata") or {}).get("labels") or {}}}


def _pod(manifest: Mapping[str, Any]) -> bytes | None:
    kept = kept_pods.kept(manifest)
    return None if kept is None else packed(kept)


def _attachment(manifest: Mapping[str, Any]) -> bytes:
    metadata = _some(manifest.get("metadata"), "name", "uid")
    return packed({"metadata": metadata, **{name: manifest.get(name) or {} for name in ("spec", "status")}})


def _pod_volume(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    names = ("name", "uid", "resourceVersion", "annotations", "deletionTimestamp")
    return {"metadata": _some(manifest.get("metadata"), *names), **_some(manifest, "spec", "status")}


def _template(manifest: Mapping[str, Any]) -> VolumeTemplate | str:
    """Return the template, or why it can't be used."""
    try:
        return volume_templates.parse({"apiVersion": volume_templates.API_VERSION, "kind": Kind.TEMPLATE, **manifest})
    except Invalid as error:
        return "; ".join(map(str, error.faults))


def _some(value: Mapping[str, Any] | None, *names: str) -> dict[str, Any]:
    return {name: value[name] for name in names if value.get(name) is not None} if value else {}


# Not the library's models of these: one object that they refuse would be the failure of a whole list.
_GROUP, _, _VERSION = volume_templates.API_VERSION.partition("/")
POD: Any = create_namespaced_resource("", "v1", "Pod", "pods")
ATTACHMENT: Any = create_global_resource(_GROUP, _VERSION, mount_pods.ATTACHMENT, mount_pods.ATTACHMENTS)
EVENT: Any = create_namespaced_resource("", "v1", "Event", "events")
TEMPLATE: Any = create_global_resource(_GROUP, _VERSION, Kind.TEMPLATE, "volumetemplates")
POD_VOLUME: Any = create_global_resource(_GROUP, _VERSION, pod_volumes.KIND, pod_volumes.PLURAL)
CLAIM: Any = create_namespaced_resource("", "v1", Kind.CLAIM, "persistentvolumeclaims")
NODE: Any = create_global_resource("", "v1", "Node", "nodes")
VOLUME: Any = create_global_resource("", "v1", Kind.VOLUME, "persistentvolumes")
_WATCHED = {
    Kind.TEMPLATE: _Watched(TEMPLATE, _template),
    Kind.CLAIM: _Watched(CLAIM, _claim, namespaced=True),
    Kind.VOLUME: _Watched(VOLUME, _volume),
    Kind.CLASS: _Watched(create_global_resource("storage.k8s.io", "v1", Kind.CLASS, "storageclasses"), _class),
    Kind.POD: _Watched(POD, _pod, namespaced=True),
    Kind.ATTACHMENT: _Watched(ATTACHMENT, _attachment),
    Kind.NAMESPACE: _Watched(create_global_resource("", "v1", Kind.NAMESPACE, "namespaces"), _namespace),
    Kind.POD_VOLUME: _Watched(POD_VOLUME, _pod_volume),
}


class ClusterCache:
    """What of the cluster is known; `follow` keeps it up to date. PodVolumes are known only with `provisioning`."""

    def __init__(self, client: AsyncClient, resync: float = RESYNC, *, provisioning: bool = False) -> None:
        self._client = client
        self._resync = resync
        self._kinds = [kind for kind in _WATCHED if provisioning or kind is not Kind.POD_VOLUME]
        self._objects: dict[Kind, dict[Key, Any]] = {kind: {} for kind in _WATCHED}
        self._listed: dict[Kind, float] = {}
        self._listeners: list[Listener] = []
        #: Of the kinds that are being listed, the versions of what watches have told meanwhile.
        self._heard: dict[Kind, dict[Key, int]] = {}

    def is_full(self) -> bool:
        """Return whether all kinds have been listed once."""
        return self._listed.keys() == set(self._kinds)

    def sizes(self) -> dict[Kind, int]:
        """Return the number of objects of each kind."""
        return {kind: len(objects) for kind, objects in self._objects.items()}

    def age(self) -> float:
        """Return the seconds since the kind was listed whose list is the oldest; infinite, until all were."""
        return time.monotonic() - min(self._listed.values()) if self.is_full() else float("inf")

    def listen(self, listener: Listener) -> None:
        """Have the listener told of each change from now on; before the cache is full, of each object."""
        self._listeners.append(listener)

    def objects(self, kind: Kind) -> list[Any]:
        """Return what is kept of all objects of a kind, unpacked."""
        return [unpacked(each) if isinstance(each, bytes) else each for each in self._objects[kind].values()]

    def known(self) -> Known:
        return _known(self._objects)

    async def looked_up(self, missing: Callable[[Known], Set[Reference]]) -> Known:
        """Return what is known, after asking the API server for what is `missing` from it.

        Raises httpx2.HTTPError, of which ApiError is one, if that can't be asked.
        """
        found: dict[Kind, dict[Key, Any]] = {kind: {} for kind in _WATCHED}
        known, asked = self.known(), set[Reference]()
        for _ in range(_STEPS):
            references = missing(known) - asked
            if not references:
                break
            asked |= references
            for reference in references:
                if (kept := await self._get(reference)) is not None:
                    found[reference.kind][_key(reference.namespace, reference.name)] = kept
            known = _known({kind: ChainMap(found[kind], objects) for kind, objects in self._objects.items()})
        return known

    async def follow(self) -> NoReturn:
        """Keep all kinds up to date, whatever happens to the API server."""
        async with asyncio.TaskGroup() as tasks:
            for kind in self._kinds:
                tasks.create_task(self._follow(kind))
        raise AssertionError("no task ends")

    async def _get(self, reference: Reference) -> Any:
        """Return what is kept of an object; None if there is none."""
        resource, kept, namespaced = _WATCHED[reference.kind]
        where = {"namespace": reference.namespace} if namespaced else {}
        try:
            return kept((await self._client.get(resource, reference.name, **where)).to_dict())
        except ApiError as error:
            if error.status.code == NOT_FOUND:
                return None
            raise

    async def _follow(self, kind: Kind) -> NoReturn:
        pause = _FIRST_PAUSE
        while True:
            try:
                version = await self._list(kind)
                pause = _FIRST_PAUSE
                while True:
                    version = await self._watch_and_list(kind, version)
            except Exception as error:
                # Whatever it was: a cache that is not followed any more would grow old unnoticed.
                _log.warning("can't watch %s: %r; trying again in %.1f s", kind, error, pause)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def _watch_and_list(self, kind: Kind, version: str) -> str:
        """Watch from a version on, until all has been listed again; return the version of what is known then."""
        watching = asyncio.create_task(self._watch(kind, version))
        try:
            done, _ = await asyncio.wait({watching}, timeout=self._resync)
            for each in done:
                each.result()  # raises, for no watch ends
            return await self._list(kind)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _list(self, kind: Kind) -> str:
        """Read all objects of a kind; return the version of what is known then.

        That takes seconds. What a watch hears meanwhile counts if it is newer than the list (versions are numbers,
        of which the greater one is newer: KEP-5504).
        """
        resource, kept, namespaced = _WATCHED[kind]
        objects, listed = self._objects[kind], dict[Key, Any]()
        heard = self._heard[kind] = {}
        found = self._client.list(resource, chunk_size=_CHUNK, **_everywhere(namespaced))
        try:
            async for each in found:
                key, after = _key_of(each), kept(each)
                # One of two that are equal is enough, for there are many.
                listed[key] = before if (before := objects.get(key)) == after else after
        finally:
            del self._heard[kind]
        version = int(found.resourceVersion)
        for key in objects.keys() | listed.keys():
            if heard.get(key, 0) <= version:
                self._keep(kind, key, listed.get(key))
        self._listed[kind] = time.monotonic()
        return str(max(version, *heard.values()) if heard else version)

    async def _watch(self, kind: Kind, version: str) -> NoReturn:
        resource, kept, namespaced = _WATCHED[kind]
        events: Any = self._client.watch(resource, resource_version=version, **_everywhere(namespaced))
        async with contextlib.aclosing(events):
            async for event, each in events:
                key = _key_of(each)
                if kind in self._heard:
                    self._heard[kind][key] = int(each["metadata"]["resourceVersion"])
                self._keep(kind, key, None if event == "DELETED" else kept(each))
        raise AssertionError("no watch ends")

    def _keep(self, kind: Kind, key: Key, after: Any) -> None:
        """Keep what an object is now; None: it does not count, or is gone."""
        objects = self._objects[kind]
        before = objects.get(key)
        if before == after:
            return
        if after is None:
            del objects[key]
        else:
            objects[key] = after
        for listener in self._listeners:
            listener(kind, before, after)


def _everywhere(namespaced: bool) -> dict[str, Any]:
    return {"namespace": ALL_NS} if namespaced else {}


def _key(namespace: str | None, name: str) -> Key:
    return (namespace, name) if namespace else name


def _key_of(manifest: Mapping[str, Any]) -> Key:
    return _key(manifest["metadata"].get("namespace"), manifest["metadata"]["name"])


def _known(objects: Objects) -> Known:
    templates = objects[Kind.TEMPLATE]
    return Known(
        templates={name: each for name, each in templates.items() if isinstance(each, VolumeTemplate)},
        claims=objects[Kind.CLAIM],
        volumes=objects[Kind.VOLUME],
        classes=objects[Kind.CLASS],
        unusable={name: each for name, each in templates.items() if isinstance(each, str)},
        namespaces=objects[Kind.NAMESPACE],
    )
