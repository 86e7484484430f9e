"""What the annotations of a pod say about its sidecars, and what is written there. Pure.

The names of resources, and what follows if one of a pair is missing, are those of GKE's gcs-fuse-csi-driver.
"""

import posixpath
from collections.abc import Mapping
from typing import Any

from fusermount3_controller.faults import Fault, Invalid, quoted
from fusermount3_controller.quantities import quantity
from fusermount3_controller.rendering import DEFAULT_REQUESTS, Manifest

_PREFIX = "fusermount3-proxy.dev/"
#: "true": the pod must not start without a sidecar; "false": none is injected. Else volumes decide.
INJECT = f"{_PREFIX}inject"
#: `VOLUME:/PATH`, separated by commas: volumes of the pod that its sidecars get, too, read-only.
ADDITIONAL_MOUNTS = f"{_PREFIX}additional-volume-mounts"
#: What the pod's author said, where it was too short.
ORIGINAL_GRACE = f"{_PREFIX}original-termination-grace-period-seconds"
#: The resource of each pair of annotations, `…-limit` and `…-request`.
RESOURCES = ("cpu", "memory", "ephemeral-storage")

#: Of a pod that says nothing (core/v1, PodSpec).
_DEFAULT_GRACE = 30


def wish(pod: Mapping[str, Any]) -> bool | None:
    """Return what `INJECT` says; None if it isn't there. Raises Invalid."""
    value = _annotations(pod).get(INJECT)
    if value not in (None, "true", "false"):
        raise Invalid([Fault(INJECT, f"must be 'true' or 'false', not {quoted(value)}")])
    return None if value is None else value == "true"


def apply(pod: Mapping[str, Any], container: Manifest) -> None:
    """Give a sidecar the resources and the additional volumes that the pod's annotations name. Raises Invalid."""
    annotations = _annotations(pod)
    resources = _copied(container.get("resources") or {})
    for name in RESOURCES:
        _apply_resource(annotations, name, resources)
    container["resources"] = {kind: values for kind, values in resources.items() if values}
    names = {volume.get("name") for volume in pod["spec"].get("volumes") or []}
    if text := annotations.get(ADDITIONAL_MOUNTS):
        mounts = container["volumeMounts"]
        paths = {mount["mountPath"] for mount in mounts}
        container["volumeMounts"] = [*mounts, *_additional_mounts(text, names, paths)]


def raise_grace(pod: Manifest, least: int) -> None:
    """Give the pod at least these seconds to end, and note what it had."""
    seconds = pod["spec"].get("terminationGracePeriodSeconds")
    seconds = _DEFAULT_GRACE if seconds is None else seconds
    if seconds >= least:
        return
    pod["spec"]["terminationGracePeriodSeconds"] = least
    metadata = pod.setdefault("metadata", {})
    metadata["annotations"] = {ORIGINAL_GRACE: str(seconds), **_annotations(pod)}


def _copied(resources: Mapping[str, Any]) -> Manifest:
    """Return a copy with both `requests` and `limits`."""
    return {**resources, **{kind: dict(resources.get(kind) or {}) for kind in ("requests", "limits")}}


def _apply_resource(annotations: Mapping[str, str], name: str, resources: Manifest) -> None:
    """One alone counts for both; a limit of 0 is none, and leaves the request that there is."""
    given = {kind: annotations.get(f"{_PREFIX}{name}-{kind}") for kind in ("limit", "request")}
    faults, numbers = [], {}
    for kind, value in given.items():
        if value is None:
            continue
        try:
            numbers[kind] = quantity(value)
        except ValueError as error:
            faults.append(Fault(f"{_PREFIX}{name}-{kind}", str(error)))
    if faults:
        raise Invalid(faults)
    if not numbers:
        return
    limit, request = given["limit"] or given["request"], given["request"] or given["limit"]
    assert limit is not None and request is not None
    requests, limits = resources["requests"], resources["limits"]
    if numbers.get("limit", numbers.get("request")) == 0:
        limits.pop(name, None)
        if "request" not in numbers:
            request = requests.get(name, DEFAULT_REQUESTS.get(name, "0"))
    elif quantity(request) > quantity(limit):
        why = f"is more than the limit, {limit}"
        raise Invalid([Fault(f"{_PREFIX}{name}-request", why)])
    else:
        limits[name] = limit
    requests.pop(name, None)
    if quantity(str(request)) > 0:
        requests[name] = request


def _additional_mounts(text: str, volumes: set[Any], taken: set[str]) -> list[Manifest]:
    result = []
    for part in text.split(","):
        volume, _, path = part.strip().partition(":")
        path = posixpath.normpath(path) if path.startswith("/") else path
        if not path.startswith("/"):
            raise Invalid([Fault(ADDITIONAL_MOUNTS, f"must be VOLUME:/PATH, separated by commas, not {quoted(part)}")])
        if volume not in volumes:
            raise Invalid([Fault(ADDITIONAL_MOUNTS, f"the pod has no volume {quoted(volume)}")])
        if path in taken:
            raise Invalid([Fault(ADDITIONAL_MOUNTS, f"the sidecar has another volume at {quoted(path)}")])
        taken = {*taken, path}
        result.append({"name": volume, "mountPath": path, "readOnly": True})
    return result


def _annotations(pod: Mapping[str, Any]) -> Mapping[str, str]:
    return (pod.get("metadata") or {}).get("annotations") or {}
