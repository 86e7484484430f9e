"""What is done so that the mount pods are those that are wanted, from each state in which they can be."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

from fusermount3_controller import mount_pods
from fusermount3_controller.mount_pod_steps import (
    DRAINED,
    GRACE_OF_REPLACED,
    PAUSE,
    CreatePod,
    DeleteAttachment,
    DeletePod,
    Report,
    SetStatus,
    Step,
    steps,
)
from fusermount3_controller.wanted_mount_pods import wanted
from tests.unit.controller.cluster import (
    NOW,
    at,
    ending,
    failed,
    found,
    known,
    mount_of,
    mount_pod,
    serving,
    user,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fusermount3_controller.mount_pods import MountPod
    from fusermount3_controller.served_volumes import Known
    from tests.unit.controller.samples import Manifest

ONE = mount_of([user()], known())


def attachment(mount: MountPod = ONE, *users: str, **status: Any) -> Manifest:
    """Return a MountPodAttachment whose status names these users."""
    workloads = [{"namespace": "team", "name": name, "uid": f"uid of {name}"} for name in users]
    return mount_pods.attachment(mount) | {"status": {"workloads": workloads, **status}}


def done(
    users: Iterable[Manifest], cluster: Known, *pods: Manifest, has: Iterable[Manifest] = (), after: float = 0
) -> list[Step]:
    """Return the steps so many seconds after `NOW`, but for those of status."""
    now = NOW + datetime.timedelta(seconds=after)
    result = steps(wanted(users, cluster), found(*pods), has, now)
    return [each for each in result if not isinstance(each, SetStatus)]


def told(*args: Any, **keywords: Any) -> list[str]:
    """Return the steps in words: what is created, deleted and reported."""
    words = {CreatePod: "create", DeletePod: "delete", DeleteAttachment: "forget", Report: "report"}
    result = []
    for step in done(*args, **keywords):
        what = step.number if isinstance(step, CreatePod) else None
        what = step.pod.number if isinstance(step, DeletePod | Report) else what
        result.append(f"{words[type(step)]}{'' if what is None else f' {what}'}")
    return result


def statuses(*args: Any, after: float = 0, **keywords: Any) -> dict[str, Any]:
    users, cluster, *pods = args
    now = NOW + datetime.timedelta(seconds=after)
    result = steps(wanted(users, cluster), found(*pods), keywords["has"], now)
    return {each.name: each.status for each in result if isinstance(each, SetStatus)}


# One pod for all users


def test_the_first_user_gets_a_pod_and_all_others_none() -> None:
    assert done([user()], known()) == [CreatePod(ONE, 0)]
    many = [user(f"app-{number}") for number in range(50)]
    assert told(many, known()) == ["create 0"]
    assert told(many, known(), mount_pod(ONE), has=[attachment()]) == []
    assert told(many, known(), serving(ONE), has=[attachment()]) == []


def test_a_pod_that_ends_blocks_nobody() -> None:
    assert told([user()], known(), ending(serving(ONE)), has=[attachment()]) == ["create 1"]
    pods = ending(serving(ONE, 0)), ending(serving(ONE, 2))
    assert told([user()], known(), *pods, has=[attachment()]) == ["create 1"]


def test_who_leaves_before_its_containers_have_begun_needs_nothing() -> None:
    assert told([ending(user(phase="Pending"))], known()) == []
    assert told([ending(user(phase="Pending"))], known(), has=[attachment()]) == []
    assert told([ending(user(phase="Pending"))], known(), serving(ONE), has=[attachment()]) == []
    assert told([ending(user())], known(), has=[attachment()]) == ["create 0"]


def test_a_node_that_is_drained_gets_no_other_pod() -> None:
    """All pods are told to end, and the mount pod waits for its users."""
    waits, has = ending(serving(ONE)), [attachment()]
    assert told([ending(user())], known(), waits, has=has) == []
    assert told([ending(user()), user("stays")], known(), waits, has=has) == ["create 1"]
    assert told([ending(user())], known(), has=has) == ["create 0"]


def test_nor_does_it_if_the_mount_pod_is_told_to_end_before_its_users() -> None:
    waits, has = ending(serving(ONE), since=0), [attachment()]
    assert told([user(), ending(user("other"))], known(), waits, has=has, after=DRAINED - 1) == []
    assert told([user()], known(), ending(serving(ONE, 1), since=-60), waits, has=has, after=DRAINED - 1) == []
    assert told([user()], known(), waits, has=has, after=DRAINED) == ["create 1"]
    # It gets no new ones.
    assert told([user(), user("new", phase="Pending")], known(), waits, has=has) == ["create 1"]


def test_a_pod_that_has_failed_is_replaced_and_deleted_only_then() -> None:
    gone = failed(ONE, 0, created=-60)
    assert told([user()], known(), gone, has=[attachment()]) == ["create 1", "report 0"]
    assert told([user()], known(), gone, mount_pod(ONE, 1), has=[attachment()]) == ["delete 0"]


def test_a_pod_that_fails_again_and_again_is_not_created_again_and_again() -> None:
    gone = failed(ONE, 0, created=0)
    assert told([user()], known(), gone, has=[attachment()], after=PAUSE - 1) == ["report 0"]
    assert told([user()], known(), gone, has=[attachment()], after=PAUSE) == ["create 1", "report 0"]
    both = failed(ONE, 0, created=-60), failed(ONE, 1, created=0)
    assert told([user()], known(), *both, has=[attachment()], after=PAUSE - 1) == ["report 0", "report 1"]


def test_of_two_pods_the_one_that_was_created_first_stays() -> None:
    has = [attachment()]
    assert told([user()], known(), serving(ONE, 0), serving(ONE, 1, created=1), has=has) == ["delete 1"]
    assert told([user()], known(), serving(ONE, 1, created=1), serving(ONE, 3), has=has) == ["delete 1"]
    assert told([user()], known(), mount_pod(ONE, 0), mount_pod(ONE, 1, created=1), has=has) == ["delete 1"]


def test_but_none_that_serves_is_deleted_for_one_that_does_not_yet() -> None:
    assert told([user()], known(), mount_pod(ONE, 0), serving(ONE, 1, created=1), has=[attachment()]) == []


def test_users_are_told_why_their_pod_does_not_serve() -> None:
    waiting = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
    pod = mount_pod(ONE, conditions=[waiting])
    reports = done([user("a"), user("b")], known(), pod, has=[attachment()])
    assert [(each.user.name, each.pod.failure) for each in reports if isinstance(each, Report)] == [
        ("a", "Unschedulable: no room"),
        ("b", "Unschedulable: no room"),
    ]


def test_users_are_told_of_the_pod_that_stays() -> None:
    waiting = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
    pods = (mount_pod(ONE, number, created=number, conditions=[waiting]) for number in range(2))
    assert told([user()], known(), *pods, has=[attachment()]) == ["delete 1", "report 0"]


def test_a_pod_in_another_namespace_is_nobody_s() -> None:
    """Whoever can create pods in a namespace of their own can give them any name and any owner."""
    forged = serving(ONE)
    forged["metadata"]["namespace"] = "team"
    assert told([user()], known(), forged, has=[attachment()]) == ["create 0"]
    assert told([user()], known(), forged) == ["create 0"]
    assert told([], known(), forged, has=[attachment()]) == ["forget"]


def test_with_the_identity_of_users_the_pod_is_theirs_in_their_namespace() -> None:
    cluster = known(identity="ServiceAccount")
    mount = mount_of([user()], cluster)
    assert told([user()], cluster, serving(mount), has=[attachment(mount)]) == []
    assert told([], cluster, serving(mount), has=[attachment(mount)]) == ["delete 0"]
    forged = serving(mount)
    forged["metadata"]["namespace"] = "fuse-mounts"
    assert told([user()], cluster, forged, has=[attachment(mount)]) == ["create 0"]


def test_a_pod_of_one_node_serves_nobody_on_another() -> None:
    """And what is done on one has nothing to do with what is done on the other."""
    other = mount_of([user(node="n2")], known())
    has = [attachment(other), attachment(ONE)]
    created = done([user(), user("next", node="n2")], known(), serving(other), has=has)
    assert [(each.mount.node, each.number) for each in created if isinstance(each, CreatePod)] == [("n1", 0)]
    assert len(created) == 1
    assert told([], known(), serving(other), has=has) == ["forget", "delete 0"]


def test_a_pod_whose_attachment_is_not_known_yet_counts() -> None:
    assert told([user()], known(), mount_pod(ONE)) == []
    assert told([], known(), mount_pod(ONE)) == []


# Nobody


def test_when_the_last_user_is_gone_so_is_the_pod_and_then_the_attachment() -> None:
    assert told([], known(), serving(ONE), has=[attachment()]) == ["delete 0"]
    assert told([], known(), mount_pod(ONE), has=[attachment()]) == ["delete 0"]
    assert told([], known(), failed(ONE), has=[attachment()]) == ["delete 0"]
    assert told([], known(), ending(serving(ONE)), has=[attachment()]) == []
    assert told([], known(), has=[attachment()]) == ["forget"]


def test_a_template_that_is_gone_takes_its_pods_with_it_but_not_from_users() -> None:
    gone = known()._replace(templates={})
    assert told([], gone, serving(ONE), has=[attachment()]) == ["delete 0"]
    assert told([user()], gone, serving(ONE), has=[attachment()]) == []
    assert told([user(node="n2")], gone, serving(ONE), has=[attachment()]) == ["delete 0"]


def test_an_idle_pod_stays_as_long_as_the_template_says() -> None:
    cluster = known(idleSeconds=60)
    has = [attachment(ONE, "app")]
    assert told([], cluster, serving(ONE), has=has) == []
    (status,) = statuses([], cluster, serving(ONE), has=has).values()
    assert (status["idleSince"], status["workloads"]) == (at(0), [])
    idle = [attachment(ONE, idleSince=at(0))]
    assert told([], cluster, serving(ONE), has=idle, after=59) == []
    assert statuses([], cluster, serving(ONE), has=idle, after=59)[ONE.name]["idleSince"] == at(0)
    assert told([], cluster, serving(ONE), has=idle, after=60) == ["delete 0"]
    assert "idleSince" not in statuses([user()], cluster, serving(ONE), has=idle, after=59)[ONE.name]


def test_of_two_idle_pods_one_stays() -> None:
    idle, two = [attachment(ONE, idleSince=at(0))], (serving(ONE), mount_pod(ONE, 1, created=50))
    assert told([], known(idleSeconds=60), *two, has=idle, after=59) == ["delete 1"]
    assert told([], known(idleSeconds=60), *two, has=idle, after=60) == ["delete 1", "delete 0"]


def test_an_idle_pod_of_a_template_as_it_was_does_not_stay() -> None:
    assert told([], known(2, idleSeconds=60), serving(ONE), has=[attachment()]) == ["delete 0"]


def test_an_attachment_that_says_nothing_yet_counts() -> None:
    """It is created before its status is written; a pod that serves then is idle from now on."""
    has = [mount_pods.attachment(ONE)]
    assert told([], known(), serving(ONE), has=has) == ["delete 0"]
    assert told([], known(idleSeconds=60), serving(ONE), has=has) == []
    assert told([user()], known(2), serving(ONE), has=has) == ["create 0"]
    assert told([], known(), has=[{"metadata": {"name": "mp-0"}}]) == ["forget"]


# A template that changes

TWO = mount_of([user()], known(2))
OLD, NEW = [attachment(ONE, "app")], [attachment(ONE, "app"), attachment(TWO)]


def test_a_changed_template_is_for_the_next_user() -> None:
    assert told([user()], known(2), serving(ONE), has=OLD) == []
    created = done([user(), user("next", since=50)], known(2), serving(ONE), has=OLD)
    assert [(each.mount.name, each.number) for each in created if isinstance(each, CreatePod)] == [(TWO.name, 0)]


def test_a_user_that_leaves_before_it_has_begun_gets_no_pod_of_the_changed_template() -> None:
    leaves = ending(user("next", since=50, phase="Pending"))
    assert told([user(), leaves], known(2), serving(ONE), has=OLD) == []
    assert told([leaves], known(2, upgrade="Replace"), mount_pod(ONE), has=OLD) == []
    assert told([leaves], known(2), has=OLD) == ["forget"]


def test_what_was_begun_for_the_changed_template_is_finished() -> None:
    """Also if the user for whom it was begun is gone: an attachment has a pod as long as its volume has users."""
    assert told([user()], known(2), serving(ONE), has=NEW) == ["create 0"]


def test_the_attachment_of_an_old_pod_goes_after_it() -> None:
    assert told([user()], known(2), serving(TWO), has=NEW) == ["forget"]
    third = [attachment(ONE), attachment(TWO, "app")]
    assert told([user()], known(3), serving(TWO), has=third) == ["forget"]


def test_the_old_pod_stays_for_who_may_have_it() -> None:
    old, new = serving(ONE), serving(TWO, created=50, since=60)
    both = [user(), user("next", since=50)]
    assert told(both, known(2), old, mount_pod(TWO, created=50), has=NEW) == []
    assert told(both, known(2), old, new, has=NEW) == []
    # Whose clock is right, nobody knows: it may have come before the new pod served.
    assert told([user("later", since=90)], known(2), old, new, has=NEW) == []
    assert told([user("later", since=91)], known(2), old, new, has=NEW) == ["delete 0"]
    # It came before the new pod served, so it may have got the old one.
    assert told(both[1:], known(2), old, new, has=NEW) == []
    assert told([user("later", since=200)], known(2), old, new, has=NEW) == ["delete 0"]
    assert told([user(), user("later", since=200)], known(2), old, new, has=NEW) == []
    assert told([user("later", since=200)], known(2), old, new, has=[attachment(ONE, "later")]) == ["delete 0"]
    assert told([], known(2), old, new, has=NEW) == ["delete 0", "delete 0"]


def test_an_old_pod_that_served_nobody_goes_at_once() -> None:
    waiting = mount_pod(ONE)
    assert told([user(), user("next")], known(2), waiting, mount_pod(TWO), has=NEW) == ["delete 0"]


def test_an_old_pod_that_fails_is_replaced_by_a_new_one() -> None:
    created = done([user()], known(2), failed(ONE, created=-60), has=OLD)
    assert [each.mount.name for each in created if isinstance(each, CreatePod)] == [TWO.name]


def test_an_old_pod_that_has_failed_goes_beside_one_that_serves() -> None:
    """As when the template was changed while one of two controllers replaced it."""
    pods = failed(ONE, 0, created=-60), serving(ONE, 1)
    assert told([user()], known(2), *pods, has=OLD) == ["delete 0"]
    assert told([user(), user("next")], known(2), *pods, mount_pod(TWO), has=NEW) == ["delete 0"]


def test_of_two_old_pods_one_stays() -> None:
    pods = serving(ONE, 0), serving(ONE, 1, created=1)
    assert told([user()], known(2), *pods, has=OLD) == ["delete 1"]
    assert told([user(), user("next")], known(2), *pods, mount_pod(TWO), has=NEW) == ["delete 1"]


def test_with_replace_all_get_the_new_pod_as_soon_as_it_serves() -> None:
    cluster = known(2, upgrade="Replace")
    old = serving(ONE)
    (create,) = done([user()], cluster, old, has=OLD)
    assert isinstance(create, CreatePod) and create.mount.name == TWO.name
    assert told([user()], cluster, old, mount_pod(TWO), has=NEW) == []
    (delete,) = done([user()], cluster, old, serving(TWO, created=50), has=NEW)
    assert isinstance(delete, DeletePod)
    assert (delete.pod.base, delete.grace) == (ONE.name, GRACE_OF_REPLACED)


def test_nothing_is_taken_from_pods_that_are_not_understood_any_more() -> None:
    """A namespace that is not allowed any more has a pod that shares with one that is."""
    cluster = known(2, allowedNamespaces={"matchLabels": {"a": "b"}})
    cluster = cluster._replace(
        namespaces={"other": {"metadata": {"labels": {"a": "b"}}}},
        claims={**cluster.claims, ("other", "photos"): cluster.claims["team", "photos"]},
    )
    allowed = user("later", since=200)
    allowed["metadata"]["namespace"] = "other"
    new = serving(TWO, created=50, since=60)
    assert told([allowed], cluster, serving(ONE), new, has=NEW) == ["delete 0"]
    assert told([allowed, user()], cluster, serving(ONE), new, has=NEW) == []


def test_each_pod_has_the_users_that_it_may_have() -> None:
    both = [user(), user("next", since=50)]
    told = statuses(both, known(2), serving(ONE), serving(TWO, created=50, since=60), has=NEW)
    assert {name: [each["name"] for each in status["workloads"]] for name, status in told.items()} == {
        ONE.name: ["app"],
        TWO.name: ["next"],
    }
    assert told[TWO.name]["workloads"][0]["attachmentTime"] == at(50)


# Status


def test_a_status_is_written_once() -> None:
    status = statuses([user()], known(), serving(ONE), has=[attachment()])[ONE.name]
    assert (status["phase"], status["workloadCount"]) == ("Served", 1)
    assert "message" not in status
    assert status["mountPod"] == {"namespace": "fuse-mounts", "name": f"{ONE.name}-0", "uid": "uid of 0"}
    written = mount_pods.attachment(ONE) | {"status": status}
    assert steps(wanted([user()], known()), found(serving(ONE)), [written], NOW) == []


def test_a_status_says_why_the_pod_does_not_serve() -> None:
    status = statuses([user()], known(), failed(ONE), has=[attachment()])[ONE.name]
    assert (status["phase"], status["message"]) == ("Failed", "Evicted: The node was low on memory.")


def test_a_status_tells_of_the_pod_that_serves_or_may() -> None:
    pods = ending(serving(ONE, 0)), failed(ONE, 1), mount_pod(ONE, 2), serving(ONE, 3, created=1)
    for number, phase in enumerate(("Ending", "Failed", "Pending", "Served")):
        status = statuses([user()], known(), *pods[: number + 1], has=[attachment()])[ONE.name]
        assert (status["phase"], status["mountPod"]["name"]) == (phase, f"{ONE.name}-{number}")
    assert statuses([user()], known(), has=[attachment()])[ONE.name]["phase"] == "Pending"


def test_no_status_is_written_of_what_is_not_there_or_goes() -> None:
    assert statuses([user()], known(), mount_pod(ONE), has=[]) == {}
    assert statuses([], known(), has=[attachment()]) == {}
    assert ONE.name not in statuses([user()], known(2), serving(TWO), has=NEW)
