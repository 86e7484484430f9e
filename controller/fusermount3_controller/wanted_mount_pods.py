"""Which mount pods there must be, for the pods that there are. Pure."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fusermount3_controller import mount_pods, shared_volumes
from fusermount3_controller.mount_pods import MountPod, User
from fusermount3_controller.served_volumes import Known, Manifest
from fusermount3_controller.shared_volumes import Shared
from fusermount3_controller.volume_templates import VolumeTemplate

_FINISHED = ("Failed", "Succeeded")


class Wanted(NamedTuple):
    """`mounts`: by node and key. `held`: nodes and templates of which nothing may end.

    There, a pod has a volume of the template that is not shared as things are now: it may have been when it began.
    """

    mounts: Mapping[tuple[str, str], MountPod]
    held: frozenset[tuple[str, str]] = frozenset()
    templates: Mapping[str, VolumeTemplate] = {}


def wanted(pods: Iterable[Manifest], known: Known) -> Wanted:
    """Return what the pods need that are on a node and not finished, also those that are about to end."""
    volumes: dict[tuple[str, str], list[Shared]] = {}
    users: dict[tuple[str, str], set[User]] = {}
    held = set()
    for pod in pods:
        if not may_use(pod):
            continue
        node = pod["spec"]["nodeName"]
        found = shared_volumes.of_pod(pod, known)
        held |= {(node, name) for name in found.unclear}
        for shared in found.shared:
            volumes.setdefault((node, shared.key), []).append(shared)
            users.setdefault((node, shared.key), set()).add(_user(pod))
    mounts = {}
    for place, candidates in volumes.items():
        # Whoever looks finds the same one, whatever the order of the pods.
        shared = min(candidates, key=lambda each: each.source.persistent_volume)
        mounts[place] = MountPod(shared, place[0], tuple(sorted(users[place])))
    return Wanted(mounts, frozenset(held), known.templates)


def may_use(pod: Manifest) -> bool:
    """Return whether the pod is on a node, and not finished. A mount pod may use others' volumes, too."""
    is_finished = (pod.get("status") or {}).get("phase") in _FINISHED
    return bool(pod["spec"].get("nodeName")) and not is_finished


def _user(pod: Manifest) -> User:
    metadata = pod["metadata"]
    is_new = (pod.get("status") or {}).get("phase", "Pending") == "Pending"
    since = mount_pods.condition(pod, "PodScheduled").get("lastTransitionTime") or metadata.get("creationTimestamp")
    return User(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        since=since or "",
        is_new=is_new,
        is_ending=bool(metadata.get("deletionTimestamp")),
    )
