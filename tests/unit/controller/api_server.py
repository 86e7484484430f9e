"""An API server for the tests of the controller: objects with versions, lists, watches and patches, over HTTP.

Of the real one it has what the controller uses, and the conflict of two writers; tests/cluster has the real one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING

from aiohttp import web
from lightkube import AsyncClient, KubeConfig

from tests.unit.controller.samples import Manifest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NAMESPACE = "fusermount3-proxy"

CLAIMS = "/api/v1/persistentvolumeclaims"
VOLUMES = "/api/v1/persistentvolumes"
CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
NAMESPACES = "/api/v1/namespaces"
PODS = "/api/v1/pods"
ATTACHMENTS = "/apis/fusermount3-proxy.dev/v1alpha1/mountpodattachments"
TEMPLATES = "/apis/fusermount3-proxy.dev/v1alpha1/volumetemplates"
POD_VOLUMES = "/apis/fusermount3-proxy.dev/v1alpha1/podvolumes"
COLLECTIONS = (CLAIMS, VOLUMES, CLASSES, NAMESPACES, TEMPLATES, PODS, ATTACHMENTS, POD_VOLUMES)


#: When all objects are created.
CREATED = "2026-01-01T12:00:00Z"


class ApiServer:
    """`objects` by path; those of a collection begin with its path.

    `requests`: what was asked, without watches; `patches`: what was to be changed; `deletions`: what was to go, and in
    how many seconds, if that was said.
    """

    def __init__(self) -> None:
        self.objects: dict[str, Manifest] = {}
        self.requests: list[str] = []
        self.patches: list[str] = []
        self.deletions: list[tuple[str, int | None]] = []
        #: Seconds that each GET of one object takes.
        self.slowness = 0.0
        #: Lists are answered when this is set, with what there was when they were asked for.
        self.lists = asyncio.Event()
        self.lists.set()
        self.is_broken = False
        #: Watches tell nothing.
        self.is_silent = False
        #: What is said to who creates an object of which the path begins so.
        self.refusals: dict[str, str] = {}
        #: All versions before this one are forgotten, as the real one does after five minutes.
        self.oldest = 0
        self._version = 0
        self._events: list[tuple[int, str, str, Manifest]] = []
        self._changed = asyncio.Condition()

    async def put(self, path: str, manifest: Manifest) -> None:
        """Create an object, or change it."""
        event = "MODIFIED" if path in self.objects else "ADDED"
        self._version += 1
        name = path.rpartition("/")[2]
        namespace = path.partition("/namespaces/")[2].rpartition("/")[0].partition("/")[0]
        metadata = {**manifest.get("metadata", {}), "name": name, "resourceVersion": str(self._version)}
        if namespace:
            metadata["namespace"] = namespace
        self.objects[path] = {**manifest, "metadata": metadata}
        await self._happened(event, path, self.objects[path])

    async def remove(self, path: str) -> None:
        self._version += 1
        manifest = self.objects.pop(path)
        metadata = manifest["metadata"] | {"resourceVersion": str(self._version)}
        await self._happened("DELETED", path, manifest | {"metadata": metadata})

    async def forget(self) -> None:
        """End all watches, and know nothing of what was before."""
        self.oldest = self._version = self._version + 1
        async with self._changed:
            self._changed.notify_all()

    async def _happened(self, event: str, path: str, manifest: Manifest) -> None:
        async with self._changed:
            self._events.append((self._version, event, path, manifest))
            self._changed.notify_all()

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[AsyncClient]:
        """Serve; yield a client for it."""
        application = web.Application()
        application.router.add_get("/{path:.*}", self._get)
        application.router.add_post("/{path:.*}", self._post)
        application.router.add_delete("/{path:.*}", self._delete)
        application.router.add_patch("/{path:.*}", self._patch)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        client = AsyncClient(_configuration(f"http://{host}:{port}"), trust_env=False)
        try:
            yield client
        finally:
            await client.close()
            await runner.cleanup()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            return await self._watch(request)
        self.requests.append(request.path)
        if self.is_broken:
            return _status(500, "etcd is gone")
        if request.path in COLLECTIONS or request.path.endswith("/pods"):
            items = [each for path, each in self.objects.items() if _is_of(path, request.path)]
            items = [each for each in items if _has_labels(each, request.query.get("labelSelector", ""))]
            metadata = {"resourceVersion": str(self._version)}
            await self.lists.wait()
            return _json({"kind": "List", "apiVersion": "v1", "metadata": metadata, "items": items})
        await asyncio.sleep(self.slowness)
        if request.path not in self.objects:
            return _status(404, "not found")
        return _json(self.objects[request.path])

    async def _patch_plain(self, path: str, patch: Manifest) -> web.StreamResponse:
        changed = patched(self.objects[path], patch)
        if changed["metadata"].get("deletionTimestamp") and not changed["metadata"].get("finalizers"):
            await self.remove(path)
        else:
            await self.put(path, changed)
        return _json(changed)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        seen = int(request.query["resourceVersion"])
        with contextlib.suppress(ConnectionResetError):
            while seen >= self.oldest:
                for version, event, path, manifest in list(self._events):
                    if version > seen and not self.is_silent and _is_of(path, request.path):
                        await response.write(json.dumps({"type": event, "object": manifest}).encode() + b"\n")
                        seen = version
                async with self._changed:
                    await self._changed.wait()
            gone = {"kind": "Status", "code": 410, "message": "too old resource version"}
            await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
        return response

    async def _post(self, request: web.Request) -> web.StreamResponse:
        manifest = await request.json()
        path = f"{request.path}/{manifest['metadata']['name']}"
        await asyncio.sleep(0)
        for begin, why in self.refusals.items():
            if path.startswith(begin):
                return _status(403, why)
        if path in self.objects:
            return _status(409, "already exists")
        manifest["metadata"] |= {"uid": f"uid {self._version}", "creationTimestamp": CREATED}
        await self.put(path, manifest)
        return _json(self.objects[path], 201)

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        grace = request.query.get("gracePeriodSeconds")
        self.deletions.append((request.path, None if grace is None else int(grace)))
        if request.path not in self.objects:
            return _status(404, "not found")
        metadata = self.objects[request.path]["metadata"]
        if metadata.get("finalizers"):
            ending = {**metadata, "deletionTimestamp": CREATED}
            await self.put(request.path, {**self.objects[request.path], "metadata": ending})
        else:
            await self.remove(request.path)
        return _json({"kind": "Status", "apiVersion": "v1"})

    async def _patch(self, request: web.Request) -> web.StreamResponse:
        patch = await request.json()
        self.patches.append(request.path)
        if (path := request.path.removesuffix("/status")) != request.path:
            if path not in self.objects:
                return _status(404, "not found")
            version = patch.get("metadata", {}).get("resourceVersion")
            if version not in (None, self.objects[path]["metadata"]["resourceVersion"]):
                return _status(409, "the object has been modified")
            status = patched(self.objects[path].get("status", {}), patch["status"])
            await self.put(path, {**self.objects[path], "status": status})
            return _json(self.objects[path])
        if request.path not in self.objects:
            return _status(404, "not found")
        metadata = patch.get("metadata", {})
        version = metadata.pop("resourceVersion", None)
        await asyncio.sleep(0)  # another writer may come first
        current = self.objects[request.path]
        if version not in (None, current["metadata"]["resourceVersion"]):
            return _status(409, "the object has been modified")
        if "webhooks" not in patch and "data" not in patch:
            return await self._patch_plain(request.path, patch)
        by_name = {each["name"]: each for each in patch.pop("webhooks", [])}
        changed = {**current, **patch, "metadata": current["metadata"]}
        if by_name:
            changed["webhooks"] = [_merged(each, by_name[each["name"]]) for each in current["webhooks"]]
        await self.put(request.path, changed)
        return _json(self.objects[request.path])


def _has_labels(manifest: Manifest, selector: str) -> bool:
    labels = manifest["metadata"].get("labels") or {}
    return all(
        labels.get(name) == value for name, _, value in (each.partition("=") for each in selector.split(",")) if name
    )


def patched(value: Manifest, patch: Manifest) -> Manifest:
    """Return what a merge patch (RFC 7396) makes of an object."""
    result = dict(value)
    for name, each in patch.items():
        if each is None:
            result.pop(name, None)
        else:
            result[name] = patched(result.get(name) or {}, each) if isinstance(each, dict) else each
    return result


def _configuration(url: str) -> KubeConfig:
    named = {"clusters": "cluster", "users": "user", "contexts": "context"}
    values: Manifest = {"cluster": {"server": url}, "user": {"token": "x"}}
    values["context"] = {"cluster": "cluster", "user": "user", "namespace": NAMESPACE}
    lists = {plural: [{"name": name, name: values[name]}] for plural, name in named.items()}
    return KubeConfig.from_dict({**lists, "current-context": "context"})


def _merged(value: Manifest, patch: Manifest) -> Manifest:
    return value | {k: _merged(value[k], v) if isinstance(v, dict) else v for k, v in patch.items()}


def _is_of(path: str, collection: str) -> bool:
    """Return whether the object is of this collection, in whatever namespace."""
    base, _, plural = collection.rpartition("/")
    return path.startswith(f"{base}/") and path.split("/")[-2] == plural


def _status(code: int, message: str) -> web.Response:
    return _json({"kind": "Status", "apiVersion": "v1", "code": code, "message": message}, code)


def _json(value: Manifest, status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(value).encode(), status=status, content_type="application/json")
