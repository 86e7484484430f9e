"""Two controllers, one volume, and a cluster that does what it likes: pods end, fail and vanish, and the claim goes.

Each controller looks, and does what it has decided then or later, or never: it may crash between any two requests. What
it reads is read one after the other, so it may see a PodVolume that is older than its pods. hypothesis looks for an
order of events after which something is left that nobody will delete.
"""

from __future__ import annotations

import copy
import datetime
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fusermount3_controller import pod_volumes, run_results
from fusermount3_controller.pod_volume_steps import (
    CreatePersistentVolume,
    CreateRun,
    DeletePersistentVolume,
    DeleteRun,
    Finish,
    Forget,
    Grow,
    ReleasePersistentVolume,
    SetStatus,
    Ungate,
    View,
    Wait,
    next_step,
)
from fusermount3_controller.rendering import node_of
from tests.unit.controller.cluster import NOW
from tests.unit.controller.volumes import claim, known, manifest_of

if TYPE_CHECKING:
    from fusermount3_controller.pod_volume_steps import Step
    from tests.unit.controller.samples import Manifest

WHICH = st.integers(0, 1)
NODES = st.sampled_from(["n1", "n2"])
#: After so many steps of one controller and a cluster that works, nothing may be left to do.
STEPS = 200


class Model(RuleBasedStateMachine):
    """`created` and `deleted` count runs: those that created or may have, and those that deleted and succeeded.

    `attached` are nodes with a MountPodAttachment, and the controllers that have created it and are about to create the
    mount pod; `mounted` those with a mount pod; `left` those that had one, and where no pod has unstaged the volume.
    """

    @initialize(
        policy=st.sampled_from(["Delete", "Delete", "Retain"]),
        validates=st.booleans(),
        unstages=st.booleans(),
        exists=st.booleans(),
    )
    def begin(self, policy: str, validates: bool, unstages: bool, exists: bool) -> None:
        spec = {"volumeValidation": {"podTemplate": pod_template()}} if validates else {}
        if unstages:
            spec["volumeUnstaging"] = {"podTemplate": pod_template()}
        self.unstages = unstages
        self.policy = policy
        self.seconds, self.version, self.uids = 0.0, 1, 0
        self.claim: Manifest | None = claim()
        self.object: Manifest | None = manifest_of(known(**spec), self.claim, reclaimPolicy=policy)
        self.volume: Manifest | None = None
        self.pods: dict[str, Manifest] = {}
        self.decided: list[tuple[View, Step] | None] = [None, None]
        self.created = self.deleted = self.deletions = 0
        self.attached: dict[str, bool] = {}
        self.mounted: set[str] = set()
        self.left: set[str] = set()
        self.gone: set[str] = set()
        while exists and not self.volume:
            self.look_and_act(0)
            self.kubelet(0, "succeeds")
        if self.volume:
            self.volume["status"]["phase"] = "Bound"

    # The API server

    def write(self, manifest: Manifest) -> None:
        self.version += 1
        manifest["metadata"]["resourceVersion"] = str(self.version)
        self.object = manifest

    def do(self, view: View, step: Step) -> None:
        """Carry a step out, as the keeper does and as the API server allows it."""
        name = view.volume.name
        match step:
            case CreateRun(stage, number, requested):
                pod = pod_volumes.run_pod(view.volume, stage, number, "fuse-mounts", requested)
                if pod["metadata"]["name"] not in self.pods:
                    self.uids += 1
                    pod["metadata"]["uid"] = f"uid {self.uids}"
                    self.pods[pod["metadata"]["name"]] = {**pod, "status": {"phase": "Pending"}}
            case Ungate(pod):
                found = self.pods.get(pod.name)
                if found and found["metadata"]["uid"] == pod.uid:
                    found["spec"]["schedulingGates"] = []
            case DeleteRun(pod):
                self.vanish(pod.name)
            case SetStatus(status):
                if self.object and self.object["metadata"]["resourceVersion"] == view.volume.version:
                    written = {k: v for k, v in pod_volumes.status_manifest(status).items() if v is not None}
                    written["failures"] = {k: v for k, v in written["failures"].items() if v}
                    self.write({**copy.deepcopy(self.object), "status": written})
            case CreatePersistentVolume():
                self.volume = self.volume or {
                    **pod_volumes.persistent_volume(view.volume),
                    "status": {"phase": "Pending"},
                }
            case DeletePersistentVolume():
                if self.volume:
                    self.volume["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            case ReleasePersistentVolume():
                if self.volume:
                    self.volume["metadata"]["finalizers"] = []
                    if self.volume["metadata"].get("deletionTimestamp"):
                        self.volume = None
            case Finish():
                if self.object and not view.volume.is_ending:
                    self.object["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
                    self.write(self.object)
                elif self.object and self.object["metadata"]["resourceVersion"] == view.volume.version:
                    self.object = None
            case Forget(annotation):
                if self.object:
                    self.object["metadata"]["annotations"].pop(annotation, None)
                    self.write(self.object)
            case Grow() | Wait():
                pass
        assert name

    def view(self, older: Manifest | None) -> View | None:
        """Return what a controller sees that has read the PodVolume first, and all else later."""
        if older is None:
            return None
        volume = pod_volumes.parse(older)
        pods = [run_results.existing(each, volume.uid) for each in self.pods.values()]
        nodes = frozenset({*self.attached, *self.mounted})
        runs = tuple(each for each in pods if each)
        return View(volume, runs, self.claim, self.volume, nodes, frozenset(self.gone - nodes))

    @property
    def now(self) -> datetime.datetime:
        return NOW + datetime.timedelta(seconds=self.seconds)

    # Controllers

    @rule(which=WHICH)
    def look(self, which: int) -> None:
        if view := self.view(copy.deepcopy(self.object)):
            self.decided[which] = copy.deepcopy((view, next_step(view, self.now)))

    @rule(which=WHICH)
    def act(self, which: int) -> None:
        if decided := self.decided[which]:
            self.decided[which] = None
            self.do(*decided)

    @rule(which=WHICH)
    def look_and_act(self, which: int) -> None:
        self.look(which)
        self.act(which)

    @rule(which=WHICH, steps=st.integers(2, 4))
    def go_on(self, which: int, steps: int) -> None:
        for _ in range(steps):
            self.look_and_act(which)

    @rule(which=WHICH)
    def crash(self, which: int) -> None:
        self.decided[which] = None

    # The cluster

    def begins(self, pod: Manifest) -> None:
        """A pod that runs may create or delete from now on."""
        if not pod["status"].get("began"):
            pod["status"]["began"] = True
            self.created += stage_of(pod) == "volumeCreation"
            self.deletions += stage_of(pod) == "volumeDeletion"
            if stage_of(pod) == "volumeUnstaging":
                assert node_of(pod["spec"]) not in self.mounted, "a pod unstages what a mount pod serves"
            if stage_of(pod) == "volumeDeletion":
                assert not self.left, "a volume is deleted that is not unstaged"

    def ends(self, pod: Manifest, phase: str) -> None:
        pod["status"]["phase"] = phase
        if phase == "Succeeded":
            self.deleted += stage_of(pod) == "volumeDeletion"
            if stage_of(pod) == "volumeUnstaging":
                self.left.discard(node_of(pod["spec"]))

    @rule(index=st.integers(0, 3), ends=st.sampled_from(["runs", "succeeds", "fails", "vanishes"]))
    def kubelet(self, index: int, ends: str) -> None:
        pods = [each for each in self.pods.values() if not each["spec"]["schedulingGates"] and not is_due(each)]
        if not pods:
            return
        pod = pods[index % len(pods)]
        self.begins(pod)
        if ends == "runs":
            pod["status"]["phase"] = "Running"
        elif ends == "vanishes":
            self.vanish(pod["metadata"]["name"])
        else:
            self.ends(pod, "Succeeded" if ends == "succeeds" else "Failed")

    @rule(index=st.integers(0, 3))
    def somebody_deletes_a_pod(self, index: int) -> None:
        if index < len(self.pods):
            self.vanish(list(self.pods)[index])

    def vanish(self, name: str) -> None:
        self.pods.pop(name, None)

    @rule(often=st.integers(0, 7))
    def claim_goes(self, often: int) -> None:
        """Mostly later: before, everything else can happen."""
        self.claim = None if often == 0 else self.claim

    @rule()
    def claim_is_bound(self) -> None:
        if self.volume and self.claim:
            self.volume["status"]["phase"] = "Bound"

    @rule()
    def volume_is_released(self) -> None:
        if self.volume and not self.claim:
            self.volume["status"]["phase"] = "Released"

    @rule()
    def somebody_deletes_the_volume(self) -> None:
        if self.volume and self.volume["status"]["phase"] != "Bound":
            self.volume["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"

    @rule(policy=st.sampled_from(["Delete", "Retain"]))
    def somebody_changes_the_policy(self, policy: str) -> None:
        """Before a pod may delete the volume. What is just being decided is decided on what was said before."""
        run = (self.object or {}).get("status", {}).get("run")
        if self.volume and not run and not self.deletions:
            self.decided = [None, None]
            self.policy = policy
            self.volume["spec"]["persistentVolumeReclaimPolicy"] = policy

    @rule(node=NODES)
    def mount_pod_is_wanted(self, node: str) -> None:
        """What the PodVolume says is read only after the MountPodAttachment is there."""
        if self.claim is None or not self.volume or node in self.gone:
            return
        may = node not in self.attached or not self.attached[node]
        self.attached.setdefault(node, False)
        if may and self.object and pod_volumes.may_stage(pod_volumes.parse(self.object), node):
            self.attached[node] = True

    @rule(node=NODES)
    def mount_pod_comes(self, node: str) -> None:
        if self.attached.get(node):
            busy = [each for each in self.pods.values() if each["status"].get("began") and not is_due(each)]
            assert not [each for each in busy if stage_of(each) == "volumeUnstaging" and node_of(each["spec"]) == node]
            self.mounted.add(node)
            self.left |= {node} if self.unstages else set()

    @rule(node=NODES, steps=st.integers(1, 6))
    def mount_pod_comes_and_goes(self, node: str, steps: int) -> None:
        for _ in range(steps):
            self.mount_pod_is_wanted(node)
            self.look_and_act(0)
        self.mount_pod_comes(node)
        self.mount_pod_goes(node)
        self.attachment_goes(node)
        self.go_on(0, steps)

    @rule(node=NODES)
    def mount_pod_goes(self, node: str) -> None:
        self.mounted.discard(node)

    @rule(node=NODES)
    def attachment_goes(self, node: str) -> None:
        """Without a mount pod, or before that: somebody may have deleted it."""
        if node in self.mounted or not self.attached.get(node):
            self.attached.pop(node, None)

    @rule(node=NODES, often=st.integers(0, 7))
    def node_goes(self, node: str, often: int) -> None:
        if often == 0:
            self.gone.add(node)
            self.left.discard(node)
            self.mounted.discard(node)
            self.attached.pop(node, None)
            for pod in list(self.pods.values()):
                if stage_of(pod) == "volumeUnstaging" and node_of(pod["spec"]) == node:
                    self.vanish(pod["metadata"]["name"])

    @rule(seconds=st.sampled_from([1, 5, 400]))
    def time_passes(self, seconds: int) -> None:
        self.seconds += seconds

    # Promises

    @invariant()
    def what_is_kept_is_never_deleted(self) -> None:
        if hasattr(self, "policy") and self.policy == "Retain" and self.deletions:
            phase = (self.object or {}).get("status", {}).get("phase")
            raise AssertionError(f"a pod deleted a volume that is to be kept, in phase {phase}")

    def teardown(self) -> None:
        """Let everything settle with one controller, once the claim is gone."""
        if not hasattr(self, "policy"):
            return
        self.decided = [None, None]
        self.claim = None
        self.attached.clear()
        self.mounted.clear()
        if self.volume:
            self.volume["status"]["phase"] = "Released"
        for _ in range(STEPS):
            self.seconds += 400
            if self.volume and self.policy == "Retain":
                self.somebody_deletes_the_volume()
            for pod in list(self.pods.values()):
                if not pod["spec"]["schedulingGates"] and not is_due(pod):
                    self.begins(pod)
                    self.ends(pod, "Succeeded")
            if self.volume and self.claim is None:
                self.volume["status"]["phase"] = "Released"
            view = self.view(self.object)
            if view is None:
                break
            self.do(view, next_step(view, self.now))
        assert self.object is None
        assert not self.left
        assert self.volume is None
        assert not [each for each in self.pods.values() if not each["spec"]["schedulingGates"]]
        if self.policy == "Retain":
            assert not self.deletions
        else:
            assert self.created <= self.deleted


def pod_template() -> Manifest:
    return {"spec": {"containers": [{"name": "tool", "image": "example/tool:1.0"}]}}


def stage_of(pod: Manifest) -> Any:
    return pod["metadata"]["labels"][pod_volumes.STAGE_LABEL]


def is_due(pod: Manifest) -> bool:
    return pod["status"]["phase"] in ("Failed", "Succeeded")


TestModel = Model.TestCase
TestModel.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
