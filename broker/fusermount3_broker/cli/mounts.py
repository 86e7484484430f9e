"""The mounts of a running broker, with the names of their containers; and which of them an administrator wants to see.

Whoever calls these functions expects an answer of any shape (`main._understanding`): the broker's is untrusted.
"""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from fusermount3_broker.cli import control_client
from fusermount3_broker.cli.container_names import ContainerNames, RememberedNames
from fusermount3_broker.kernel import cgroups

#: One mount, as the broker answers it.
Answered = dict[str, Any]

#: Characters of a pod's UID in a row.
_SHORT_UID = 8


def ask(at: Path, names: RememberedNames | None = None) -> list[Answered]:
    """Return the mounts of the broker at that control socket, with names: those of `names`, for who asks again and
    again. Raises NotRunning."""
    answered: list[Answered] = control_client.ask(at, "mounts")
    name_containers(answered, (names or RememberedNames()).look())
    return answered


def name_containers(mounts: Iterable[Answered], names: ContainerNames) -> None:
    """Add `container_id` and `container_name` to each mount, empty if they are unknown; and to one that is shared,
    `borrower_pods`, the names of the pods that have it.

    Users may give cgroups of their own the ID of anybody's container. So only what the broker accounts for as a
    container, and nobody but root could make, gets a name.
    """
    for mount in mounts:
        kind, _, path = str(mount.get("account", "")).partition(" ")
        is_container = kind == "container" and names.may_name(path)
        mount["container_id"] = cgroups.container_id(mount["container"].encode("utf-8", "replace"))
        mount["container_name"] = names.name(mount["container"]) if is_container else ""
        if mount.get("share"):
            mount["borrower_pods"] = [_pod_at(target, names) for target in mount["borrowers"]]


def _pod_at(target: str, names: ContainerNames) -> str:
    """Return the name of the pod whose volume is at that target, pods/UID/… in kubelet's directory."""
    uid = target.removeprefix("pods/").partition("/")[0]
    return names.pod(uid) or f"pod {uid[:_SHORT_UID]}"


def wanted(mounts: Iterable[Answered], states: Collection[str], container: str) -> list[Answered]:
    """Return the mounts that are in one of the states, if any are given, and in that container, if it is given."""
    return [
        mount
        for mount in mounts
        if (not states or mount["state"] in states) and (not container or _is_in(mount, container))
    ]


def _is_in(mount: Answered, container: str) -> bool:
    """Whether the container, or its pod, has that name, or an ID or UID that begins so."""
    name = mount["container_name"]
    kind, uid = cgroups.described(mount["container"])
    ids = (mount["container_id"], uid if kind == "pod" else "")
    return container in (name, name.partition("/")[2], mount["container"]) or any(
        each.startswith(container.lower()) for each in ids
    )


def container_of(mount: Answered) -> str:
    """Return the container's name or, if that is unknown, its short ID, or what else its cgroup tells."""
    if name := mount["container_name"]:
        return str(name)
    kind, name = cgroups.described(mount["container"])
    return f"pod {name[:_SHORT_UID]}" if kind == "pod" else name
