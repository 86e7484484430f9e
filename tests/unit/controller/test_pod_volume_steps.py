"""What is to do next for a volume: the decisions that tests of whole lives of volumes reach seldom."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from fusermount3_controller import pod_volumes
from fusermount3_controller.pod_volume_steps import (
    CreatePersistentVolume,
    CreateRun,
    DeleteRun,
    Finish,
    Forget,
    SetStatus,
    Step,
    Ungate,
    View,
    Wait,
    next_step,
)
from fusermount3_controller.pod_volumes import ABANDON, RETRY, Failures, Phase, PodVolume, Run, Status
from fusermount3_controller.run_results import RunPod
from fusermount3_controller.template_expressions import Stage
from tests.unit.controller.cluster import NOW, at
from tests.unit.controller.samples import Manifest
from tests.unit.controller.volumes import claim, run, volume

CREATION, DELETION = Run(Stage.CREATION, "pvc-1-0", "u0"), Run(Stage.DELETION, "pvc-1-1", "u1")


def seen(policy: str = "Delete", **status: Any) -> PodVolume:
    return volume(policy=policy)._replace(status=Status(**status))


def persistent(policy: str = "Delete", phase: str = "Released") -> Manifest:
    created = seen(phase=Phase.CREATED, handle="h", capacity=1)
    result = pod_volumes.persistent_volume(created)
    result["spec"]["persistentVolumeReclaimPolicy"] = policy
    return {**result, "status": {"phase": phase}}


def status_of(step: Step) -> Status:
    assert isinstance(step, SetStatus)
    return step.status


def test_a_pod_runs_only_after_it_is_recorded() -> None:
    asked = View(seen(), claim=claim())
    assert next_step(asked, NOW) == CreateRun(Stage.CREATION, 0)
    pod = RunPod("pvc-1-0", "u0", 0, Stage.CREATION, is_gated=True)
    recorded = status_of(next_step(asked._replace(pods=(pod,)), NOW))
    assert (recorded.run, recorded.runs, recorded.may_exist) == (CREATION, 1, True)
    running = View(seen()._replace(status=recorded), (pod,), claim())
    assert next_step(running, NOW) == Ungate(pod)


def test_whoever_was_changed_to_be_kept_is_kept() -> None:
    """Somebody has seen that it is about to be deleted."""
    view = View(seen(phase=Phase.DELETING, may_exist=True), persistent_volume=persistent("Retain"))
    assert status_of(next_step(view, NOW)).phase is Phase.CREATED


def test_a_volume_is_not_deleted_while_a_mount_pod_serves_it() -> None:
    status = Status(Phase.CREATED, may_exist=True, persistent_volume="pvc-1", reclaim_policy="Delete")
    view = View(seen()._replace(status=status), persistent_volume=persistent(), nodes=frozenset({"n1"}))
    assert next_step(view, NOW) == Wait()
    assert status_of(next_step(view._replace(nodes=frozenset()), NOW)).phase is Phase.DELETING


def test_nothing_is_deleted_whose_claim_is_there() -> None:
    """Not even if somebody has taken the PersistentVolume away, with its finalizer."""
    status = Status(Phase.CREATED, may_exist=True, persistent_volume="pvc-1", reclaim_policy="Delete")
    assert next_step(View(seen()._replace(status=status), claim=claim()), NOW) == Wait()


def test_what_was_made_for_a_claim_that_is_gone_is_kept_if_it_is_to_be() -> None:
    made: dict[str, Any] = {"phase": Phase.CREATED, "may_exist": True, "handle": "h", "capacity": 1}
    assert next_step(View(seen("Retain", **made)), NOW) == CreatePersistentVolume()
    assert status_of(next_step(View(seen(**made)), NOW)).phase is Phase.DELETING


def test_a_failure_waits_and_can_be_told_not_to() -> None:
    failures = {Stage.DELETION: Failures(3, at(20))}
    status = Status(Phase.DELETING, failures=failures, may_exist=True)
    view = View(seen()._replace(status=status))
    assert next_step(view, NOW) == Wait(NOW + datetime.timedelta(seconds=20))
    assert isinstance(next_step(view, NOW + datetime.timedelta(seconds=20)), CreateRun)
    told = view._replace(volume=view.volume._replace(annotations=frozenset({RETRY})))
    assert status_of(next_step(told, NOW)).failures == {Stage.DELETION: Failures(3)}
    again = told._replace(volume=told.volume._replace(status=status._replace(failures={})))
    assert next_step(again, NOW) == Forget(RETRY)


def test_a_pod_that_nobody_wants_any_more_does_not_begin() -> None:
    pod = RunPod("pvc-1-0", "u0", 0, Stage.CREATION)
    view = View(seen(phase=Phase.CREATING, run=CREATION, runs=1, may_exist=True), (pod,))
    assert next_step(view, NOW) == DeleteRun(pod)
    assert next_step(view._replace(pods=(pod._replace(is_started=True),)), NOW) == Wait()


@pytest.mark.parametrize("phase", [Phase.UNDOING, Phase.DELETING])
def test_what_nobody_can_delete_can_be_abandoned(phase: Phase) -> None:
    view = View(seen(phase=phase, may_exist=True)._replace(annotations=frozenset({ABANDON})))
    assert not status_of(next_step(view, NOW)).may_exist


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ('{"handle": "taken"}', "its handle is that of another volume: taken"),
        ('{"capacity": "1Mi"}', "it would have 1048576 bytes; the claim asks for 1073741824"),
        ("done", "its termination message is neither empty nor an object of JSON"),
    ],
)
def test_an_answer_that_can_not_be_used_is_a_failure(said: str, why: str) -> None:
    pod = RunPod("pvc-1-0", "u0", 0, Stage.CREATION, is_due=True, has_succeeded=True, said=said)
    running = seen(phase=Phase.CREATING, run=CREATION, runs=1, may_exist=True)
    step = next_step(View(running, (pod,), claim(), taken=frozenset({"taken"})), NOW)
    assert isinstance(step, SetStatus) and step.event
    assert (step.status.message, step.status.may_exist) == (why, True)
    assert step.event.text == f"pod pvc-1-0: {why}; trying again in 5 s"


def test_what_failed_is_undone_before_it_is_tried_again() -> None:
    view = View(seen(phase=Phase.CREATING, runs=1, may_exist=True), claim=claim())
    assert next_step(view, NOW) == CreateRun(Stage.DELETION, 1)
    kept = View(seen("Retain", phase=Phase.CREATING, runs=1, may_exist=True), claim=claim())
    assert next_step(kept, NOW) == CreateRun(Stage.CREATION, 1)
    assert next_step(kept._replace(claim=None), NOW) == Finish()


# Nodes of volumes

ALIVE: dict[str, Any] = {
    "phase": Phase.CREATED,
    "may_exist": True,
    "handle": "h",
    "capacity": 1,
    "persistent_volume": "pvc-1",
    "reclaim_policy": "Delete",
}
UNSTAGING = Run(Stage.UNSTAGING, "pvc-1-1", "u1")


def staged(*nodes: str, annotations: frozenset[str] = frozenset(), **status: Any) -> View:
    """Return a volume that is in use on these nodes, of a template with a pod that unstages."""
    of_template = volume(volumeUnstaging=run("sync", "{{ handle }}"))
    existing = persistent(phase="Bound")
    return View(
        of_template._replace(status=Status(**(ALIVE | status)), annotations=annotations),
        claim=claim(),
        persistent_volume=existing,
        nodes=frozenset(nodes),
    )


def test_a_node_is_recorded_before_a_mount_pod_comes_there() -> None:
    """The MountPodAttachment is there, and the mount pod is not."""
    view = staged("n2")
    assert not pod_volumes.may_stage(view.volume, "n2")
    recorded = status_of(next_step(view, NOW))
    assert recorded.staged == ("n2",)
    assert pod_volumes.may_stage(view.volume._replace(status=recorded), "n2")
    assert next_step(view._replace(volume=view.volume._replace(status=recorded)), NOW) == Wait()


def test_a_volume_that_needs_no_unstaging_is_staged_at_once() -> None:
    assert pod_volumes.may_stage(seen(**ALIVE), "n2")
    assert next_step(View(seen(**ALIVE), (), claim(), persistent(phase="Bound"), frozenset({"n2"})), NOW) == Wait()


def test_a_volume_comes_to_no_other_node_before_it_is_unstaged() -> None:
    """Where it is used at the same time, nobody waits."""
    assert status_of(next_step(staged("n1", "n2", staged=("n1",)), NOW)).staged == ("n1", "n2")
    view = staged("n2", staged=("n1",))
    begun = status_of(next_step(view, NOW))
    assert (begun.unstaging, begun.staged) == ("n1", ("n1",))
    unstaging = view.volume._replace(status=begun)
    assert not any(pod_volumes.may_stage(unstaging, node) for node in ("n1", "n2"))
    assert next_step(view._replace(volume=unstaging), NOW) == CreateRun(Stage.UNSTAGING, 0)


def test_a_mount_pod_that_came_first_keeps_its_node() -> None:
    """Whoever wrote that the node is to be unstaged had seen no MountPodAttachment there."""
    failures = {Stage.UNSTAGING: Failures(2, at(20))}
    view = staged("n1", staged=("n1",), unstaging="n1", failures=failures, message="no luck")
    kept = status_of(next_step(view, NOW))
    assert (kept.unstaging, kept.staged, kept.failures, kept.message) == ("", ("n1",), {}, "")
    running = RunPod("pvc-1-1", "u1", 1, Stage.UNSTAGING, is_started=True)
    view = staged("n1", staged=("n1",), unstaging="n1", run=UNSTAGING, runs=2)._replace(pods=(running,))
    assert next_step(view, NOW) == Wait()


def test_it_is_unstaged_on_its_node() -> None:
    view = staged(staged=("n1", "n2"), unstaging="n2")
    pod = pod_volumes.run_pod(view.volume, Stage.UNSTAGING, 1, "fuse-mounts")
    required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (field,) = required["nodeSelectorTerms"][0]["matchFields"]
    assert field == {"key": "metadata.name", "operator": "In", "values": ["n2"]}
    assert pod["spec"]["tolerations"] == [{"operator": "Exists"}]
    assert pod["spec"]["containers"][0]["args"] == ["sync", "h"]
    ended = RunPod("pvc-1-1", "u1", 1, Stage.UNSTAGING, is_due=True, has_succeeded=True)
    running = staged(staged=("n1", "n2"), unstaging="n2", run=UNSTAGING, runs=2)._replace(pods=(ended,))
    step = next_step(running, NOW)
    assert isinstance(step, SetStatus) and step.event
    assert (step.status.staged, step.status.unstaging, step.status.run) == (("n1",), "", None)
    assert step.event == ("VolumeUnstaged", "pod pvc-1-1 has unstaged the volume on n2")


def test_what_can_not_be_unstaged_is_told_tried_again_and_not_deleted() -> None:
    failed = RunPod("pvc-1-1", "u1", 1, Stage.UNSTAGING, is_due=True, message="Error, status 1: no luck")
    view = staged(staged=("n1",), unstaging="n1", run=UNSTAGING, runs=2)
    step = next_step(view._replace(pods=(failed,)), NOW)
    assert isinstance(step, SetStatus) and step.event
    told = "pod pvc-1-1: Error, status 1: no luck; trying again in 5 s"
    assert step.event == ("VolumeUnstagingFailed", told)
    released = view._replace(
        volume=view.volume._replace(status=step.status), claim=None, persistent_volume=persistent()
    )
    assert next_step(released, NOW) == Wait(NOW + datetime.timedelta(seconds=5))
    assert next_step(released, NOW + datetime.timedelta(seconds=5)) == CreateRun(Stage.UNSTAGING, 2)


def test_a_node_that_is_gone_is_skipped() -> None:
    gone = frozenset({"n1"})
    waiting = staged(staged=("n1",), unstaging="n1")._replace(gone=gone)
    running = staged(staged=("n1",), unstaging="n1", run=UNSTAGING, runs=2)._replace(gone=gone)
    pod = RunPod("pvc-1-1", "u1", 1, Stage.UNSTAGING, is_started=True)
    assert next_step(running._replace(pods=(pod,)), NOW) == DeleteRun(pod)
    for view in (waiting, running):
        step = next_step(view, NOW)
        assert isinstance(step, SetStatus) and step.event
        assert (step.status.staged, step.status.run) == ((), None)
        told = "there is no node n1 any more, so no pod unstages the volume there"
        assert step.event == ("VolumeNodeGone", told)


def test_who_abandons_a_node_does_not_abandon_the_volume() -> None:
    view = staged(staged=("n1",), unstaging="n1", annotations=frozenset({ABANDON}))
    step = next_step(view, NOW)
    assert isinstance(step, SetStatus) and step.event and "unstaged on n1" in step.event.text
    assert (step.status.staged, step.status.may_exist) == ((), True)
    assert next_step(view._replace(volume=view.volume._replace(status=step.status)), NOW) == Forget(ABANDON)


@pytest.mark.parametrize("policy", ["Delete", "Retain"])
def test_nothing_ends_while_a_mount_pod_serves_it(policy: str) -> None:
    """Somebody has taken the PersistentVolume away, with its finalizer."""
    view = staged("n1", staged=("n1",), reclaim_policy=policy)._replace(claim=None, persistent_volume=None)
    assert next_step(view, NOW) == Wait()
    assert status_of(next_step(view._replace(nodes=frozenset()), NOW)).unstaging == "n1"
