"""Keeps the mount pods that are wanted: looks at what the cache has heard, and asks the API server for what is missing.

Replicas do the same, each by itself, for what one of them creates has a name that the other would give it, too. Nothing
is remembered that matters: after a crash, the next look finds what is still to be done.
"""

import asyncio
import contextlib
import datetime
import logging
import time
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any, NoReturn

from lightkube import ApiError, AsyncClient
from lightkube.generic_resource import create_namespaced_resource
from lightkube.types import PatchType

from fusermount3_broker.messages.untrusted_text import visible
from fusermount3_controller import mount_pod_events, mount_pods, served_volumes
from fusermount3_controller.cluster_cache import ATTACHMENT, POD, ClusterCache
from fusermount3_controller.controller_metrics import Metrics
from fusermount3_controller.faults import Invalid
from fusermount3_controller.mount_pod_steps import (
    CreatePod,
    DeleteAttachment,
    DeletePod,
    Report,
    SetStatus,
    Step,
    steps,
)
from fusermount3_controller.mount_pods import Existing, Phase, User, moment
from fusermount3_controller.served_volumes import Kind, Known, Manifest, Reference
from fusermount3_controller.wanted_mount_pods import Wanted, may_use, wanted

#: Seconds between looks while nothing is heard: some steps wait for a time to come.
INTERVAL = 10.0
#: Seconds after a look in which what is heard is collected.
_COLLECTING = 0.3
#: Seconds until the next try, if the API server can't be asked.
_PAUSE = 2.0
_NOT_FOUND, _CONFLICT = 404, 409
#: Fields of a status that are not always there.
_OPTIONAL = ("mountPod", "message", "idleSince")
#: Events that are known to be written, so they are not tried again at each look.
_MOST_TOLD = 10000

_EVENT: Any = create_namespaced_resource("", "v1", "Event", "events")

_log = logging.getLogger(__name__)


class MountPodKeeper:
    """Keeps the mount pods; `namespace`: of those that have no user's identity."""

    def __init__(self, client: AsyncClient, cache: ClusterCache, metrics: Metrics, namespace: str) -> None:
        self._client = client
        self._cache = cache
        self._metrics = metrics
        self._namespace = namespace
        #: The names of events, and the mount pods that this process has created and that have not served yet.
        self._told: set[tuple[str, str]] = set()
        self._begun: set[str] = set()

    async def keep(self, interval: float = INTERVAL) -> NoReturn:
        """Look whenever something is heard, and from time to time."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await self._cache.changed.wait()
            self._cache.changed.clear()
            pause = _COLLECTING
            try:
                await self.look(datetime.datetime.now(datetime.UTC))
            except Exception as error:
                # Whatever it was: who does not look any more keeps all pods waiting.
                pause = _PAUSE
                _log.warning("can't look after the mount pods: %r; trying again in %.0f s", error, pause)
                self._cache.changed.set()
            await asyncio.sleep(pause)

    async def look(self, now: datetime.datetime) -> None:
        """Do what is to be done. Raises httpx2.HTTPError, if the API server can't be asked."""
        if not self._cache.is_full():
            return
        begin = time.monotonic()
        pods, attachments = self._cache.objects(Kind.POD), self._cache.objects(Kind.ATTACHMENT)
        known = await self._known(pods)
        # Not here: with many pods it takes long enough to be noticed by those that ask the webhook.
        want, existing, todo = await asyncio.to_thread(_decided, pods, known, attachments, now, self._namespace)
        self._measure(want, existing)
        for step in todo:
            try:
                await self._do(step, now)
            except ApiError as error:
                _log.warning("%s", visible(f"{type(step).__name__}: the API server refuses: {error}"))
        self._metrics.show_look(time.monotonic() - begin)

    async def _known(self, pods: list[Manifest]) -> Known:
        """Return what is known, with all that the pods' volumes refer to, as far as it exists."""
        known = self._cache.known()
        incomplete = await asyncio.to_thread(_incomplete, pods, known)
        return await self._cache.looked_up(partial(_missing, incomplete)) if incomplete else known

    def _measure(self, want: Wanted, existing: Iterable[Existing]) -> None:
        templates = {mount.name: mount.shared.template.name for mount in want.mounts.values()}
        for attachment in self._cache.objects(Kind.ATTACHMENT):
            templates[attachment["metadata"]["name"]] = attachment["spec"].get("volumeTemplate", "")
        waiting = {user.uid for mount in want.mounts.values() for user in mount.users if user.is_new}
        self._metrics.show_mount_pods(
            Counter((templates.get(each.base, ""), each.phase) for each in existing), len(waiting)
        )
        for pod in existing:
            if pod.uid in self._begun and pod.phase is Phase.SERVED:
                self._begun.discard(pod.uid)
                self._metrics.count_start((moment(pod.served_since) - moment(pod.created)).total_seconds())
        self._begun &= {each.uid for each in existing}

    # Steps

    async def _do(self, step: Step, now: datetime.datetime) -> None:
        match step:
            case CreatePod():
                await self._create(step, now)
            case DeletePod(pod, grace):
                with _already(_NOT_FOUND):
                    await self._client.delete(POD, pod.name, namespace=pod.namespace, grace_period=grace)
                    _log.info("mount pod %s/%s: deleted", pod.namespace, pod.name)
            case DeleteAttachment(name):
                with _already(_NOT_FOUND):
                    await self._client.delete(ATTACHMENT, name)
            case SetStatus(name, status):
                patch = {"status": {**dict.fromkeys(_OPTIONAL), **status}}
                with _already(_NOT_FOUND):
                    await self._client.patch(ATTACHMENT.Status, name, patch, patch_type=PatchType.MERGE)
            case Report(user, pod):
                text = f"mount pod {pod.namespace}/{pod.name}: {pod.failure}"
                await self._tell([user], mount_pod_events.FAILED, text, now)

    async def _create(self, step: CreatePod, now: datetime.datetime) -> None:
        mount, name = step.mount, f"{step.mount.name}-{step.number}"
        namespace = mount.namespace(self._namespace)
        where = f"mount pod {namespace}/{name}"
        try:
            manifest = mount_pods.manifest(mount, step.number, await self._owner(step), self._namespace)
            created = await self._client.create(POD(manifest))
        except Invalid as error:
            await self._tell(mount.users, mount_pod_events.FAILED, f"{where}: {error}", now)
            return
        except ApiError as error:
            if error.status.code == _CONFLICT:
                return  # another replica was faster, or this one has not heard of it yet
            await self._tell(mount.users, mount_pod_events.FAILED, f"{where}: {error.status.message}", now)
            raise
        _log.info("%s: created for %d pods on %s", where, len(mount.users), mount.node)
        self._begun.add(str(created.metadata.uid))
        await self._tell(mount.users, mount_pod_events.CREATED, f"{where} is to serve the volume", now)

    async def _owner(self, step: CreatePod) -> str:
        """Return the UID of the MountPodAttachment, which is created unless it is there."""
        try:
            created = await self._client.create(ATTACHMENT(mount_pods.attachment(step.mount)))
        except ApiError as error:
            if error.status.code != _CONFLICT:
                raise
            created = await self._client.get(ATTACHMENT, step.mount.name)
        return str(created.metadata.uid)

    async def _tell(self, users: Iterable[User], reason: str, text: str, now: datetime.datetime) -> None:
        """Write an event on each of these pods, unless it has it. What can't be written is not tried again."""
        for user in users:
            manifest = mount_pod_events.event(user, reason, text, now)
            name = user.namespace, manifest["metadata"]["name"]
            if name in self._told:
                continue
            if len(self._told) >= _MOST_TOLD:
                self._told.clear()
            self._told.add(name)
            try:
                await self._client.create(_EVENT(manifest))
            except ApiError as error:
                if error.status.code != _CONFLICT:
                    _log.warning("%s", visible(f"can't write an event: {error}"))


def _incomplete(pods: list[Manifest], known: Known) -> list[Manifest]:
    return [pod for pod in pods if may_use(pod) and served_volumes.missing(pod, known)]


def _missing(pods: list[Manifest], known: Known) -> set[Reference]:
    return set().union(*(served_volumes.missing(pod, known) for pod in pods))


def _decided(
    pods: list[Manifest],
    known: Known,
    attachments: list[Manifest],
    now: datetime.datetime,
    namespace: str,
) -> tuple[Wanted, list[Existing], list[Step]]:
    existing = [each for each in map(mount_pods.existing, pods) if each]
    want = wanted(pods, known)
    return want, existing, steps(want, existing, attachments, now, namespace)


@contextlib.contextmanager
def _already(code: int) -> Any:
    """Take an answer with this code as success: somebody else has done it."""
    try:
        yield
    except ApiError as error:
        if error.status.code != code:
            raise
