"""Which volumes of a pod are served by a template, and with which parameters. Pure.

A volume names its template in `volumeTemplate`: of its volumeAttributes, if it is inline or a PersistentVolume; of the
parameters of its StorageClass, as long as its claim is not bound. What else stands there is a parameter of the template
or an attribute of the driver.
"""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from fusermount3_controller import rendering, volume_templates
from fusermount3_controller.faults import Fault, Invalid, quoted
from fusermount3_controller.quantities import size_or_none
from fusermount3_controller.rendering import DEFAULT_DIRECTORY, DEFAULT_SOCKET, DRIVER, Use, container_name
from fusermount3_controller.template_parameters import DRIVER_ATTRIBUTES, TEMPLATE_ATTRIBUTE
from fusermount3_controller.volume_templates import Placement, VolumeTemplate

Manifest = Mapping[str, Any]


class Known(NamedTuple):
    """The objects by which volumes are resolved; claims by namespace and name, all others by name.

    `unusable` says of templates that can't be used, why not. Of namespaces, only the labels are known.
    """

    templates: Mapping[str, VolumeTemplate] = {}
    claims: Mapping[tuple[str, str], Manifest] = {}
    volumes: Mapping[str, Manifest] = {}
    classes: Mapping[str, Manifest] = {}
    unusable: Mapping[str, str] = {}
    namespaces: Mapping[str, Manifest] = {}


class Kind(StrEnum):
    """The kinds of `Known`, and of what uses and serves volumes."""

    TEMPLATE = volume_templates.KIND
    CLAIM = "PersistentVolumeClaim"
    VOLUME = "PersistentVolume"
    CLASS = "StorageClass"
    NAMESPACE = "Namespace"
    POD = "Pod"
    ATTACHMENT = "MountPodAttachment"
    POD_VOLUME = "PodVolume"


class Reference(NamedTuple):
    """The name of an object in the cluster; only a claim is in a namespace."""

    kind: Kind
    name: str
    namespace: str = ""


class Named(NamedTuple):
    """The attributes of a volume of our driver, and the field that they are in.

    A PersistentVolume also has a name, a volumeHandle and mountOptions, and is itself there as `volume`; they are empty
    for all others. Nobody mounts a block volume, so its mountOptions are empty, too.
    """

    attributes: Manifest
    field: str
    read_only: bool = False
    is_inline: bool = False
    persistent_volume: str = ""
    handle: str = ""
    mount_options: tuple[str, ...] = ()
    volume: Mapping[str, Any] = {}

    @property
    def is_block(self) -> bool:
        """Whether pods get a device, of which kubelet tells the node plugin neither mountOptions nor fsGroup."""
        return rendering.is_block(self.volume)

    @property
    def capacity(self) -> int | None:
        """Of a PersistentVolume, in bytes; None, if it says none."""
        return size_or_none(((self.volume.get("spec") or {}).get("capacity") or {}).get("storage"))


def uses(pod: Manifest, known: Known) -> list[Use]:
    """Return the volumes of the pod that name a template, in the order of the pod. Raises Invalid."""
    faults: list[Fault] = []
    found = []
    for volume, named in named_volumes(pod, known):
        try:
            found.append(use(pod, volume, named, known))
        except Invalid as error:
            faults += error.faults
    if faults:
        raise Invalid(faults)
    return found


def named_volumes(pod: Manifest, known: Known) -> Iterator[tuple[Manifest, Named]]:
    """Yield the volumes of the pod that name a template, whether it can be used or not."""
    for index, volume in _of_pod(pod):
        named = _inline(volume, f"spec.volumes[{index}]") or _claimed(volume, pod, known)
        if named is not None and TEMPLATE_ATTRIBUTE in named.attributes:
            yield volume, named


def use(pod: Manifest, volume: Manifest, named: Named, known: Known) -> Use:
    """Return how this volume of the pod is served. Raises Invalid."""
    group = ((pod.get("spec") or {}).get("securityContext") or {}).get("fsGroup")
    name = named.attributes[TEMPLATE_ATTRIBUTE]
    template = known.templates.get(name) if isinstance(name, str) else None
    if template is None and name in known.unusable:
        why = f"the VolumeTemplate '{name}' can't be used: {known.unusable[name]}"
        raise Invalid([Fault(f"{named.field}.{TEMPLATE_ATTRIBUTE}", why)])
    if template is None:
        why = f"there is no VolumeTemplate {quoted(name)}; there are {', '.join(sorted(known.templates)) or 'none'}"
        raise Invalid([Fault(f"{named.field}.{TEMPLATE_ATTRIBUTE}", why)])
    if named.is_block and template.placement is Placement.SIDECAR:
        why = f"must be Filesystem: the template '{name}' has placement Sidecar, and a sidecar offers no device"
        raise Invalid([Fault(f"PersistentVolume {named.persistent_volume}: spec.volumeMode", why)])
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
        fs_group=group if isinstance(group, int) and not named.is_block else None,
        persistent_volume=named.volume,
    )


def missing(pod: Manifest, known: Known) -> set[Reference]:
    """Return the objects that the pod's volumes refer to, and that are not known.

    What these refer to in turn is not known, either: ask again when they are.
    """
    return {
        reference
        for _, volume in _of_pod(pod)
        for reference in _references(volume, pod, known)
        if not _is_known(reference, known)
    }


def _references(volume: Manifest, pod: Manifest, known: Known) -> Iterator[Reference]:
    # An ephemeral claim exists only after its pod, and at the latest when that is on a node.
    if (name := _claim_name(volume, pod)) and (volume.get("ephemeral") is None or pod["spec"].get("nodeName")):
        yield Reference(Kind.CLAIM, name, namespace_of(pod))
    spec = _claim(volume, pod, known).get("spec") or {}
    if volume_name := spec.get("volumeName"):
        yield Reference(Kind.VOLUME, str(volume_name))
    elif class_name := spec.get("storageClassName"):
        yield Reference(Kind.CLASS, str(class_name))
    named = _inline(volume, "") or _claimed(volume, pod, known)
    if named is not None and isinstance(template := named.attributes.get(TEMPLATE_ATTRIBUTE), str):
        yield Reference(Kind.TEMPLATE, template)
        if template in known.templates and known.templates[template].sharing.namespaces:
            yield Reference(Kind.NAMESPACE, namespace_of(pod))


def _is_known(reference: Reference, known: Known) -> bool:
    kind, name, namespace = reference
    if kind is Kind.CLAIM:
        return (namespace, name) in known.claims
    if kind is Kind.TEMPLATE:
        return name in known.templates or name in known.unusable
    by_name: dict[Kind, Mapping[str, Manifest]] = {
        Kind.VOLUME: known.volumes,
        Kind.CLASS: known.classes,
        Kind.NAMESPACE: known.namespaces,
    }
    return name in by_name[kind]


def is_inline(volume: Manifest) -> bool:
    """Return whether this volume of a pod is an inline volume of our driver."""
    csi = volume.get("csi")
    return isinstance(csi, Mapping) and csi.get("driver") == DRIVER


def namespace_of(pod: Manifest) -> str:
    return (pod.get("metadata") or {}).get("namespace") or "default"


def _of_pod(pod: Manifest) -> Iterator[tuple[int, Manifest]]:
    volumes = (pod.get("spec") or {}).get("volumes") or []
    yield from enumerate(volumes)


def _inline(volume: Manifest, field: str) -> Named | None:
    if not is_inline(volume):
        return None
    csi = volume["csi"]
    return Named(
        csi.get("volumeAttributes") or {}, f"{field}.csi.volumeAttributes", bool(csi.get("readOnly")), is_inline=True
    )


def _claim_name(volume: Manifest, pod: Manifest) -> str:
    """Return the name of the volume's claim; empty, if it has none, or has it only when the pod has a name."""
    if source := volume.get("persistentVolumeClaim"):
        return str(source.get("claimName") or "")
    name = (pod.get("metadata") or {}).get("name")
    return f"{name}-{volume.get('name')}" if volume.get("ephemeral") is not None and name else ""


def _claim(volume: Manifest, pod: Manifest, known: Known) -> Manifest:
    """Return the claim of the volume, or the template of the claim that it will have; empty if there is none."""
    template: Manifest = (volume.get("ephemeral") or {}).get("volumeClaimTemplate") or {}
    return known.claims.get((namespace_of(pod), _claim_name(volume, pod)), {}) or template


def _claimed(volume: Manifest, pod: Manifest, known: Known) -> Named | None:
    spec = _claim(volume, pod, known).get("spec") or {}
    read_only = bool((volume.get("persistentVolumeClaim") or {}).get("readOnly"))
    if name := spec.get("volumeName"):
        volume_object = known.volumes.get(name, {})
        of_volume = volume_object.get("spec") or {}
        csi = of_volume.get("csi") or {}
        if csi.get("driver") != DRIVER:
            return None
        field = f"PersistentVolume {name}: spec.csi.volumeAttributes"
        return Named(
            attributes=csi.get("volumeAttributes") or {},
            field=field,
            read_only=read_only or bool(csi.get("readOnly")),
            persistent_volume=str(name),
            handle=str(csi.get("volumeHandle") or ""),
            mount_options=() if rendering.is_block(volume_object) else _texts(of_volume.get("mountOptions")),
            volume=volume_object,
        )
    name = spec.get("storageClassName")
    storage_class = known.classes.get(name, {}) if name else {}
    if storage_class.get("provisioner") != DRIVER:
        return None
    return Named(storage_class.get("parameters") or {}, f"StorageClass {name}: parameters", read_only)


def _texts(values: list[object] | None) -> tuple[str, ...]:
    return tuple(map(str, values or []))


def _own_directory(volume: str) -> str:
    return container_name(f"fd-passing-{volume}")
