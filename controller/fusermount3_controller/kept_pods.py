"""What the cache keeps of a pod: a cluster has many, and most have nothing to do with our volumes. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from fusermount3_controller import mount_pods, pod_volumes
from fusermount3_controller.pod_rules import CONTAINER
from fusermount3_controller.served_volumes import is_inline

#: The kinds whose pods are ours.
_OWNERS = (mount_pods.ATTACHMENT, pod_volumes.KIND)


def kept(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the fields of the pod that count; None, if it is no pod of ours and has no volume that could be."""
    metadata, spec, status = (pod.get(name) or {} for name in ("metadata", "spec", "status"))
    owners = [each for each in metadata.get("ownerReferences") or [] if each.get("kind") in _OWNERS]
    volumes = [_volume(each) for each in spec.get("volumes") or []]
    if not owners and not any(len(each) > 1 and "emptyDir" not in each for each in volumes):
        return None
    of_metadata = _some(metadata, ("name", "namespace", "uid", "creationTimestamp", "deletionTimestamp"))
    of_spec = _some(spec, ("nodeName", "hostUsers", "serviceAccountName"))
    of_status = _some(status, ("phase", "reason", "message"))
    if context := _some(spec.get("securityContext"), ("fsGroup",)):
        of_spec["securityContext"] = context
    of_spec["volumes"] = [each for each in volumes if len(each) > 1]
    conditions = ("PodScheduled", "Ready") if owners else ("PodScheduled",)
    of_status["conditions"] = [
        _some(each, ("type", "status", "reason", "message", "lastTransitionTime"))
        for each in status.get("conditions") or []
        if each.get("type") in conditions
    ]
    if owners:
        of_metadata["ownerReferences"] = [_some(each, ("kind", "name", "uid", "controller")) for each in owners]
        is_run = any(each["kind"] == pod_volumes.KIND for each in owners)
        if is_run:
            of_metadata |= _some(metadata, ("labels",))
            of_spec |= _some(spec, ("schedulingGates",))
        statuses = status.get("containerStatuses") or []
        of_status["containerStatuses"] = [
            _some(each, ("name", "state", "lastState")) for each in statuses if is_run or each.get("name") == CONTAINER
        ]
    return {"metadata": of_metadata, "spec": of_spec, "status": of_status}


def _volume(volume: Mapping[str, Any]) -> dict[str, Any]:
    """Return the volume, with its name only if it is of a kind that does not count."""
    result = {"name": volume.get("name")}
    if volume.get("emptyDir") is not None:
        result["emptyDir"] = {}
    elif is_inline(volume):
        result["csi"] = _some(volume["csi"], ("driver", "readOnly", "volumeAttributes"))
    elif source := volume.get("persistentVolumeClaim"):
        result["persistentVolumeClaim"] = _some(source, ("claimName", "readOnly"))
    elif volume.get("ephemeral") is not None:
        template = volume["ephemeral"].get("volumeClaimTemplate") or {}
        spec = _some(template.get("spec"), ("volumeName", "storageClassName"))
        result["ephemeral"] = {"volumeClaimTemplate": {"spec": spec}}
    return result


def _some(value: Mapping[str, Any] | None, names: Iterable[str]) -> dict[str, Any]:
    return {name: value[name] for name in names if value.get(name) is not None} if value else {}
