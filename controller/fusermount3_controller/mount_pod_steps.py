"""What to do so that the mount pods are those that are wanted. Pure.

Nothing is remembered between two looks at the cluster, so whoever looks, and whenever, comes to the same steps. Two
controllers may take them at once, for what is created has a name that both know, and is created before what it replaces
is deleted: who sees the old one gone sees the new one, too. A pod that is deleted still waits for its users (`_WAIT` in
`mount_pods`), so a decision that came too early takes nothing from them.
"""

import datetime
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from fusermount3_controller.mount_pods import Existing, MountPod, Phase, User, moment
from fusermount3_controller.rendering import SHARED_NAMESPACE
from fusermount3_controller.volume_templates import Upgrade
from fusermount3_controller.wanted_mount_pods import Wanted

#: Seconds between two pods of which the first fails at once, as on a node that evicts it.
PAUSE = 10
#: Seconds in which the pods of a node are told to end, one by one, when it is drained.
DRAINED = 5
#: Seconds that a program has to write back what it holds, when another one takes its place.
GRACE_OF_REPLACED = 30
#: Seconds by which the clocks of nodes may differ.
_SKEW = 30


class CreatePod(NamedTuple):
    """Create this pod, and its MountPodAttachment before, if there is none."""

    mount: MountPod
    number: int


class DeletePod(NamedTuple):
    """`grace`: seconds; None for those of the pod."""

    pod: Existing
    grace: int | None = None


class DeleteAttachment(NamedTuple):
    name: str


class SetStatus(NamedTuple):
    """`status` takes the place of the one that the MountPodAttachment has."""

    name: str
    status: Mapping[str, Any]


class Report(NamedTuple):
    """Tell the users in an event that their mount pod does not serve, and why."""

    user: User
    pod: Existing


Step = CreatePod | DeletePod | DeleteAttachment | SetStatus | Report


class _Attachment(NamedTuple):
    """A MountPodAttachment, and its pods."""

    manifest: Mapping[str, Any]
    pods: list[Existing]

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def spec(self) -> Mapping[str, Any]:
        return self.manifest.get("spec") or {}

    @property
    def status(self) -> Mapping[str, Any]:
        return self.manifest.get("status") or {}

    @property
    def live(self) -> list[Existing]:
        """The pods that serve or may, in the order in which they were created."""
        return sorted((each for each in self.pods if each.is_live), key=lambda each: (each.created, each.number))

    @property
    def failed(self) -> list[Existing]:
        return [each for each in self.pods if each.phase is Phase.FAILED]

    @property
    def served(self) -> Existing | None:
        return next((each for each in self.live if each.phase is Phase.SERVED), None)

    def uids(self) -> set[str]:
        return {each["uid"] for each in self.status.get("workloads") or []}


def steps(
    wanted: Wanted,
    pods: Iterable[Existing],
    attachments: Iterable[Mapping[str, Any]],
    now: datetime.datetime,
    namespace: str = SHARED_NAMESPACE,
) -> list[Step]:
    """Return what to do next, in this order: at last what is only told.

    `namespace`: of mount pods that have no user's identity, and whose template names none.
    """
    by_base: dict[str, list[Existing]] = {}
    for pod in pods:
        by_base.setdefault(pod.base, []).append(pod)
    groups: dict[tuple[str, str], list[_Attachment]] = {place: [] for place in wanted.mounts}
    for manifest in attachments:
        spec = manifest.get("spec") or {}
        name = manifest["metadata"]["name"]
        where = spec.get("workloadNamespace") or spec.get("mountPodNamespace") or namespace
        place = str(spec.get("nodeName")), str(spec.get("key"))
        own = [each for each in by_base.get(name, []) if each.namespace == where]
        groups.setdefault(place, []).append(_Attachment(manifest, own))
    result: list[Step] = []
    for place, found in sorted(groups.items(), key=lambda each: each[0]):
        mount = wanted.mounts.get(place)
        if mount is None:
            result += _unwanted(found, wanted, now)
        else:
            orphans = [each for each in by_base.get(mount.name, []) if each.namespace == mount.namespace(namespace)]
            held = (mount.node, mount.shared.template.name) in wanted.held
            result += _served(mount, found, orphans, now, held=held)
    return sorted(result, key=lambda step: isinstance(step, SetStatus | Report))


# Volumes that pods use ---------------------------------------------------------------------------------------------


def _served(
    mount: MountPod, found: list[_Attachment], own: list[Existing], now: datetime.datetime, *, held: bool
) -> Iterator[Step]:
    """Yield the steps for a volume with users; `own`: the pods with the name that one has today."""
    older = [each for each in found if each.name != mount.name]
    begun = [each for each in found if each.name == mount.name]
    (current,) = begun or [_Attachment({"metadata": {"name": mount.name}}, own)]
    if begun or own or _is_due(mount, older):
        yield from _created(mount, current, now)
        yield from _surplus(current)
        for attachment in older:
            yield from (DeletePod(each) for each in attachment.failed)
            outdated = [] if held else list(_outdated(mount, attachment, current.served))
            yield from outdated or _surplus(attachment)
    else:
        for attachment in older:
            yield from (DeletePod(each) for each in attachment.failed)
            yield from _surplus(attachment)
    taken: set[str] = set()
    for attachment in older:
        listed = [user for user in mount.users if user.uid in attachment.uids()]
        if attachment.pods:
            taken |= {user.uid for user in listed}
            yield from _status(attachment, listed)
        else:
            yield DeleteAttachment(attachment.name)
    if begun:
        yield from _status(current, [user for user in mount.users if user.uid not in taken])


def _is_due(mount: MountPod, older: list[_Attachment]) -> bool:
    """Return whether a pod of the template as it is today has to be made, where there is none yet."""
    users = [user for user in mount.users if not user.is_leaving]
    if not users:
        return False
    if not any(each.live for each in older) or mount.shared.template.sharing.upgrade is Upgrade.REPLACE:
        return True
    known = set().union(*(each.uids() for each in older))
    return any(user.uid not in known for user in users)


def _created(mount: MountPod, current: _Attachment, now: datetime.datetime) -> Iterator[Step]:
    """Yield the step that creates a pod, or those that delete the failed ones that it replaces."""
    if current.live:
        yield from (DeletePod(each) for each in current.failed)
        for pod in current.live[:1]:
            if pod.failure:
                yield from (Report(user, pod) for user in mount.users)
        return
    for pod in current.failed:
        yield from (Report(user, pod) for user in mount.users)
    last = max((moment(each.created) for each in current.failed), default=moment(""))
    if _is_needed(mount, current, now) and now >= last + datetime.timedelta(seconds=PAUSE):
        taken = {each.number for each in current.pods}
        yield CreatePod(mount, next(number for number in range(len(taken) + 1) if number not in taken))


def _is_needed(mount: MountPod, current: _Attachment, now: datetime.datetime) -> bool:
    """Return whether somebody needs another pod.

    One that ends waits for its users. When a node is drained, they are told to end, too, perhaps somewhat later.
    """
    told = [each.ending_since for each in current.pods if each.ending_since]
    is_drained = bool(told) and now < max(told) + datetime.timedelta(seconds=DRAINED)
    return any(
        not (user.is_leaving or (user.is_ending and told) or (is_drained and not user.is_new)) for user in mount.users
    )


def _surplus(attachment: _Attachment) -> Iterator[Step]:
    """Yield what deletes all live pods but the oldest, as soon as that serves, or if it serves as little as they do."""
    for each in attachment.live[1:]:
        if attachment.live[0].phase is Phase.SERVED or each.phase is not Phase.SERVED:
            yield DeletePod(each)


def _outdated(mount: MountPod, attachment: _Attachment, current: Existing | None) -> Iterator[Step]:
    """Yield what deletes the pods of a template as it was, if nobody can need them; `current` serves today's."""
    is_replaced = mount.shared.template.sharing.upgrade is Upgrade.REPLACE
    for pod in attachment.live:
        if pod.phase is not Phase.SERVED:
            yield DeletePod(pod)
        elif current and is_replaced:
            yield DeletePod(pod, GRACE_OF_REPLACED)
        elif current and all(_came_after(user, current) for user in mount.users):
            yield DeletePod(pod)


def _came_after(user: User, served: Existing) -> bool:
    """Return whether the user came when this pod served, and so has that: of two, it gets the newer one."""
    return moment(user.since) > moment(served.served_since) + datetime.timedelta(seconds=_SKEW)


# Volumes that nobody uses ------------------------------------------------------------------------------------------


def _unwanted(found: list[_Attachment], wanted: Wanted, now: datetime.datetime) -> Iterator[Step]:
    for attachment in found:
        spec = attachment.spec
        template = wanted.templates.get(str(spec.get("volumeTemplate")))
        if (spec.get("nodeName"), spec.get("volumeTemplate")) in wanted.held:
            continue
        if not attachment.pods:
            yield DeleteAttachment(attachment.name)
            continue
        yield from (DeletePod(each) for each in attachment.failed)
        yield from _surplus(attachment)
        is_current = template is not None and template.generation == spec.get("templateGeneration")
        seconds = template.sharing.idle_seconds if template and is_current else 0
        since = attachment.status.get("idleSince") or _written(now)
        if now >= moment(since) + datetime.timedelta(seconds=seconds):
            yield from (DeletePod(each) for each in attachment.live[:1])
        yield from _status(attachment, [], since if seconds else "")


# Status ------------------------------------------------------------------------------------------------------------


def _status(attachment: _Attachment, users: list[User], idle_since: str = "") -> Iterator[Step]:
    """Yield the step that has the object say what is so, unless it does."""
    candidates = [attachment.served, *attachment.live, *attachment.failed, *attachment.pods]
    pod = next((each for each in candidates if each), None)
    status: dict[str, Any] = {
        "phase": str(pod.phase if pod else Phase.PENDING),
        "workloadCount": len(users),
        "workloads": [
            {"namespace": user.namespace, "name": user.name, "uid": user.uid, "attachmentTime": user.since}
            for user in users
        ],
    }
    if pod:
        status["mountPod"] = {"namespace": pod.namespace, "name": pod.name, "uid": pod.uid}
        if pod.failure:
            status["message"] = pod.failure
    if idle_since:
        status["idleSince"] = idle_since
    if status != dict(attachment.status):
        yield SetStatus(attachment.name, status)


def _written(time: datetime.datetime) -> str:
    return time.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
