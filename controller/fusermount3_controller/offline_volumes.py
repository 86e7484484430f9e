"""The pods that create, expand, unstage and delete a volume, for a claim that is made up to show a template. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from fusermount3_controller import claims, pod_volumes
from fusermount3_controller.provisioning_fields import Mode
from fusermount3_controller.rendering import DRIVER, SHARED_NAMESPACE, Manifest
from fusermount3_controller.served_volumes import Known
from fusermount3_controller.template_expressions import Stage
from fusermount3_controller.template_parameters import TEMPLATE_ATTRIBUTE
from fusermount3_controller.volume_templates import VolumeTemplate

#: The order in which they run.
_STAGES = (Stage.VALIDATION, Stage.CREATION, Stage.EXPANSION, Stage.UNSTAGING, Stage.DELETION)
_UID = "00000000-0000-0000-0000-000000000000"
_GIBIBYTE = 1 << 30


def runs(template: VolumeTemplate, attributes: Mapping[str, str], known: Known) -> Iterator[Manifest]:
    """Yield the pods for a volume of the template with these parameters. Raises Invalid."""
    if Mode.DYNAMIC not in template.provisioning.modes:
        return
    storage_class = {"provisioner": DRIVER, "parameters": {TEMPLATE_ATTRIBUTE: template.name, **attributes}}
    capacity = template.provisioning.min_capacity or min(_GIBIBYTE, template.provisioning.max_capacity or _GIBIBYTE)
    manifest = claims.pod_volume(_claim(template, capacity), storage_class, known)
    volume = pod_volumes.parse(manifest)
    created = volume.status._replace(handle=pod_volumes.handle(volume), capacity=pod_volumes.capacity(volume))
    for stage in _STAGES:
        if volume.has(stage):
            of_stage = volume if stage in (Stage.VALIDATION, Stage.CREATION) else volume._replace(status=created)
            yield _shown(pod_volumes.run_pod(of_stage, stage, 0, SHARED_NAMESPACE, 2 * capacity), stage)


def _shown(pod: Manifest, stage: Stage) -> Manifest:
    """Return the pod as one that can be tried by hand: nobody has to let it run, and it belongs to nothing."""
    metadata: dict[str, Any] = {name: each for name, each in pod["metadata"].items() if name != "ownerReferences"}
    spec = {name: each for name, each in pod["spec"].items() if name != "schedulingGates"}
    return {**pod, "metadata": {**metadata, "name": f"{stage.lower()}-{pod['metadata']['name']}"}, "spec": spec}


def _claim(template: VolumeTemplate, capacity: int) -> Manifest:
    spec = {
        "storageClassName": template.name,
        "accessModes": list(template.provisioning.access_modes[:1]),
        "volumeMode": template.provisioning.volume_modes[0],
        "resources": {"requests": {"storage": str(capacity)}},
    }
    return {"metadata": {"name": template.name, "namespace": "default", "uid": _UID}, "spec": spec}
