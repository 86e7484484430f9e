"""What a pod becomes whose volumes name templates with the placement `Sidecar`. Pure.

The result is a copy in which nothing else is different: it is made of the objects as they came, not of typed ones, so
fields that the API gets later survive. What is injected already, by us or by hand, stays as it is, so the result of the
result is the same.
"""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from fusermount3_controller import pod_annotations, rendering
from fusermount3_controller.faults import Fault, Invalid
from fusermount3_controller.rendering import Manifest, Use
from fusermount3_controller.served_volumes import Known, is_inline, uses
from fusermount3_controller.template_parameters import DRIVER_ATTRIBUTES
from fusermount3_controller.volume_templates import Placement

#: A native sidecar after which ours begins: a program's connections go through it.
_BEFORE_OURS = "istio-proxy"


def inject(pod: Mapping[str, Any], known: Known) -> Manifest:
    """Return the pod with a sidecar for each of its volumes that name a template for one.

    Raises Invalid, also if the pod asks for injection (`pod_annotations`) and none of its volumes does.
    """
    wish = pod_annotations.wish(pod)
    result = copy.deepcopy(dict(pod))
    if wish is False:
        return result
    named = uses(pod, known)
    spec = result.get("spec") or {}
    # kubelet publishes no other volumes: a program would wait for its socket, and the pod for the program.
    used = {mount.get("name") for container in _containers(spec) for mount in _uses_of_volumes(container)}
    wanted = [use for use in named if use.template.placement is Placement.SIDECAR and use.volume in used]
    present = {container.get("name") for container in spec.get("initContainers") or []}
    injected = [volume["name"] for volume in spec.get("volumes") or [] if _is_injected(volume, wanted, present)]
    missing = [use for use in wanted if use.container not in present and not _is_served(use, spec)]
    if wish and not named and not injected:
        raise Invalid([Fault(pod_annotations.INJECT, "none of the pod's volumes names a template")])
    _check_directories(missing)
    if missing:
        _add(missing, result)
    for volume in (*injected, *(use.volume for use in missing)):
        _propagate(volume, spec)
    return result


def _is_injected(volume: Manifest, wanted: list[Use], present: set[Any]) -> bool:
    """Return whether the volume has our sidecar. An inline volume names no template any more then."""
    name = volume.get("name")
    is_ours = is_inline(volume) or any(use.volume == name for use in wanted)
    return is_ours and rendering.container_name(str(name)) in present


def _containers(spec: Manifest) -> Iterator[Manifest]:
    yield from (*(spec.get("initContainers") or []), *(spec.get("containers") or []))


def _uses_of_volumes(container: Manifest) -> list[Manifest]:
    return [*(container.get("volumeMounts") or []), *(container.get("volumeDevices") or [])]


def _is_served(use: Use, spec: Manifest) -> bool:
    """Return whether a container of the pod's author has the socket of this volume."""
    return any(
        mount.get("name") == use.directory
        for container in _containers(spec)
        for mount in container.get("volumeMounts") or []
    )


def _check_directories(missing: list[Use]) -> None:
    for directory, number in Counter(use.directory for use in missing).items():
        if number > 1:
            names = " and ".join(f"'{use.volume}'" for use in missing if use.directory == directory)
            why = f"{names} would have the same socket: give them different fdPassingEmptyDirName"
            raise Invalid([Fault("spec.volumes", why)])


def _add(missing: list[Use], pod: Manifest) -> None:
    spec = pod["spec"]
    programs = [rendering.sidecar(use) for use in missing]
    for name, number in Counter(volume["name"] for program in programs for volume in program.volumes).items():
        if number > 1:
            why = f"two sidecars would have a volume '{name}': rename one of the volumes that they serve"
            raise Invalid([Fault("spec.volumes", why)])
    for program in programs:
        pod_annotations.apply(pod, program.container)
    containers = list(spec.get("initContainers") or [])
    place = _place(containers)
    spec["initContainers"] = [*containers[:place], *(program.container for program in programs), *containers[place:]]
    volumes = [_served(volume, missing) for volume in spec["volumes"]]
    for program in programs:
        names = {volume.get("name") for volume in volumes}
        volumes += [volume for volume in program.volumes if volume["name"] not in names]
    spec["volumes"] = volumes
    pod_annotations.raise_grace(pod, max(program.grace for program in programs))


def _place(containers: list[Manifest]) -> int:
    for index, container in enumerate(containers):
        if container.get("name") == _BEFORE_OURS and container.get("restartPolicy") == "Always":
            return index + 1
    return 0


def _served(volume: Manifest, missing: list[Use]) -> Manifest:
    """Return the volume as the driver takes it: an inline one has only attributes of the driver."""
    for use in missing:
        if volume.get("name") == use.volume and is_inline(volume):
            attributes = {
                name: value for name, value in volume["csi"]["volumeAttributes"].items() if name in DRIVER_ATTRIBUTES
            }
            attributes["fdPassingEmptyDirName"] = use.directory
            return {**volume, "csi": {**volume["csi"], "volumeAttributes": attributes}}
    return volume


def _propagate(volume: str, spec: Manifest) -> None:
    """Let all containers with the volume see what is mounted later, unless their author has decided."""
    for container in _containers(spec):
        for mount in container.get("volumeMounts") or []:
            if mount.get("name") == volume:
                mount.setdefault("mountPropagation", "HostToContainer")
