"""PodVolumes: one for each volume that is created for a claim, from before anything of it exists until all is gone.

Whatever is needed to delete the volume is in its PodVolume from the beginning, so claim, StorageClass and template may
go in any order. All of it is the controller's: nothing that users can write is read again. Pure.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from fusermount3_controller import quantities, rendering, volume_templates
from fusermount3_controller.expressions import Variable, render
from fusermount3_controller.faults import Fault, Invalid
from fusermount3_controller.rendering import DRIVER, TEMPLATE_LABEL, Manifest
from fusermount3_controller.template_expressions import Stage

#: The kind, and its name in paths.
KIND, PLURAL = "PodVolume", "podvolumes"
#: Of a PodVolume, and of its PersistentVolume: until the volume is deleted, or is to be kept.
FINALIZER = "fusermount3-proxy.dev/delete-volume"
#: Annotations of a PodVolume, for people: try at once; and take the volume as deleted.
RETRY, ABANDON = "fusermount3-proxy.dev/retry", "fusermount3-proxy.dev/abandon"
#: Keeps a pod from being scheduled until its PodVolume says that it may have run.
GATE = "fusermount3-proxy.dev/recorded"
#: Of a pod: the PodVolume's name, and the stage.
VOLUME_LABEL, STAGE_LABEL = "fusermount3-proxy.dev/pod-volume", "fusermount3-proxy.dev/stage"
#: Annotation of a PersistentVolume: its PodVolume names a node before a mount pod is created there.
STAGING_RECORDED = "fusermount3-proxy.dev/staging-recorded"
#: Tells who has made a PersistentVolume (pkg/controller/volume/persistentvolume of Kubernetes).
PROVISIONED_BY = "pv.kubernetes.io/provisioned-by"


class Phase(StrEnum):
    """How far a volume has come. `UNDOING`: what a failed creation has left is being deleted."""

    PENDING = "Pending"
    CREATING = "Creating"
    UNDOING = "Undoing"
    CREATED = "Created"
    DELETING = "Deleting"
    DELETED = "Deleted"


class Run(NamedTuple):
    """A pod of a stage that may run, or has: it is known by its UID."""

    stage: Stage
    name: str
    uid: str


class Failures(NamedTuple):
    """How often in a row a stage has failed, and from when on it is tried again, RFC 3339."""

    number: int = 0
    retry_after: str = ""


class Status(NamedTuple):
    """What has happened. `runs`: pods so far, whose names are numbered; `run`: the one whose result is not known.

    `may_exist`: a pod that creates the volume may have run, and none has deleted it since. `capacity` is in bytes.
    `persistent_volume`: its name, once it was there; `reclaim_policy`: what it said last. `staged`: nodes where a mount
    pod may have served the volume, and no pod has unstaged it since; `unstaging`: the one of them where a pod is to.
    """

    phase: Phase = Phase.PENDING
    message: str = ""
    run: Run | None = None
    runs: int = 0
    failures: Mapping[Stage, Failures] = {}
    validated: bool = False
    may_exist: bool = False
    handle: str = ""
    capacity: int = 0
    node_affinity: Mapping[str, Any] = {}
    persistent_volume: str = ""
    reclaim_policy: str = ""
    staged: tuple[str, ...] = ()
    unstaging: str = ""


class PodVolume(NamedTuple):
    """A PodVolume as it is; `spec` is as it was created."""

    name: str
    uid: str
    version: str
    spec: Mapping[str, Any]
    status: Status = Status()
    annotations: frozenset[str] = frozenset()
    is_ending: bool = False

    @property
    def claim(self) -> Mapping[str, Any]:
        return self.spec.get("claim") or {}

    @property
    def requested(self) -> Mapping[str, Any]:
        return self.spec.get("requested") or {}

    @property
    def is_retained(self) -> bool:
        """Whether no pod may delete the volume."""
        return (self.status.reclaim_policy or self.spec.get("reclaimPolicy")) != "Delete"

    def has(self, stage: Stage) -> bool:
        return bool(self._stage(stage).get("podTemplate"))

    def _stage(self, stage: Stage) -> Mapping[str, Any]:
        return (self.spec.get("stages") or {}).get(stage) or {}


# As Kubernetes has them --------------------------------------------------------------------------------------------


def parse(manifest: Mapping[str, Any]) -> PodVolume:
    """Return what a PodVolume is that the API server has checked."""
    metadata, status = manifest["metadata"], manifest.get("status") or {}
    run = status.get("run")
    failures = status.get("failures") or {}
    return PodVolume(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        version=metadata.get("resourceVersion", ""),
        spec=manifest.get("spec") or {},
        status=Status(
            phase=Phase(status.get("phase", Phase.PENDING)),
            message=status.get("message", ""),
            run=Run(Stage(run["stage"]), run["name"], run["uid"]) if run else None,
            runs=status.get("runs", 0),
            failures={
                Stage(name): Failures(each.get("count", 0), each.get("retryAfter", ""))
                for name, each in failures.items()
            },
            validated=status.get("validated", False),
            may_exist=status.get("mayExist", False),
            handle=status.get("handle", ""),
            capacity=int(status.get("capacity", "0")),
            node_affinity=status.get("nodeAffinity") or {},
            persistent_volume=status.get("persistentVolumeName", ""),
            reclaim_policy=status.get("reclaimPolicy", ""),
            staged=tuple(status.get("stagedNodes") or ()),
            unstaging=status.get("unstagingNode", ""),
        ),
        annotations=frozenset(metadata.get("annotations") or {}) & {RETRY, ABANDON},
        is_ending=bool(metadata.get("deletionTimestamp")),
    )


def status_manifest(status: Status) -> Manifest:
    """Return the status for a merge patch: what there is not is null."""
    failures = {
        str(stage): {"count": each.number, "retryAfter": each.retry_after or None}
        for stage, each in status.failures.items()
        if each.number
    }
    return {
        "phase": str(status.phase),
        "message": status.message or None,
        "run": {"stage": str(status.run.stage), "name": status.run.name, "uid": status.run.uid} if status.run else None,
        "runs": status.runs,
        "failures": {**dict.fromkeys(map(str, Stage)), **failures},
        "validated": status.validated or None,
        "mayExist": status.may_exist or None,
        "handle": status.handle or None,
        "capacity": str(status.capacity) if status.capacity else None,
        "nodeAffinity": dict(status.node_affinity) or None,
        "persistentVolumeName": status.persistent_volume or None,
        "reclaimPolicy": status.reclaim_policy or None,
        "stagedNodes": list(status.staged) or None,
        "unstagingNode": status.unstaging or None,
    }


def is_provisioned(persistent_volume: Mapping[str, Any]) -> bool:
    """Return whether the PersistentVolume is one of those that `persistent_volume` returns."""
    annotations = (persistent_volume.get("metadata") or {}).get("annotations") or {}
    return annotations.get(PROVISIONED_BY) == DRIVER


def is_staging_recorded(persistent_volume: Mapping[str, Any]) -> bool:
    """Return whether `may_stage` says when a mount pod may be created."""
    annotations = (persistent_volume.get("metadata") or {}).get("annotations") or {}
    return is_provisioned(persistent_volume) and STAGING_RECORDED in annotations


def may_stage(volume: PodVolume, node: str) -> bool:
    """Return whether a mount pod may be created on the node, as the PodVolume says after its MountPodAttachment is."""
    return not volume.has(Stage.UNSTAGING) or (node in volume.status.staged and node != volume.status.unstaging)


# Pods of stages ----------------------------------------------------------------------------------------------------


def handle(volume: PodVolume) -> str:
    """Return the volume's handle, or that of what a pod may have created that gave no answer. Raises Invalid."""
    if volume.status.handle:
        return volume.status.handle
    text = volume._stage(Stage.CREATION).get("handle") or volume.name
    return str(_rendered(volume, Stage.CREATION, "handle", text))


def capacity(volume: PodVolume) -> int:
    """Return the capacity of the volume unless the pod that creates it says another one, in bytes. Raises Invalid."""
    text = volume._stage(Stage.CREATION).get("capacity")
    if not text:
        return int(volume.requested["minCapacity"])
    try:
        return quantities.size(_rendered(volume, Stage.CREATION, "capacity", text))
    except ValueError as error:
        raise Invalid([Fault(f"spec.{Stage.CREATION}.capacity", str(error))]) from None


def _rendered(volume: PodVolume, stage: Stage, field: str, text: str) -> object:
    try:
        return render(text, variables(volume, stage), volume.spec.get("parameters") or {})
    except ValueError as error:
        raise Invalid([Fault(f"spec.{stage}.{field}", str(error))]) from None


def variables(volume: PodVolume, stage: Stage, requested: int | None = None) -> dict[str, Variable]:
    """Return the variables of a stage; `requested`: the capacity to which the volume is to grow, in bytes."""
    spec, status = volume.spec, volume.status
    if stage is Stage.UNSTAGING:
        return {**rendering.staged(persistent_volume(volume), status.unstaging), "readOnly": False}
    given = spec.get("variables") or {}
    node = spec.get("nodeName")
    result: dict[str, Variable] = {
        "defaultHandle": volume.name,
        "node": {"metadata": {"name": node}} if node else None,
        "pv": None,
        "pvc": escaped(given.get("pvc")),
        "requestedAccessModes": spec.get("accessModes"),
        "requestedMaxCapacity": volume.requested.get("maxCapacity"),
        "requestedMinCapacity": requested or volume.requested["minCapacity"],
        "requestedVolumeMode": spec.get("volumeMode"),
        "sc": given.get("sc"),
    }
    if stage is Stage.VALIDATION:
        return {**result, "handle": None}
    if stage is Stage.CREATION:
        return result
    return {
        **result,
        "accessModes": spec.get("accessModes"),
        "capacity": status.capacity or None,
        "handle": handle(volume),
        "volumeMode": spec.get("volumeMode"),
    }


def escaped(value: Any) -> Any:
    """Return a copy in which kubelet finds no $(VARIABLE) to replace (core/v1, Container.args)."""
    if isinstance(value, str):
        return value.replace("$", "$$")
    if isinstance(value, Mapping):
        return {name: escaped(each) for name, each in value.items()}
    return [escaped(each) for each in value] if isinstance(value, list) else value


def run_name(volume: PodVolume, number: int) -> str:
    return f"{volume.name}-{number}"


def run_pod(volume: PodVolume, stage: Stage, number: int, namespace: str, requested: int | None = None) -> Manifest:
    """Return the pod of a stage, which does not run before its gate is taken away. Raises Invalid."""
    template = str(volume.spec.get("volumeTemplate"))
    given = volume._stage(stage)["podTemplate"]
    parameters = volume.spec.get("parameters") or {}
    pod = rendering.run(template, given, variables(volume, stage, requested), parameters)
    terms = _terms(volume.spec.get("allowedTopologies") or [])
    if terms and stage is Stage.CREATION:
        pod["spec"]["affinity"] = _required(terms)
    if stage is Stage.UNSTAGING:
        pod["spec"] = rendering.on_node(pod["spec"], volume.status.unstaging)
    metadata = pod["metadata"]
    return {
        **pod,
        "metadata": {
            **metadata,
            "name": run_name(volume, number),
            "namespace": namespace,
            "labels": {
                **metadata["labels"],
                TEMPLATE_LABEL: template,
                VOLUME_LABEL: volume.name,
                STAGE_LABEL: str(stage),
            },
            "ownerReferences": [
                {
                    "apiVersion": volume_templates.API_VERSION,
                    "kind": KIND,
                    "name": volume.name,
                    "uid": volume.uid,
                    "controller": True,
                }
            ],
        },
        "spec": {**pod["spec"], "schedulingGates": [{"name": GATE}]},
    }


# PersistentVolumes -------------------------------------------------------------------------------------------------


def persistent_volume(volume: PodVolume) -> Manifest:
    """Return the PersistentVolume of a volume that exists, for its claim alone."""
    spec, status, claim = volume.spec, volume.status, volume.claim
    affinity = status.node_affinity
    if not affinity and (terms := _terms(spec.get("allowedTopologies") or [])):
        affinity = {"required": {"nodeSelectorTerms": terms}}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {
            "name": volume.name,
            "labels": {TEMPLATE_LABEL: str(spec.get("volumeTemplate"))},
            "annotations": {
                PROVISIONED_BY: DRIVER,
                **({STAGING_RECORDED: "true"} if volume.has(Stage.UNSTAGING) else {}),
            },
            "finalizers": [FINALIZER],
        },
        "spec": {
            "accessModes": list(spec.get("accessModes") or []),
            "capacity": {"storage": str(status.capacity)},
            "claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim", **claim},
            "csi": {
                "driver": DRIVER,
                "volumeHandle": status.handle,
                "volumeAttributes": dict(spec.get("attributes") or {}),
            },
            **({"mountOptions": list(options)} if (options := spec.get("mountOptions")) else {}),
            **({"nodeAffinity": dict(affinity)} if affinity else {}),
            "persistentVolumeReclaimPolicy": spec.get("reclaimPolicy"),
            "storageClassName": spec.get("storageClassName"),
            "volumeMode": spec.get("volumeMode"),
        },
    }


def _terms(topologies: list[Mapping[str, Any]]) -> list[Manifest]:
    """Return the node selector terms that say the same as `allowedTopologies` of a StorageClass."""
    return [
        {
            "matchExpressions": [
                {"key": each["key"], "operator": "In", "values": list(each["values"])}
                for each in term.get("matchLabelExpressions") or []
            ]
        }
        for term in topologies
    ]


def _required(terms: list[Manifest]) -> Manifest:
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
