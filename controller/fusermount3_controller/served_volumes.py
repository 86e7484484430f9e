"""Which volumes of a pod are served by a template, and with which parameters. Pure.

A volume names its template in `volumeTemplate`: of its volumeAttributes, if it is inline or a PersistentVolume; of the
parameters of its StorageClass, as long as its claim is not bound. What else stands there is a parameter of the template
or an attribute of the driver.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fusermount3_controller import volume_templates
from fusermount3_controller.faults import Fault, Invalid, quoted
from fusermount3_controller.rendering import DEFAULT_DIRECTORY, DEFAULT_SOCKET, DRIVER, Use, container_name
from fusermount3_controller.volume_templates import DRIVER_ATTRIBUTES, TEMPLATE_ATTRIBUTE, VolumeTemplate

Manifest = Mapping[str, Any]


class Known(NamedTuple):
    """The objects by which volumes are resolved; claims by namespace and name, all others by name."""

    templates: Mapping[str, VolumeTemplate] = {}
    claims: Mapping[tuple[str, str], Manifest] = {}
    volumes: Mapping[str, Manifest] = {}
    classes: Mapping[str, Manifest] = {}


class _Named(NamedTuple):
    """The attributes of a volume of our driver, and the field that they are in."""

    attributes: Manifest
    field: str
    read_only: bool = False


def uses(pod: Manifest, known: Known) -> list[Use]:
    """Return the volumes of the pod that name a template, in the order of the pod. Raises Invalid."""
    faults: list[Fault] = []
    found = []
    namespace = (pod.get("metadata") or {}).get("namespace") or "default"
    group = ((pod.get("spec") or {}).get("securityContext") or {}).get("fsGroup")
    for index, volume in _of_pod(pod):
        named = _inline(volume, f"spec.volumes[{index}]") or _claimed(volume, namespace, known)
        if named is None or TEMPLATE_ATTRIBUTE not in named.attributes:
            continue
        try:
            found.append(_use(volume, named, known, group))
        except Invalid as error:
            faults += error.faults
    if faults:
        raise Invalid(faults)
    return found


def is_inline(volume: Manifest) -> bool:
    """Return whether this volume of a pod is an inline volume of our driver."""
    csi = volume.get("csi")
    return isinstance(csi, Mapping) and csi.get("driver") == DRIVER


def _of_pod(pod: Manifest) -> Iterator[tuple[int, Manifest]]:
    volumes = (pod.get("spec") or {}).get("volumes") or []
    yield from enumerate(volumes)


def _inline(volume: Manifest, field: str) -> _Named | None:
    if not is_inline(volume):
        return None
    csi = volume["csi"]
    return _Named(csi.get("volumeAttributes") or {}, f"{field}.csi.volumeAttributes", bool(csi.get("readOnly")))


def _claimed(volume: Manifest, namespace: str, known: Known) -> _Named | None:
    source = volume.get("persistentVolumeClaim") or {}
    template = (volume.get("ephemeral") or {}).get("volumeClaimTemplate") or {}
    claim = known.claims.get((namespace, str(source.get("claimName"))), {}) or template
    spec = claim.get("spec") or {}
    read_only = bool(source.get("readOnly"))
    if name := spec.get("volumeName"):
        csi = (known.volumes.get(name, {}).get("spec") or {}).get("csi") or {}
        if csi.get("driver") != DRIVER:
            return None
        field = f"PersistentVolume {name}: spec.csi.volumeAttributes"
        return _Named(csi.get("volumeAttributes") or {}, field, read_only or bool(csi.get("readOnly")))
    name = spec.get("storageClassName")
    storage_class = known.classes.get(name, {}) if name else {}
    if storage_class.get("provisioner") != DRIVER:
        return None
    return _Named(storage_class.get("parameters") or {}, f"StorageClass {name}: parameters", read_only)


def _use(volume: Manifest, named: _Named, known: Known, group: object) -> Use:
    name = named.attributes[TEMPLATE_ATTRIBUTE]
    template = known.templates.get(name) if isinstance(name, str) else None
    if template is None:
        why = f"there is no VolumeTemplate {quoted(name)}; there are {', '.join(sorted(known.templates)) or 'none'}"
        raise Invalid([Fault(f"{named.field}.{TEMPLATE_ATTRIBUTE}", why)])
    # Names with a slash are those of Kubernetes and its own programs.
    others = {key: value for key, value in named.attributes.items() if "/" not in key and key != TEMPLATE_ATTRIBUTE}
    given = {key: value for key, value in others.items() if key not in DRIVER_ATTRIBUTES}
    own = is_inline(volume)
    return Use(
        volume=volume["name"],
        template=template,
        parameters=volume_templates.values(template, given, named.field),
        # Only the attributes of an inline volume can be written anew.
        directory=others.get("fdPassingEmptyDirName", _own_directory(volume["name"]) if own else DEFAULT_DIRECTORY),
        socket=others.get("fdPassingSocketName", DEFAULT_SOCKET),
        read_only=named.read_only,
        fs_group=group if isinstance(group, int) else None,
    )


def _own_directory(volume: str) -> str:
    return container_name(f"fd-passing-{volume}")
