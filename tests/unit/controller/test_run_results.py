"""Pods that run once for a volume: what they say when they have ended, and what they wait for before."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fusermount3_controller import pod_volumes, run_results
from fusermount3_controller.run_results import Answer, RunPod, answer, existing, handle_in
from fusermount3_controller.template_expressions import Stage
from tests.unit.controller.samples import Manifest
from tests.unit.controller.volumes import volume


def made(status: Manifest | None = None, *, gated: bool = False, **metadata: Any) -> RunPod:
    pod = pod_volumes.run_pod(volume(), Stage.CREATION, 3, "fuse-mounts")
    pod["metadata"] |= {"uid": "7", **metadata}
    if not gated:
        del pod["spec"]["schedulingGates"]
    found = existing({**pod, "status": status or {"phase": "Pending"}}, "uid of volume")
    assert found is not None
    return found


def ended(phase: str, message: str = "", **state: Any) -> Manifest:
    terminated = {"exitCode": 1, "reason": "Error", "message": message, **state}
    return {"phase": phase, "containerStatuses": [{"name": "tool", "state": {"terminated": terminated}}]}


def test_a_pod_is_known_by_its_owner() -> None:
    pod = pod_volumes.run_pod(volume(), Stage.CREATION, 3, "fuse-mounts")
    assert existing(pod, "uid of volume") and not existing(pod, "another uid")
    del pod["metadata"]["ownerReferences"]
    assert not existing(pod, "uid of volume")


def test_a_pod_waits_for_its_gate_and_then_for_what_it_says() -> None:
    assert made(gated=True) == RunPod("pvc-1-3", "7", 3, "volumeCreation", is_gated=True)
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    assert made({"phase": "Pending", "conditions": [condition]}).message == "Unschedulable: 0/1 nodes"
    waits = [{"name": "tool", "state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}]
    assert made({"phase": "Pending", "containerStatuses": waits}).message == "ErrImagePull: no such image"
    starts = [{"name": "tool", "state": {"waiting": {"reason": "ContainerCreating"}}}]
    assert made({"phase": "Pending", "containerStatuses": starts}).message == ""


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (ended("Failed", "first\nno such region\n"), "Error, status 1: no such region"),
        (ended("Failed", '{"error": "no quota"}'), "no quota"),
        (ended("Failed", "{not json"), "Error, status 1: {not json"),
        (ended("Failed", reason="OOMKilled", exitCode=137), "OOMKilled, status 137"),
        ({"phase": "Failed", "reason": "Evicted", "message": "no memory"}, "Evicted: no memory"),
        ({"phase": "Failed"}, "it has failed"),
    ],
)
def test_a_pod_that_failed_says_why(status: Manifest, says: str) -> None:
    found = made(status)
    assert found.is_due and not found.has_succeeded
    assert found.message == says


def test_a_pod_that_succeeded_says_what_it_made() -> None:
    affinity: Manifest = {"required": {"nodeSelectorTerms": []}}
    said = json.dumps({"handle": "b-1", "capacity": "1Gi", "nodeAffinity": affinity})
    assert answer(made(ended("Succeeded", said)).said) == Answer("b-1", 2**30, affinity)
    assert answer(" \n") == Answer()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("done", "neither empty nor an object of JSON"),
        ('{"handel": "x"}', "has 'handel'; there are capacity, error, handle, nodeAffinity"),
        ('{"handle": 7}', "a handle that can't be one: '7'"),
        ('{"handle": "-o"}', "a handle that can't be one: '-o'"),
        ('{"handle": "a b"}', "can't be one"),
        ('{"capacity": "much"}', "its capacity must be a quantity"),
        ('{"nodeAffinity": {"preferred": []}}', "must be an object with 'required'"),
    ],
)
def test_what_can_not_be_meant_so_is_refused(said: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        answer(said)


def test_a_pod_that_failed_may_name_what_it_left() -> None:
    assert handle_in('{"error": "x", "handle": "half"}') == "half"
    assert handle_in('{"error": "x", "handle": "-o"}') == handle_in("half") == ""


def test_kubelet_finds_no_variable_in_what_a_claim_says() -> None:
    assert pod_volumes.escaped({"a": ["$(SECRET)", 1], "b": "x"}) == {"a": ["$$(SECRET)", 1], "b": "x"}


def test_handles_are_written_out() -> None:
    assert run_results.is_handle("pvc-1") and not run_results.is_handle("")
