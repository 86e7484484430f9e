"""Mount pods: their names, what they are when they are created, and how they are found again. Pure."""

import datetime
import hashlib
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from fusermount3_controller import pod_volumes, rendering, volume_templates
from fusermount3_controller.pod_rules import CONTAINER
from fusermount3_controller.rendering import PRIORITY_CLASS, SHARED_NAMESPACE, TEMPLATE_LABEL, Manifest
from fusermount3_controller.shared_volumes import Shared
from fusermount3_controller.template_parameters import MOUNT_OPTIONS

#: The kind of the objects that own mount pods, and its name in paths.
ATTACHMENT, ATTACHMENTS = "MountPodAttachment", "mountpodattachments"
#: The attribute by which a volume offers its filesystem to pods whose volumes have the same key; and that with the
#: bytes that a device must have which it offers.
SHARE_ATTRIBUTE, CAPACITY_ATTRIBUTE = "share", "shareCapacity"
#: Ends when no pod uses the volume any more: until then, kubelet does not tell the program to end.
_WAIT = {"exec": {"command": ["fusermount3-proxy", "--wait-unused"]}}
#: Hexadecimal digits of a name: users choose parameters, and must not find those of somebody else's name.
_DIGITS = 20
_NAME = re.compile(f"(mp-[0-9a-f]{{{_DIGITS}}})-(0|[1-9][0-9]{{0,5}})")
_REQUEST = re.compile(".*: broker request [0-9a-f]+")
#: Reasons for which a container waits that are no failure.
NO_FAILURE = ("ContainerCreating", "PodInitializing")
#: Of a failure, in characters.
_LONGEST_TEXT = 500


class User(NamedTuple):
    """A pod that uses a shared volume: `since` it is on its node, RFC 3339; `is_new` until its containers have begun.

    `is_ending`: it was told to end.
    """

    namespace: str
    name: str
    uid: str
    since: str
    is_new: bool = False
    is_ending: bool = False

    @property
    def is_leaving(self) -> bool:
        """Whether it ends before its containers have begun, so nothing has to be created for it."""
        return self.is_new and self.is_ending


class MountPod(NamedTuple):
    """What has to serve the users of a volume on a node."""

    shared: Shared
    node: str
    users: tuple[User, ...] = ()

    @property
    def name(self) -> str:
        """The name of its MountPodAttachment, with which that of each of its pods begins."""
        parts = (self.shared.key, self.node, str(self.shared.template.generation))
        return f"mp-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:_DIGITS]}"

    def namespace(self, default: str = SHARED_NAMESPACE) -> str:
        return self.shared.identity[0] if self.shared.identity else self.shared.template.namespace or default


class Phase(StrEnum):
    """Whether a mount pod serves; `FAILED` for ever, `ENDING` when it was told to end."""

    PENDING = "Pending"
    SERVED = "Served"
    FAILED = "Failed"
    ENDING = "Ending"


class Existing(NamedTuple):
    """A mount pod that exists. `base` and `number` are its name; `failure`: why it does not serve.

    `ending_since`: when it was told to end.
    """

    namespace: str
    name: str
    uid: str
    base: str
    number: int
    created: str
    phase: Phase
    served_since: str = ""
    failure: str = ""
    ending_since: datetime.datetime | None = None

    @property
    def is_live(self) -> bool:
        return self.phase in (Phase.PENDING, Phase.SERVED)


# What is created ---------------------------------------------------------------------------------------------------


def shown(shared: Shared, namespace: str = SHARED_NAMESPACE, node: str = "") -> Manifest:
    """Return the pod for such a volume on a node; without, on any. Raises Invalid."""
    pod = rendering.mount_pod(shared.use, node)
    spec = pod["spec"]
    if shared.identity:
        namespace, spec["serviceAccountName"] = shared.identity
        spec["automountServiceAccountToken"] = True
    pod["metadata"]["namespace"] = shared.template.namespace or namespace
    if pod_volumes.is_provisioned(shared.source.volume):
        pod["metadata"]["labels"][pod_volumes.VOLUME_LABEL] = shared.source.persistent_volume
    spec.setdefault("priorityClassName", PRIORITY_CLASS)
    (container,) = spec["containers"]
    container["lifecycle"] = {"preStop": _WAIT, **(container.get("lifecycle") or {})}
    attributes = spec["volumes"][-1]["csi"]["volumeAttributes"]
    # Of the driver's attributes, the one that means something for a filesystem that others use.
    options = [each for each in (*shared.source.mount_options, shared.source.attributes.get(MOUNT_OPTIONS, "")) if each]
    if options:
        attributes[MOUNT_OPTIONS] = ",".join(options)
    attributes[SHARE_ATTRIBUTE] = shared.key
    if shared.source.is_block and (capacity := shared.source.capacity):
        attributes[CAPACITY_ATTRIBUTE] = str(capacity)
    return pod


def manifest(mount: MountPod, number: int, owner: str, namespace: str = SHARED_NAMESPACE) -> Manifest:
    """Return the pod with this number; `owner`: the UID of its MountPodAttachment. Raises Invalid."""
    pod = shown(mount.shared, mount.namespace(namespace), mount.node)
    metadata = pod["metadata"]
    del metadata["generateName"]
    metadata["name"] = f"{mount.name}-{number}"
    metadata["ownerReferences"] = [
        {
            "apiVersion": volume_templates.API_VERSION,
            "kind": ATTACHMENT,
            "name": mount.name,
            "uid": owner,
            "controller": True,
        }
    ]
    pod["spec"] = rendering.on_node(pod["spec"], mount.node)
    return pod


def attachment(mount: MountPod) -> Manifest:
    """Return the MountPodAttachment that owns the pods."""
    shared = mount.shared
    namespace, account = shared.identity or ("", "")
    group = shared.use.fs_group
    return {
        "apiVersion": volume_templates.API_VERSION,
        "kind": ATTACHMENT,
        "metadata": {"name": mount.name, "labels": {TEMPLATE_LABEL: shared.template.name}},
        "spec": {
            "key": shared.key,
            "nodeName": mount.node,
            "volumeTemplate": shared.template.name,
            "templateGeneration": shared.template.generation,
            "mountPodNamespace": shared.template.namespace,
            "persistentVolumeName": shared.source.persistent_volume,
            "volumeID": shared.source.handle,
            "mountOptions": ",".join(shared.source.mount_options),
            "workloadFSGroup": "" if group is None else str(group),
            "workloadNamespace": namespace,
            "workloadServiceAccountName": account,
        },
    }


# What exists -------------------------------------------------------------------------------------------------------


def existing(pod: Mapping[str, Any]) -> Existing | None:
    """Return what the pod is as a mount pod; None, if it is none."""
    metadata = pod["metadata"]
    match = _NAME.fullmatch(metadata["name"])
    owners = [each for each in metadata.get("ownerReferences") or [] if each.get("controller")]
    if not match or not any(each.get("kind") == ATTACHMENT and each.get("name") == match[1] for each in owners):
        return None
    phase, since = _phase(pod)
    return Existing(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        base=match[1],
        number=int(match[2]),
        created=metadata.get("creationTimestamp") or "",
        phase=phase,
        served_since=since,
        failure="" if phase in (Phase.SERVED, Phase.ENDING) else _failure(pod),
        ending_since=_ending_since(metadata),
    )


def node_of(pod: Mapping[str, Any]) -> str:
    """Return the node on which a pod has to run that `manifest` returns; empty, if the pod is none."""
    return rendering.node_of(pod["spec"]) if existing(pod) else ""


def _phase(pod: Mapping[str, Any]) -> tuple[Phase, str]:
    status = pod.get("status") or {}
    if pod["metadata"].get("deletionTimestamp"):
        return Phase.ENDING, ""
    if status.get("phase") in ("Failed", "Succeeded"):
        return Phase.FAILED, ""
    ready = condition(pod, "Ready")
    if ready.get("status") == "True":
        return Phase.SERVED, ready.get("lastTransitionTime") or ""
    return Phase.PENDING, ""


def _ending_since(metadata: Mapping[str, Any]) -> datetime.datetime | None:
    """Return when the pod was told to end: its deletionTimestamp is when that has to be over (API, ObjectMeta)."""
    if not (end := metadata.get("deletionTimestamp")):
        return None
    return moment(end) - datetime.timedelta(seconds=metadata.get("deletionGracePeriodSeconds") or 0)


def condition(pod: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return the condition of this type; empty, if there is none."""
    conditions = (pod.get("status") or {}).get("conditions") or []
    return next((each for each in conditions if each.get("type") == kind), {})


def _failure(pod: Mapping[str, Any]) -> str:
    """Return why the pod does not serve, as far as it is said; the same words each time for the same reason."""
    status = pod.get("status") or {}
    if status.get("phase") in ("Failed", "Succeeded") and status.get("reason"):
        return _sentence(status["reason"], status.get("message"))
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return _sentence(scheduled.get("reason"), scheduled.get("message"))
    statuses = [each for each in status.get("containerStatuses") or [] if each.get("name") == CONTAINER]
    for container in statuses:
        state = container.get("state") or {}
        ended = state.get("terminated") or (container.get("lastState") or {}).get("terminated")
        if ended:
            reason = f"{ended.get('reason') or 'Error'}, status {ended.get('exitCode')}"
            return _sentence(reason, _last_line(ended.get("message")))
        waiting = state.get("waiting") or {}
        if waiting.get("reason") and waiting["reason"] not in NO_FAILURE:
            return _sentence(waiting["reason"], waiting.get("message"))
    return ""


def _last_line(text: object) -> str:
    """Return the last line that says why: below what the broker says, the proxy only prints which request it was."""
    lines = [line for line in str(text or "").strip().splitlines() if not _REQUEST.fullmatch(line)]
    return lines[-1] if lines else ""


def _sentence(reason: object, text: object) -> str:
    return ": ".join(str(each) for each in (reason, text) if each)[:_LONGEST_TEXT]


def moment(text: str) -> datetime.datetime:
    """Return the time that Kubernetes writes so; long ago, if there is none."""
    if not text:
        return datetime.datetime.fromtimestamp(0, datetime.UTC)
    return datetime.datetime.fromisoformat(text)
