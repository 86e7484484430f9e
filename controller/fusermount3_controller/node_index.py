"""Which of the cluster's objects concern which node: mount pods and their users never span two. Pure.

So what happens on a node is decided by looking at its pods alone, and an event costs what one node costs, however many
there are.
"""

from collections.abc import Collection, Iterator
from typing import Any

from fusermount3_controller import mount_pods
from fusermount3_controller.mount_pods import Existing
from fusermount3_controller.packing import unpacked
from fusermount3_controller.served_volumes import Kind, Manifest

#: A pod's namespace and name.
_Key = tuple[str, str]


class NodeIndex:
    """The pods and MountPodAttachments by node, kept up to date by `change`."""

    def __init__(self) -> None:
        self._users: dict[str, dict[_Key, bytes]] = {}
        self._attachments: dict[str, dict[str, bytes]] = {}
        #: By the names of their MountPodAttachments, which say on which nodes they are.
        self._mount_pods: dict[str, dict[_Key, Existing]] = {}
        self._nodes: dict[str, str] = {}

    def nodes(self) -> set[str]:
        """Return the nodes with pods or attachments."""
        return {*self._users, *self._attachments}

    def users(self, node: str) -> list[Manifest]:
        """Return the pods on the node; of mount pods, those that have others' volumes."""
        return [unpacked(each) for each in self._users.get(node, {}).values()]

    def attachments(self, node: str) -> list[Manifest]:
        return [unpacked(each) for each in self._attachments.get(node, {}).values()]

    def mount_pods(self, names: Collection[str]) -> list[Existing]:
        """Return the mount pods of the attachments with these names, whether these exist or not."""
        return [pod for name in names for pod in self._mount_pods.get(name, {}).values()]

    def change(self, kind: Kind, before: Any, after: Any) -> Iterator[str]:
        """Take in that an object, which is packed, has come, changed or gone (None); yield the nodes that it concerns.

        Of objects other than pods and attachments, it is not known here.
        """
        for text in filter(None, (before, after)):
            if kind is Kind.POD:
                yield from self._change_pod(text, is_there=text is after)
            elif kind is Kind.ATTACHMENT:
                yield from self._change_attachment(text, is_there=text is after)

    def _change_pod(self, text: bytes, *, is_there: bool) -> Iterator[str]:
        pod = unpacked(text)
        key = pod["metadata"]["namespace"], pod["metadata"]["name"]
        if existing := mount_pods.existing(pod):
            _put(self._mount_pods, existing.base, key, existing if is_there else None)
            if node := self._nodes.get(existing.base):
                yield node
        if (node := pod["spec"].get("nodeName")) and (not existing or _has_claims(pod)):
            _put(self._users, node, key, text if is_there else None)
            yield node

    def _change_attachment(self, text: bytes, *, is_there: bool) -> Iterator[str]:
        attachment = unpacked(text)
        name, node = attachment["metadata"]["name"], str((attachment.get("spec") or {}).get("nodeName"))
        _put(self._attachments, node, name, text if is_there else None)
        if is_there:
            self._nodes[name] = node
        else:
            self._nodes.pop(name, None)
        yield node


def _has_claims(pod: Manifest) -> bool:
    return any("persistentVolumeClaim" in each for each in pod["spec"].get("volumes") or [])


def _put(groups: dict[str, dict[Any, Any]], group: str, key: object, value: object) -> None:
    """Have `value` in the group; None: nothing. No group is empty."""
    members = groups.setdefault(group, {})
    if value is None:
        members.pop(key, None)
    else:
        members[key] = value
    if not members:
        del groups[group]
