"""What to do next for a volume that was created for a claim, or is to be. Pure.

The promise: each pod that creates a volume is followed by one that deletes it and succeeds, unless the volume lives, or
is to be kept (`reclaimPolicy: Retain`). So a pod gets its gate taken away only after its PodVolume names its UID, and
what has its UID there counts as having run, whatever became of it. A write of a status is refused by the API server if
the PodVolume is not the one on which it was decided (resourceVersion). All other steps do no harm when they come late
or twice.
"""

import datetime
from collections.abc import Mapping
from typing import Any, NamedTuple

from fusermount3_controller import pod_volumes, run_results
from fusermount3_controller.faults import Invalid
from fusermount3_controller.mount_pods import moment
from fusermount3_controller.pod_volumes import ABANDON, FINALIZER, RETRY, Failures, Phase, PodVolume, Run, Status
from fusermount3_controller.quantities import size
from fusermount3_controller.run_results import Answer, RunPod
from fusermount3_controller.template_expressions import Stage

#: Seconds until a stage is tried again: after the first failure, and at most.
FIRST_PAUSE, LONGEST_PAUSE = 5, 300

#: Reasons of events: the first are those of other provisioners.
PROVISIONING, PROVISIONED, FAILED = "Provisioning", "ProvisioningSucceeded", "ProvisioningFailed"
RESIZED, RESIZE_FAILED = "VolumeResizeSuccessful", "VolumeResizeFailed"
UNSTAGED, UNSTAGING_FAILED, NODE_GONE = "VolumeUnstaged", "VolumeUnstagingFailed", "VolumeNodeGone"
DELETED, DELETION_FAILED, ABANDONED = "VolumeDeleted", "VolumeFailedDelete", "VolumeAbandoned"
WARNINGS = frozenset({FAILED, RESIZE_FAILED, UNSTAGING_FAILED, NODE_GONE, DELETION_FAILED, ABANDONED})


class View(NamedTuple):
    """A PodVolume, and what has to do with it.

    `pods`: those that it owns. `claim`: that of the PersistentVolume, or for which it is to be; None, if it is gone.
    `nodes`: where a mount pod serves the volume, or is about to. `gone`: those where it was, and that are no nodes any
    more. `taken`: handles of other volumes of the template.
    """

    volume: PodVolume
    pods: tuple[RunPod, ...] = ()
    claim: Mapping[str, Any] | None = None
    persistent_volume: Mapping[str, Any] | None = None
    nodes: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()
    taken: frozenset[str] = frozenset()

    @property
    def is_wanted(self) -> bool:
        return self.claim is not None and not self.claim["metadata"].get("deletionTimestamp")

    @property
    def status(self) -> Status:
        return self.volume.status


class Event(NamedTuple):
    reason: str
    text: str


class CreateRun(NamedTuple):
    """Create the pod, with its gate. `requested`: the capacity to which the volume is to grow, in bytes."""

    stage: Stage
    number: int
    requested: int | None = None


class Ungate(NamedTuple):
    """Take the gate away of the pod with this UID."""

    pod: RunPod


class DeleteRun(NamedTuple):
    pod: RunPod


class SetStatus(NamedTuple):
    """Write the status, if the PodVolume has not changed, and then the event."""

    status: Status
    event: Event | None = None


class CreatePersistentVolume(NamedTuple):
    """It has the name of the PodVolume."""


class DeletePersistentVolume(NamedTuple):
    """Ask for its deletion, which waits for `ReleasePersistentVolume`."""


class ReleasePersistentVolume(NamedTuple):
    """Take our finalizer away."""


class Grow(NamedTuple):
    """Have the PersistentVolume, and then the claim, say this capacity, in bytes."""

    capacity: int


class Finish(NamedTuple):
    """Delete the PodVolume, and take its finalizer away."""


class Forget(NamedTuple):
    """Remove this annotation of the PodVolume."""

    annotation: str


class Wait(NamedTuple):
    """There is nothing to do before this time, or before something is heard."""

    until: datetime.datetime | None = None


Step = (
    CreateRun
    | Ungate
    | DeleteRun
    | SetStatus
    | CreatePersistentVolume
    | DeletePersistentVolume
    | ReleasePersistentVolume
    | Grow
    | Finish
    | Forget
    | Wait
)


def next_step(view: View, now: datetime.datetime) -> Step:
    """Return what to do next."""
    if RETRY in view.volume.annotations:
        return _retried(view)
    if ABANDON in view.volume.annotations and not _can_be_abandoned(view):
        return Forget(ABANDON)
    if staged := _staged(view):
        return staged
    if view.status.run:
        return _watched(view, view.status.run, now)
    match view.status.phase:
        case Phase.PENDING | Phase.CREATING | Phase.UNDOING:
            return _uncreated(view, now)
        case Phase.CREATED:
            return _created(view, now)
        case Phase.DELETING:
            return _deleting(view, now)
        case Phase.DELETED:
            return _deleted(view)


def _retried(view: View) -> Step:
    if any(each.retry_after for each in view.status.failures.values()):
        failures = {stage: each._replace(retry_after="") for stage, each in view.status.failures.items()}
        return SetStatus(view.status._replace(failures=failures))
    return Forget(RETRY)


def _can_be_abandoned(view: View) -> bool:
    """Return whether there is something that somebody may say is done: what was said of a node is not of the volume."""
    if view.volume.has(Stage.UNSTAGING) and view.status.phase is Phase.CREATED:
        return view.status.unstaging != ""
    return view.status.may_exist


# Pods --------------------------------------------------------------------------------------------------------------


def _begun(view: View, stage: Stage, now: datetime.datetime, requested: int | None = None) -> Step:
    """Return what brings a pod of the stage nearer to running."""
    status = view.status
    if now < (due := moment(status.failures.get(stage, Failures()).retry_after)):
        return Wait(due)
    for pod in view.pods:
        if pod.number != status.runs or (pod.stage != stage and not pod.is_ending):
            return Wait() if pod.is_ending else DeleteRun(pod)
    if not view.pods:
        try:
            pod_volumes.run_pod(view.volume, stage, status.runs, "", requested)
        except Invalid as error:
            return _failed(view, stage, str(error), now)
        return CreateRun(stage, status.runs, requested)
    pod = view.pods[0]
    if pod.is_ending:
        return Wait()
    phase = {Stage.CREATION: Phase.CREATING}.get(stage, status.phase)
    if stage is Stage.DELETION and status.phase is not Phase.DELETING:
        phase = Phase.UNDOING
    run = Run(stage, pod.name, pod.uid)
    may_exist = status.may_exist or stage is Stage.CREATION
    event = Event(PROVISIONING, f"pod {pod.name} creates the volume") if stage is Stage.CREATION else None
    return SetStatus(status._replace(phase=phase, run=run, runs=status.runs + 1, may_exist=may_exist), event)


def _watched(view: View, run: Run, now: datetime.datetime) -> Step:
    """Return what to do about the pod that may be running."""
    pod = next((each for each in view.pods if each.uid == run.uid), None)
    is_lost = run.stage is Stage.UNSTAGING and view.status.unstaging in view.gone
    if pod is None and is_lost:
        return _without_node(view)
    if pod is None:
        return _failed(view, run.stage, f"pod {run.name} has gone, and nobody knows what it did", now)
    if pod.is_due:
        return _succeeded(view, run, pod, now) if pod.has_succeeded else _failed(view, run.stage, pod.message, now, pod)
    if pod.is_ending:
        return Wait()
    is_unwanted = run.stage in (Stage.VALIDATION, Stage.CREATION) and not view.is_wanted
    is_abandoned = run.stage in (Stage.DELETION, Stage.UNSTAGING) and ABANDON in view.volume.annotations
    if is_lost or ((is_unwanted or is_abandoned) and not pod.is_started):
        return DeleteRun(pod)
    if pod.is_gated:
        return Ungate(pod)
    if pod.message and pod.message != view.status.message:
        text = f"pod {pod.name}: {pod.message}"
        return SetStatus(view.status._replace(message=pod.message), Event(_reason(run.stage), text))
    return Wait()


def _succeeded(view: View, run: Run, pod: RunPod, now: datetime.datetime) -> Step:
    failures = {stage: each for stage, each in view.status.failures.items() if stage is not run.stage}
    status = view.status._replace(run=None, failures=failures, message="")
    match run.stage:
        case Stage.VALIDATION:
            return SetStatus(status._replace(validated=True))
        case Stage.UNSTAGING:
            text = f"pod {pod.name} has unstaged the volume on {status.unstaging}"
            return SetStatus(_unstaged(status), Event(UNSTAGED, text))
        case Stage.DELETION:
            phase = Phase.DELETED if status.phase is Phase.DELETING else Phase.CREATING
            deleted = Event(DELETED, f"pod {pod.name} has deleted the volume")
            event = deleted if phase is Phase.DELETED else None
            return SetStatus(status._replace(phase=phase, may_exist=False, handle=""), event)
    try:
        answer = run_results.answer(pod.said)
        if run.stage is Stage.EXPANSION:
            grown = _grown(view, answer)
            event = Event(RESIZED, f"pod {pod.name} has made the volume larger: {grown} bytes")
            return SetStatus(status._replace(capacity=grown), event)
        return SetStatus(_born(view, status, answer), Event(PROVISIONED, f"pod {pod.name} has created the volume"))
    except (Invalid, ValueError) as error:
        return _failed(view, run.stage, str(error), now, pod)


def _failed(view: View, stage: Stage, why: str, now: datetime.datetime, pod: RunPod | None = None) -> Step:
    status = view.status
    count = status.failures.get(stage, Failures()).number + 1
    pause = datetime.timedelta(seconds=pause_after(count))
    after = (now + pause).astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    handle = run_results.handle_in(pod.said) if pod and stage is Stage.CREATION else ""
    status = status._replace(
        run=None,
        message=why,
        failures={**status.failures, stage: Failures(count, after)},
        handle=handle if handle and handle not in view.taken else status.handle,
    )
    text = f"{f'pod {pod.name}: ' if pod else ''}{why}; trying again in {pause.seconds} s"
    return SetStatus(status, Event(_reason(stage), text))


def pause_after(failures: int) -> int:
    """Return the seconds until a stage is tried again that has failed so often in a row."""
    return min(FIRST_PAUSE << min(failures - 1, 10), LONGEST_PAUSE)


def _reason(stage: Stage) -> str:
    reasons = {
        Stage.DELETION: DELETION_FAILED,
        Stage.EXPANSION: RESIZE_FAILED,
        Stage.UNSTAGING: UNSTAGING_FAILED,
    }
    return reasons.get(stage, FAILED)


# Volumes that do not exist yet -------------------------------------------------------------------------------------


def _uncreated(view: View, now: datetime.datetime) -> Step:
    volume, status = view.volume, view.status
    if status.may_exist and not volume.is_retained:
        return _undone(view, now)
    if not view.is_wanted:
        return _cleared(view) or Finish()
    if volume.has(Stage.VALIDATION) and not status.validated:
        return _begun(view, Stage.VALIDATION, now)
    if volume.has(Stage.CREATION):
        return _begun(view, Stage.CREATION, now)
    try:
        return SetStatus(_born(view, status, Answer()))
    except (Invalid, ValueError) as error:
        if now < (due := moment(status.failures.get(Stage.CREATION, Failures()).retry_after)):
            return Wait(due)
        return _failed(view, Stage.CREATION, str(error), now)


def _undone(view: View, now: datetime.datetime) -> Step:
    if ABANDON in view.volume.annotations:
        return _abandoned(view, Phase.CREATING)
    return _begun(view, Stage.DELETION, now)


def _abandoned(view: View, phase: Phase) -> Step:
    text = "somebody has taken it as deleted (annotation abandon)"
    return SetStatus(view.status._replace(phase=phase, may_exist=False, handle=""), Event(ABANDONED, text))


def _born(view: View, status: Status, answer: Answer) -> Status:
    """Return the status of a volume that exists from now on. Raises Invalid or ValueError, if it can't be used."""
    volume = view.volume
    handle = answer.handle or pod_volumes.handle(volume._replace(status=volume.status._replace(handle="")))
    if not run_results.is_handle(handle):
        raise ValueError(f"its handle can't be one: {handle[:80]!r}")
    if handle in view.taken:
        raise ValueError(f"its handle is that of another volume: {handle}")
    capacity = answer.capacity or pod_volumes.capacity(volume)
    least, most = volume.requested["minCapacity"], volume.requested.get("maxCapacity")
    if capacity < least or (most and capacity > most):
        raise ValueError(
            f"it would have {capacity} bytes; the claim asks for {least}" + (f" to {most}" if most else "")
        )
    return status._replace(
        phase=Phase.CREATED,
        handle=handle,
        capacity=capacity,
        node_affinity=answer.node_affinity,
        may_exist=volume.has(Stage.DELETION),
        message="",
        failures={},
    )


# Volumes that exist ------------------------------------------------------------------------------------------------


def _created(view: View, now: datetime.datetime) -> Step:
    if step := _unstaging(view, now):
        return step
    status, existing = view.status, view.persistent_volume
    if existing is None:
        if status.persistent_volume:
            # Somebody took it away with its finalizer. While there is its claim, nobody asked for the end of the data.
            if view.claim is not None or status.staged:
                return Wait()
            return _cleared(view) or Finish() if view.volume.is_retained else _ended(view)
        return CreatePersistentVolume() if view.is_wanted or view.volume.is_retained else _ended(view)
    spec, metadata = existing.get("spec") or {}, existing["metadata"]
    policy = str(spec.get("persistentVolumeReclaimPolicy"))
    if (status.persistent_volume, status.reclaim_policy) != (metadata["name"], policy):
        return SetStatus(status._replace(persistent_volume=metadata["name"], reclaim_policy=policy))
    if view.claim is not None:
        return _expanded(view, spec, now)
    phase, is_ending = (existing.get("status") or {}).get("phase"), bool(metadata.get("deletionTimestamp"))
    if phase == "Bound" or not (is_ending or phase in ("Failed", "Released")):
        return _cleared(view) or Wait()
    if policy == "Delete":
        return Wait() if view.nodes else _ended(view)
    if is_ending and FINALIZER in (metadata.get("finalizers") or []):
        return ReleasePersistentVolume()
    return _cleared(view) or Wait()


def _ended(view: View) -> Step:
    return SetStatus(view.status._replace(phase=Phase.DELETING))


def _expanded(view: View, spec: Mapping[str, Any], now: datetime.datetime) -> Step:
    """Return what makes a volume as large as its claim asks for."""
    assert view.claim is not None
    try:
        requested = size(((view.claim.get("spec") or {}).get("resources") or {}).get("requests", {}).get("storage"))
        shown = size((spec.get("capacity") or {}).get("storage"))
        told = size(((view.claim.get("status") or {}).get("capacity") or {}).get("storage", shown))
    except (AttributeError, ValueError):
        return _cleared(view) or Wait()
    if requested > view.status.capacity and view.volume.has(Stage.EXPANSION):
        return _begun(view, Stage.EXPANSION, now, requested)
    is_bound = (view.claim.get("status") or {}).get("phase") == "Bound"
    if view.status.capacity > shown or (is_bound and view.status.capacity > told):
        return Grow(view.status.capacity)
    return _cleared(view) or Wait()


def _grown(view: View, answer: Answer) -> int:
    requests = ((view.claim or {}).get("spec") or {}).get("resources", {}).get("requests", {})
    return max(answer.capacity or size(requests.get("storage", view.status.capacity)), view.status.capacity)


# Nodes of volumes --------------------------------------------------------------------------------------------------


def _staged(view: View) -> Step | None:
    """Return what lets mount pods come where one is wanted; not elsewhere, while the volume is to be unstaged."""
    status = view.status
    if not view.volume.has(Stage.UNSTAGING) or status.phase is not Phase.CREATED:
        return None
    if status.unstaging in view.nodes and not (status.run and status.run.stage is Stage.UNSTAGING):
        return SetStatus(_without_failures(status)._replace(unstaging=""))
    if view.nodes > set(status.staged):
        return SetStatus(status._replace(staged=tuple(sorted(view.nodes))))
    return None


def _unstaging(view: View, now: datetime.datetime) -> Step | None:
    """Return what brings a node nearer to where nothing is left of the volume; None, if there is no such node.

    That one begins is written before it does, and then looked at once more: a mount pod that was created meanwhile was
    preceded by its MountPodAttachment, and none is created from then on (`pod_volumes.may_stage`).
    """
    status = view.status
    if status.unstaging:
        if ABANDON in view.volume.annotations:
            text = f"somebody has taken it as unstaged on {status.unstaging} (annotation abandon)"
            return SetStatus(_unstaged(status), Event(ABANDONED, text))
        if status.unstaging in view.gone:
            return _without_node(view)
        return _begun(view, Stage.UNSTAGING, now)
    left = sorted(set(status.staged) - view.nodes)
    return SetStatus(status._replace(unstaging=left[0])) if left else None


def _without_node(view: View) -> Step:
    text = f"there is no node {view.status.unstaging} any more, so no pod unstages the volume there"
    return SetStatus(_unstaged(view.status), Event(NODE_GONE, text))


def _unstaged(status: Status) -> Status:
    staged = tuple(node for node in status.staged if node != status.unstaging)
    return _without_failures(status)._replace(run=None, staged=staged, unstaging="")


def _without_failures(status: Status) -> Status:
    """Return the status in which nothing is said of an unstaging that has failed."""
    if Stage.UNSTAGING not in status.failures:
        return status
    failures = dict(status.failures)
    del failures[Stage.UNSTAGING]
    return status._replace(failures=failures, message="")


# Volumes that are to end -------------------------------------------------------------------------------------------


def _deleting(view: View, now: datetime.datetime) -> Step:
    existing = view.persistent_volume
    policy = ((existing or {}).get("spec") or {}).get("persistentVolumeReclaimPolicy", view.status.reclaim_policy)
    if policy == "Retain":
        return SetStatus(view.status._replace(phase=Phase.CREATED, reclaim_policy="Retain"))
    if not view.status.may_exist:
        return SetStatus(view.status._replace(phase=Phase.DELETED))
    if ABANDON in view.volume.annotations:
        return _abandoned(view, Phase.DELETED)
    return _begun(view, Stage.DELETION, now)


def _deleted(view: View) -> Step:
    existing = view.persistent_volume
    if existing is None:
        return _cleared(view) or Finish()
    if not existing["metadata"].get("deletionTimestamp"):
        return DeletePersistentVolume()
    return ReleasePersistentVolume() if FINALIZER in (existing["metadata"].get("finalizers") or []) else Wait()


def _cleared(view: View) -> Step | None:
    """Return what takes the next pod away that has ended; None, if there is none."""
    pod = next(iter(view.pods), None)
    if pod is None:
        return None
    return Wait() if pod.is_ending else DeleteRun(pod)
