"""Which volumes of a pod are served by a template, and with which parameters. Pure.

A volume names its template in `volumeTemplate`: of its volumeAttributes, if it is inline or a PersistentVolume; of the
parameters of its StorageClass, as long as its claim is not bound. What else stands there is a parameter of the template
or an attribute of the driver.
"""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from fusermount3_controller import volume_templates
from fusermount3_controller.faults import Fault, Invalid, quoted
from fusermount3_controller.rendering import DEFAULT_DIRECTORY, DEFAULT_SOCKET, DRIVER, Use, container_name
from fusermount3_controller.volume_templates import DRIVER_ATTRIBUTES, TEMPLATE_ATTRIBUTE, VolumeTemplate

Manifest = Mapping[str, Any]


class Known(NamedTuple):
    """The objects by which volumes are resolved; claims by namespace and name, all others by name.

    `unusable` says of templates that can't be used, why not.
    """

    templates: Mapping[str, VolumeTemplate] = {}
    claims: Mapping[tuple[str, str], Manifest] = {}
    volumes: Mapping[str, Manifest] = {}
    classes: Mapping[str, Manifest] = {}
    unusable: Mapping[str, str] = {}


class Kind(StrEnum):
    """The kinds of `Known`."""

    TEMPLATE = volume_templates.KIND
    CLAIM = "PersistentVolumeClaim"
    VOLUME = "PersistentVolume"
    CLASS = "StorageClass"


class Reference(NamedTuple):
    """The name of an object in the cluster; only a claim is in a namespace."""

    kind: Kind
    name: str
    namespace: str = ""


class _Named(NamedTuple):
    """The attributes of a volume of our driver, and the field that they are in."""

    attributes: Manifest
    field: str
    read_only: bool = False


def uses(pod: Manifest, known: Known) -> list[Use]:
    """Return the volumes of the pod that name a template, in the order of the pod. Raises Invalid."""
    faults: list[Fault] = []
    found = []
    namespace = _namespace(pod)
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


def missing(pod: Manifest, known: Known) -> set[Reference]:
    """Return the objects that the pod's volumes refer to, and that are not known.

    What these refer to in turn is not known, either: ask again when they are.
    """
    namespace = _namespace(pod)
    return {
        reference
        for _, volume in _of_pod(pod)
        for reference in _references(volume, namespace, known)
        if not _is_known(reference, known)
    }


def _references(volume: Manifest, namespace: str, known: Known) -> Iterator[Reference]:
    if name := (volume.get("persistentVolumeClaim") or {}).get("claimName"):
        yield Reference(Kind.CLAIM, str(name), namespace)
    spec = _claim(volume, namespace, known).get("spec") or {}
    if name := spec.get("volumeName"):
        yield Reference(Kind.VOLUME, str(name))
    elif name := spec.get("storageClassName"):
        yield Reference(Kind.CLASS, str(name))
    named = _inline(volume, "") or _claimed(volume, namespace, known)
    if named is not None and isinstance(name := named.attributes.get(TEMPLATE_ATTRIBUTE), str):
        yield Reference(Kind.TEMPLATE, name)


def _is_known(reference: Reference, known: Known) -> bool:
    kind, name, namespace = reference
    if kind is Kind.CLAIM:
        return (namespace, name) in known.claims
    if kind is Kind.TEMPLATE:
        return name in known.templates or name in known.unusable
    return name in (known.volumes if kind is Kind.VOLUME else known.classes)


def is_inline(volume: Manifest) -> bool:
    """Return whether this volume of a pod is an inline volume of our driver."""
    csi = volume.get("csi")
    return isinstance(csi, Mapping) and csi.get("driver") == DRIVER


def _namespace(pod: Manifest) -> str:
    return (pod.get("metadata") or {}).get("namespace") or "default"


def _of_pod(pod: Manifest) -> Iterator[tuple[int, Manifest]]:
    volumes = (pod.get("spec") or {}).get("volumes") or []
    yield from enumerate(volumes)


def _inline(volume: Manifest, field: str) -> _Named | None:
    if not is_inline(volume):
        return None
    csi = volume["csi"]
    return _Named(csi.get("volumeAttributes") or {}, f"{field}.csi.volumeAttributes", bool(csi.get("readOnly")))


def _claim(volume: Manifest, namespace: str, known: Known) -> Manifest:
    """Return the claim that the volume names, or of which it has the template; empty if there is none."""
    source = volume.get("persistentVolumeClaim") or {}
    template: Manifest = (volume.get("ephemeral") or {}).get("volumeClaimTemplate") or {}
    return known.claims.get((namespace, str(source.get("claimName"))), {}) or template


def _claimed(volume: Manifest, namespace: str, known: Known) -> _Named | None:
    spec = _claim(volume, namespace, known).get("spec") or {}
    read_only = bool((volume.get("persistentVolumeClaim") or {}).get("readOnly"))
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
    if template is None and name in known.unusable:
        why = f"the VolumeTemplate '{name}' can't be used: {known.unusable[name]}"
        raise Invalid([Fault(f"{named.field}.{TEMPLATE_ATTRIBUTE}", why)])
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
