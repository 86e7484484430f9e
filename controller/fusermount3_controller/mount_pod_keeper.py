"""Keeps the mount pods that are wanted: looks at what the cache has heard, and asks the API server for what is missing.

Mount pods have to do with pods of their own node only, so each node is looked at by itself: when something is heard of
it, and from time to time.

It is right if two replicas do the same, each by itself, for what one of them creates has a name that the other would
give it, too. Nothing is remembered that matters: after a crash, the next look finds what is still to be done.
"""

import asyncio
import datetime
import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

from lightkube import ApiError, AsyncClient
from lightkube.types import PatchType

from fusermount3_broker.messages.untrusted_text import visible
from fusermount3_controller import mount_pod_events, mount_pods, pod_volumes, served_volumes
from fusermount3_controller.api_errors import CONFLICT, NOT_FOUND, already
from fusermount3_controller.cluster_cache import ATTACHMENT, POD, POD_VOLUME, ClusterCache
from fusermount3_controller.controller_metrics import Metrics
from fusermount3_controller.event_writer import EventWriter
from fusermount3_controller.faults import Invalid
from fusermount3_controller.look_queue import LookQueue
from fusermount3_controller.mount_pod_steps import (
    CreatePod,
    DeleteAttachment,
    DeletePod,
    Report,
    SetStatus,
    Step,
    steps,
)
from fusermount3_controller.mount_pods import Existing, MountPod, Phase, User, moment
from fusermount3_controller.node_index import NodeIndex
from fusermount3_controller.pod_volumes import PodVolume
from fusermount3_controller.served_volumes import Kind, Known, Manifest, Reference
from fusermount3_controller.wanted_mount_pods import Wanted, may_use, wanted

#: Seconds between looks at a node on which something is not as it is to be, or waits for a time to come.
INTERVAL = 10.0
#: Seconds between looks at a node of which nothing is heard.
_RESYNC = 60.0
#: Seconds after a look in which what is heard of the node is collected.
_COLLECTING = 0.3
#: Seconds until the next try, if the API server can't be asked.
_PAUSE = 2.0
#: Seconds for which a status may be old: so those that follow each other closely are written once.
_STATUS_DELAY = 1.0
#: Nodes that are looked at at once: each waits for the API server most of the time.
_AT_ONCE = 16
#: Fields of a status that are not always there.
_OPTIONAL = ("mountPod", "message", "idleSince")

_log = logging.getLogger(__name__)


class MountPodKeeper:
    """Keeps the mount pods; `namespace`: of those that have no user's identity, and whose template names none."""

    def __init__(self, client: AsyncClient, cache: ClusterCache, metrics: Metrics, namespace: str) -> None:
        self._client = client
        self._cache = cache
        self._metrics = metrics
        self._namespace = namespace
        self._index = NodeIndex()
        self._queue = LookQueue(_COLLECTING)
        #: Nodes with volumes that wait for what claims and PersistentVolumes may bring.
        self._unsettled: set[str] = set()
        #: When a status is to be written that differs, in seconds of the monotonic clock, by the attachment's name.
        self._statuses: dict[str, float] = {}
        self._events = EventWriter(client)
        #: By node, the mount pods that this process has created and that have not served yet.
        self._begun: dict[str, set[str]] = {}
        cache.listen(self._hear)

    async def keep(self, interval: float = INTERVAL) -> NoReturn:
        """Look at each node when something of it is heard, and from time to time."""
        while not self._cache.is_full():
            await asyncio.sleep(_COLLECTING)
        # Who leads again has forgotten how many mount pods each has.
        for node in self._index.nodes():
            self._queue.add(node)
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(_AT_ONCE):
                    tasks.create_task(self._keep(interval))
        finally:
            self._metrics.forget_mount_pods()
        raise AssertionError("no task ends")

    def _hear(self, kind: Kind, before: Any, after: Any) -> None:
        nodes: Iterable[str]
        if kind in (Kind.POD, Kind.ATTACHMENT):
            nodes = self._index.change(kind, before, after)
        elif kind in (Kind.CLAIM, Kind.VOLUME, Kind.POD_VOLUME):
            # That a volume is bound, and what it is, stays as it is; and a mount pod that is there may be.
            nodes = self._unsettled
        else:
            nodes = self._index.nodes()
        for node in nodes:
            self._queue.add(node)

    async def _keep(self, interval: float) -> NoReturn:
        while True:
            node = await self._queue.take()
            again: float | None = _PAUSE
            try:
                again = await self.look(node, datetime.datetime.now(datetime.UTC), interval)
            except Exception as error:
                # Whatever it was: who does not look any more keeps all pods waiting.
                _log.warning("can't look after the mount pods of %s: %r; trying again in %.0f s", node, error, _PAUSE)
            finally:
                self._queue.done(node, again)

    async def look(self, node: str, now: datetime.datetime, interval: float = INTERVAL) -> float | None:
        """Do what is to be done on the node; return in how many seconds to look again, None if nothing is there.

        Raises httpx2.HTTPError, if the API server can't be asked.
        """
        begin = time.monotonic()
        users = self._index.users(node)
        known = await self._known(users)
        # From here on, all is of one moment.
        users, attachments = self._index.users(node), self._index.attachments(node)
        want = wanted(users, known)
        names = {each["metadata"]["name"] for each in attachments} | {each.name for each in want.mounts.values()}
        existing = self._index.mount_pods(names)
        todo = steps(want, existing, attachments, now, self._namespace)
        self._measure(node, want, existing, attachments)
        for step in todo:
            try:
                await self._do(step, node, now)
            except ApiError as error:
                _log.warning("%s", visible(f"{type(step).__name__}: the API server refuses: {error}"))
        self._metrics.show_look(time.monotonic() - begin)
        return self._again(node, want, existing, attachments, todo, interval)

    async def _known(self, users: list[Manifest]) -> Known:
        """Return what is known, with all that the pods' volumes refer to, as far as it exists."""
        known = self._cache.known()
        incomplete = [pod for pod in users if may_use(pod) and served_volumes.missing(pod, known)]
        return await self._cache.looked_up(partial(_missing, incomplete)) if incomplete else known

    def _again(
        self,
        node: str,
        want: Wanted,
        existing: list[Existing],
        attachments: list[Manifest],
        todo: list[Step],
        interval: float,
    ) -> float | None:
        """Return in how many seconds to look again."""
        written = {step.name for step in todo if isinstance(step, SetStatus)}
        for attachment in attachments:
            if (name := attachment["metadata"]["name"]) not in written:
                self._statuses.pop(name, None)
        is_settled = not todo and not want.held and len(want.mounts) == len(attachments)
        is_settled = is_settled and all(each.phase is Phase.SERVED for each in existing)
        (self._unsettled.discard if is_settled else self._unsettled.add)(node)
        if node not in self._index.nodes():
            self._unsettled.discard(node)
            return None
        now = time.monotonic()
        waits = [self._statuses[name] - now for name in written if name in self._statuses]
        return min([_RESYNC if is_settled else interval, *waits])

    def _measure(self, node: str, want: Wanted, existing: list[Existing], attachments: list[Manifest]) -> None:
        templates = {mount.name: mount.shared.template.name for mount in want.mounts.values()}
        for attachment in attachments:
            templates[attachment["metadata"]["name"]] = attachment["spec"].get("volumeTemplate", "")
        waiting = {user.uid for mount in want.mounts.values() for user in mount.users if user.is_new}
        self._metrics.show_mount_pods(
            node, Counter((templates[each.base], str(each.phase)) for each in existing), len(waiting)
        )
        begun = self._begun.get(node, set())
        for pod in existing:
            if pod.uid in begun and pod.phase is not Phase.PENDING:
                begun.discard(pod.uid)
                if pod.phase is Phase.SERVED:
                    self._metrics.count_start((moment(pod.served_since) - moment(pod.created)).total_seconds())
        if not begun or not want.mounts:
            self._begun.pop(node, None)

    # Steps

    async def _do(self, step: Step, node: str, now: datetime.datetime) -> None:
        match step:
            case CreatePod():
                self._begun.setdefault(node, set()).update(await self._create(step, now))
            case DeletePod(pod, grace):
                with already(NOT_FOUND):
                    await self._client.delete(POD, pod.name, namespace=pod.namespace, grace_period=grace)
                    _log.info("mount pod %s/%s: deleted", pod.namespace, pod.name)
            case DeleteAttachment(name):
                with already(NOT_FOUND):
                    await self._client.delete(ATTACHMENT, name)
            case SetStatus(name, status):
                due = self._statuses.setdefault(name, time.monotonic() + _STATUS_DELAY)
                if time.monotonic() < due:
                    return
                del self._statuses[name]
                patch = {"status": {**dict.fromkeys(_OPTIONAL), **status}}
                with already(NOT_FOUND):
                    await self._client.patch(ATTACHMENT.Status, name, patch, patch_type=PatchType.MERGE)
            case Report(user, pod):
                text = f"mount pod {pod.namespace}/{pod.name}: {pod.failure}"
                await self._tell([user], mount_pod_events.FAILED, text, now)

    async def _create(self, step: CreatePod, now: datetime.datetime) -> Sequence[str]:
        """Create the pod; return its UID, if there was none."""
        mount, name = step.mount, f"{step.mount.name}-{step.number}"
        namespace = mount.namespace(self._namespace)
        where = f"mount pod {namespace}/{name}"
        try:
            owner = await self._owner(step)
            if waits := await self._not_recorded(mount):
                if waits.status.unstaging:
                    text = f"{where}: waits until the volume is unstaged on {waits.status.unstaging}"
                    await self._tell(mount.users, mount_pod_events.FAILED, text, now)
                return ()
            manifest = mount_pods.manifest(mount, step.number, owner, self._namespace)
            created = await self._client.create(POD(manifest))
        except Invalid as error:
            await self._tell(mount.users, mount_pod_events.FAILED, f"{where}: {error}", now)
            return ()
        except ApiError as error:
            if error.status.code == CONFLICT:
                return ()  # another replica was faster, or this one has not heard of it yet
            await self._tell(mount.users, mount_pod_events.FAILED, f"{where}: {error.status.message}", now)
            raise
        _log.info("%s: created for %d pods on %s", where, len(mount.users), mount.node)
        await self._tell(mount.users, mount_pod_events.CREATED, f"{where} is to serve the volume", now)
        return (str(created.metadata.uid),)

    async def _owner(self, step: CreatePod) -> str:
        """Return the UID of the MountPodAttachment, which is created unless it is there."""
        try:
            created = await self._client.create(ATTACHMENT(mount_pods.attachment(step.mount)))
        except ApiError as error:
            if error.status.code != CONFLICT:
                raise
            created = await self._client.get(ATTACHMENT, step.mount.name)
        return str(created.metadata.uid)

    async def _not_recorded(self, mount: MountPod) -> PodVolume | None:
        """Return the PodVolume, as long as it does not allow a mount pod on that node."""
        volume = mount.shared.source.volume
        if not pod_volumes.is_staging_recorded(volume):
            return None
        found = await self._client.get(POD_VOLUME, volume["metadata"]["name"])
        pod_volume = pod_volumes.parse(found.to_dict())
        return None if pod_volumes.may_stage(pod_volume, mount.node) else pod_volume

    async def _tell(self, users: Iterable[User], reason: str, text: str, now: datetime.datetime) -> None:
        """Write an event on each of these pods."""
        for user in users:
            await self._events.write(mount_pod_events.event(user, reason, text, now))


def _missing(pods: list[Manifest], known: Known) -> set[Reference]:
    return set().union(*(served_volumes.missing(pod, known) for pod in pods))
