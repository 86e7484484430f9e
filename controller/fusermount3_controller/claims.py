"""Claims for which a volume is to be created, and the PodVolumes that they get. Pure.

Kubernetes says of a claim who is to provide its volume, in an annotation, and on which node, if that matters
(pkg/controller/volume/persistentvolume). What a claim asks for is checked here, as far as it takes no pod.
"""

from collections.abc import Mapping
from typing import Any

from fusermount3_controller import pod_volumes, quantities, volume_templates
from fusermount3_controller.expressions import ExpressionError, check_size
from fusermount3_controller.faults import Fault, Invalid, quoted
from fusermount3_controller.provisioning_fields import Mode, Provisioning, block_faults, capacity_faults
from fusermount3_controller.rendering import DRIVER, TEMPLATE_LABEL, Manifest
from fusermount3_controller.served_volumes import Known
from fusermount3_controller.template_parameters import DRIVER_ATTRIBUTES, MOUNT_OPTIONS, TEMPLATE_ATTRIBUTE
from fusermount3_controller.volume_templates import VolumeTemplate

#: Annotations that Kubernetes writes into a claim: who provides its volume, and for which node.
PROVISIONERS = ("volume.kubernetes.io/storage-provisioner", "volume.beta.kubernetes.io/storage-provisioner")
SELECTED_NODE = "volume.kubernetes.io/selected-node"
ANNOTATIONS = (*PROVISIONERS, SELECTED_NODE)
#: What a class says of volumes beside its parameters, and what an expression can use of it.
CLASS_FIELDS = ("provisioner", "parameters", "reclaimPolicy", "mountOptions", "allowedTopologies", "volumeBindingMode")


def is_ours(claim: Mapping[str, Any]) -> bool:
    """Return whether Kubernetes says that the claim's volume is ours to provide, and it has none."""
    metadata = claim.get("metadata") or {}
    annotations = metadata.get("annotations") or {}
    provisioner = next((annotations[name] for name in PROVISIONERS if name in annotations), None)
    has_volume = bool((claim.get("spec") or {}).get("volumeName"))
    return provisioner == DRIVER and not has_volume and not metadata.get("deletionTimestamp")


def name_of(claim: Mapping[str, Any]) -> str:
    """Return the name of its PodVolume and PersistentVolume: as those of other provisioners."""
    return f"pvc-{claim['metadata']['uid']}"


def is_due(claim: Mapping[str, Any], storage_class: Mapping[str, Any]) -> bool:
    """Return whether the volume can be created now: some wait until a pod that uses it is to be on a node."""
    annotations = claim["metadata"].get("annotations") or {}
    return storage_class.get("volumeBindingMode") != "WaitForFirstConsumer" or SELECTED_NODE in annotations


def pod_volume(claim: Mapping[str, Any], storage_class: Mapping[str, Any], known: Known) -> Manifest:
    """Return the PodVolume for a claim of ours. Raises Invalid, if there can't be such a volume."""
    metadata, spec = claim["metadata"], claim.get("spec") or {}
    name = str(spec.get("storageClassName"))
    given = storage_class.get("parameters") or {}
    attributes = {key: value for key, value in given.items() if "/" not in key}
    template = _template(attributes.get(TEMPLATE_ATTRIBUTE), name, known)
    field = f"StorageClass {name}: parameters"
    parameters = {key: each for key, each in attributes.items() if key not in {*DRIVER_ATTRIBUTES, TEMPLATE_ATTRIBUTE}}
    requested = _requested(spec)
    _check(spec, requested, template.provisioning, storage_class)
    variables = {"pvc": _seen(claim), "sc": {"metadata": {"name": name}, **_some(storage_class, *CLASS_FIELDS)}}
    try:
        for key, value in variables.items():
            check_size(key, value)
    except ExpressionError as error:
        raise Invalid([Fault("", str(error))]) from None
    provisioning = template.provisioning
    stages: Manifest = {str(stage): {"podTemplate": pod} for stage, pod in provisioning.pods.items()}
    creation = {"handle": provisioning.handle, "capacity": provisioning.capacity}
    stages["volumeCreation"] = {**stages.get("volumeCreation", {}), **{k: v for k, v in creation.items() if v}}
    return {
        "apiVersion": volume_templates.API_VERSION,
        "kind": pod_volumes.KIND,
        "metadata": {
            "name": name_of(claim),
            "labels": {TEMPLATE_LABEL: template.name},
            "finalizers": [pod_volumes.FINALIZER],
        },
        "spec": {
            "volumeTemplate": template.name,
            "templateGeneration": template.generation,
            "parameters": volume_templates.values(template, parameters, field),
            "attributes": attributes,
            "claim": {key: metadata[key] for key in ("namespace", "name", "uid")},
            "storageClassName": name,
            "reclaimPolicy": storage_class.get("reclaimPolicy") or "Delete",
            "mountOptions": list(storage_class.get("mountOptions") or []),
            "allowedTopologies": list(storage_class.get("allowedTopologies") or []),
            "nodeName": (metadata.get("annotations") or {}).get(SELECTED_NODE, ""),
            "accessModes": list(spec.get("accessModes") or []),
            "volumeMode": spec.get("volumeMode") or "Filesystem",
            "requested": requested,
            "stages": stages,
            "variables": variables,
        },
    }


def _template(name: object, storage_class: str, known: Known) -> VolumeTemplate:
    field = f"StorageClass {storage_class}: parameters.{TEMPLATE_ATTRIBUTE}"
    if not isinstance(name, str):
        raise Invalid([Fault(field, "is missing: it names the VolumeTemplate")])
    if name in known.unusable:
        raise Invalid([Fault(field, f"the VolumeTemplate '{name}' can't be used: {known.unusable[name]}")])
    template = known.templates.get(name)
    if template is None:
        raise Invalid([Fault(field, f"there is no VolumeTemplate {quoted(name)}")])
    if template.is_ending:
        raise Invalid([Fault(field, f"the VolumeTemplate '{name}' is being deleted")])
    if Mode.DYNAMIC not in template.provisioning.modes:
        why = f"the VolumeTemplate '{name}' creates no volumes: its provisioningModes have no Dynamic"
        raise Invalid([Fault(field, why)])
    return template


def _requested(spec: Mapping[str, Any]) -> dict[str, int]:
    resources = spec.get("resources") or {}
    try:
        least = quantities.size((resources.get("requests") or {}).get("storage"))
        most = (resources.get("limits") or {}).get("storage")
        return {"minCapacity": least, **({} if most is None else {"maxCapacity": quantities.size(most)})}
    except ValueError as error:
        raise Invalid([Fault("spec.resources", str(error))]) from None


def _check(
    spec: Mapping[str, Any], requested: Mapping[str, int], allowed: Provisioning, storage_class: Mapping[str, Any]
) -> None:
    """Check what the claim asks for, of a volume of this class. Raises Invalid."""
    faults = []
    if spec.get("selector"):
        faults.append(Fault("spec.selector", "chooses among volumes that exist; leave it out, to have one created"))
    for field in ("dataSource", "dataSourceRef"):
        if spec.get(field):
            faults.append(Fault(f"spec.{field}", "a template creates only empty volumes"))
    mode = spec.get("volumeMode") or "Filesystem"
    if mode not in allowed.volume_modes:
        faults.append(Fault("spec.volumeMode", f"must be {' or '.join(allowed.volume_modes)}, not {mode}"))
    options = (storage_class.get("mountOptions"), (storage_class.get("parameters") or {}).get(MOUNT_OPTIONS))
    faults += block_faults(f"StorageClass {spec.get('storageClassName')}: mountOptions", mode, options)
    for each in spec.get("accessModes") or []:
        if each not in allowed.access_modes:
            faults.append(Fault("spec.accessModes", f"must be of {', '.join(allowed.access_modes)}, not {each}"))
    least, most = requested["minCapacity"], requested.get("maxCapacity")
    faults += capacity_faults("spec.resources.requests.storage", least, allowed)
    if most is not None and most < least:
        faults.append(Fault("spec.resources.limits.storage", "is less than requests.storage"))
    if faults:
        raise Invalid(faults)


def _seen(claim: Mapping[str, Any]) -> Manifest:
    """Return what an expression can use of a claim."""
    metadata = _some(claim["metadata"], "namespace", "name", "uid", "labels", "annotations")
    last = "kubectl.kubernetes.io/last-applied-configuration"
    if "annotations" in metadata:
        metadata["annotations"] = {name: each for name, each in metadata["annotations"].items() if name != last}
    return {"metadata": metadata, "spec": dict(claim.get("spec") or {})}


def _some(value: Mapping[str, Any], *names: str) -> Manifest:
    return {name: value[name] for name in names if value.get(name) is not None}
