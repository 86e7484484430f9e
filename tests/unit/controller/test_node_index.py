"""What is decided node by node is what would be decided with all of the cluster in view."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from fusermount3_controller import mount_pods
from fusermount3_controller.mount_pod_steps import steps
from fusermount3_controller.node_index import NodeIndex
from fusermount3_controller.packing import packed
from fusermount3_controller.served_volumes import Kind
from fusermount3_controller.wanted_mount_pods import wanted
from tests.unit.controller.cluster import NOW, ending, failed, found, known, mount_of, mount_pod, serving, user

if TYPE_CHECKING:
    from fusermount3_controller.mount_pods import MountPod
    from tests.unit.controller.samples import Manifest

CLUSTER = known()
NODES = ("n1", "n2", "n3")
GROUPS = (None, 1000)


def mount(node: str, group: int | None) -> MountPod:
    return mount_of([_user("app", node, group)], CLUSTER)


def _user(name: str, node: str, group: int | None) -> Manifest:
    result = user(name, node=node)
    if group is not None:
        result["spec"]["securityContext"] = {"fsGroup": group}
    return result


def attachment(node: str, group: int | None) -> Manifest:
    return mount_pods.attachment(mount(node, group))


USERS = [(Kind.POD, _user(f"app-{n}-{node}-{g}", node, g)) for n in range(2) for node in NODES for g in GROUPS]
UNBOUND = [(Kind.POD, user("waits", node="n2") | {"metadata": {"name": "waits", "namespace": "other", "uid": "w"}})]
ATTACHMENTS = [(Kind.ATTACHMENT, attachment(node, g)) for node in NODES for g in GROUPS]
MOUNT_PODS = [
    (Kind.POD, make(mount(node, g), number))
    for node in NODES
    for g in GROUPS
    for number, make in enumerate((mount_pod, serving, failed))
] + [(Kind.POD, ending(serving(mount("n1", None), 3)))]
OBJECTS = USERS + UNBOUND + ATTACHMENTS + MOUNT_PODS


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(OBJECTS) - 1), st.booleans()), max_size=40))
def test_all_nodes_together_are_the_cluster(changes: list[tuple[int, bool]]) -> None:
    index = NodeIndex()
    there: dict[int, tuple[Kind, Manifest]] = {}
    for number, stays in changes:
        kind, manifest = OBJECTS[number]
        before, after = packed(manifest) if number in there else None, packed(manifest) if stays else None
        list(index.change(kind, before, after))
        there.pop(number, None)
        if stays:
            there[number] = OBJECTS[number]
    pods = [each for kind, each in there.values() if kind is Kind.POD]
    attachments = [each for kind, each in there.values() if kind is Kind.ATTACHMENT]
    now = NOW + datetime.timedelta(seconds=100)
    expected = steps(wanted(pods, CLUSTER), found(*pods), attachments, now)
    decided = []
    for node in index.nodes():
        want = wanted(index.users(node), CLUSTER)
        own = index.attachments(node)
        names = {each["metadata"]["name"] for each in own} | {each.name for each in want.mounts.values()}
        decided += steps(want, index.mount_pods(names), own, now)
    assert sorted(map(repr, decided)) == sorted(map(repr, expected))


def test_an_event_concerns_the_node_on_which_it_is() -> None:
    index = NodeIndex()
    app, served, ends = (packed(each) for each in (_user("app", "n1", None), _served(), ending(_served())))
    attached = packed(attachment("n1", None))
    assert list(index.change(Kind.POD, None, app)) == ["n1"]
    assert list(index.change(Kind.ATTACHMENT, None, attached)) == ["n1"]
    assert list(index.change(Kind.POD, None, served)) == ["n1"]
    assert set(index.change(Kind.POD, served, ends)) == {"n1"}
    assert list(index.change(Kind.TEMPLATE, None, object())) == []
    assert list(index.change(Kind.POD, app, None)) == ["n1"]
    assert list(index.change(Kind.ATTACHMENT, attached, None)) == ["n1"]
    assert index.nodes() == set()


def test_a_mount_pod_with_a_claim_is_a_user_too() -> None:
    index, middleware = NodeIndex(), serving(mount("n1", None))
    middleware["spec"]["nodeName"] = "n1"
    list(index.change(Kind.POD, None, packed(middleware)))
    assert index.users("n1") == []
    middleware["spec"]["volumes"].append({"name": "base", "persistentVolumeClaim": {"claimName": "base"}})
    assert "n1" in list(index.change(Kind.POD, None, packed(middleware)))
    assert index.users("n1") == [middleware]


def _served() -> Manifest:
    return serving(mount("n1", None))


def test_a_pod_without_a_node_concerns_none() -> None:
    index, waits = NodeIndex(), user()
    del waits["spec"]["nodeName"]
    assert list(index.change(Kind.POD, None, packed(waits))) == []
    assert list(index.change(Kind.POD, packed(waits), packed(user()))) == ["n1"]
    assert index.users("n1") == [user()]
