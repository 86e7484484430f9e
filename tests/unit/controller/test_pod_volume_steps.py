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
from tests.unit.controller.volumes import claim, volume

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
    view = View(seen()._replace(status=status), persistent_volume=persistent(), is_staged=True)
    assert next_step(view, NOW) == Wait()
    assert status_of(next_step(view._replace(is_staged=False), NOW)).phase is Phase.DELETING


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
