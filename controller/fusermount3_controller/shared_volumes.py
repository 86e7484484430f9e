"""Which volumes of a pod are shared with other pods of its node, and by which key. Pure.

A volume is shared if its template has placement `Shared`, unless the pod has the emptyDir with the driver's socket:
then a container of its own serves it. The node plugin decides alike, and computes the same key.
"""

from collections.abc import Iterator
from typing import NamedTuple

from fusermount3_broker.messages.sharing_key import sharing_key
from fusermount3_controller import label_selectors, pod_volumes, served_volumes
from fusermount3_controller.faults import Fault, Invalid
from fusermount3_controller.provisioning_fields import Mode, VolumeMode, block_faults, capacity_faults
from fusermount3_controller.rendering import DEFAULT_DIRECTORY, Use
from fusermount3_controller.served_volumes import Known, Manifest, Named, namespace_of
from fusermount3_controller.template_parameters import MOUNT_OPTIONS, TEMPLATE_ATTRIBUTE
from fusermount3_controller.volume_templates import Identity, Placement, VolumeTemplate

#: Of a pod in a user namespace (fs/fuse/dir.c, fuse_allow_current_process).
USER_NAMESPACE = "a shared volume is of another user namespace: with false, nothing in it could be accessed"
#: Of a pod that names no ServiceAccount.
_DEFAULT_ACCOUNT = "default"


class Shared(NamedTuple):
    """A shared volume: pods on a node whose volumes have the same key share one filesystem.

    `identity`: namespace and name of the ServiceAccount with which the program runs, if it is that of the users.
    """

    use: Use
    key: str
    source: Named
    identity: tuple[str, str] | None = None

    @property
    def template(self) -> VolumeTemplate:
        return self.use.template


class Found(NamedTuple):
    """The shared volumes of a pod; and the names of the templates of volumes of which it can't be said."""

    shared: list[Shared]
    unclear: set[str]


def of_new_pod(pod: Manifest, known: Known) -> list[Shared]:
    """Return the shared volumes of a pod that is to be created. Raises Invalid, with all reasons why it must not be."""
    faults: list[Fault] = []
    result = []
    for volume, named in _candidates(pod, known):
        try:
            use = served_volumes.use(pod, volume, named, known)
        except Invalid as error:
            faults += error.faults
            continue
        if use.template.placement is Placement.SHARED:
            faults += _faults(pod, use, named, known)
            result.append(_shared(pod, use, named))
    if faults:
        raise Invalid(dict.fromkeys(faults))
    return result


def of_pod(pod: Manifest, known: Known) -> Found:
    """Return the shared volumes of a pod on a node. What would be refused today may have been allowed before."""
    result = Found([], set())
    for volume, named in _candidates(pod, known):
        try:
            use = served_volumes.use(pod, volume, named, known)
        except Invalid:
            result.unclear.add(str(named.attributes[TEMPLATE_ATTRIBUTE]))
            continue
        # A claim that is known as not bound yet is known as it was before the pod came to its node.
        is_bound = named.is_inline or named.persistent_volume
        if use.template.placement is Placement.SHARED and is_bound and not any(_faults(pod, use, named, known)):
            result.shared.append(_shared(pod, use, named))
        else:
            result.unclear.add(use.template.name)
    return result


def _candidates(pod: Manifest, known: Known) -> Iterator[tuple[Manifest, Named]]:
    """Yield the volumes that name a template, and that no container of the pod serves."""
    directories = {each.get("name") for each in pod["spec"].get("volumes") or [] if each.get("emptyDir") is not None}
    for volume, named in served_volumes.named_volumes(pod, known):
        if named.attributes.get("fdPassingEmptyDirName", DEFAULT_DIRECTORY) not in directories:
            yield volume, named


def _faults(pod: Manifest, use: Use, named: Named, known: Known) -> Iterator[Fault]:
    sharing, namespace = use.template.sharing, namespace_of(pod)
    if pod["spec"].get("hostUsers") is False:
        yield Fault("spec.hostUsers", USER_NAMESPACE)
    if named.is_inline and not sharing.allow_inline:
        why = f"the template '{use.template.name}' has not allowInline: name it in a PersistentVolume"
        yield Fault(f"{named.field}.{TEMPLATE_ATTRIBUTE}", why)
    yield from _static_faults(use.template, named)
    labels = (known.namespaces.get(namespace, {}).get("metadata") or {}).get("labels") or {}
    if not label_selectors.matches(sharing.namespaces, labels):
        why = f"the template '{use.template.name}' is not for the namespace '{namespace}' (allowedNamespaces)"
        yield Fault(f"{named.field}.{TEMPLATE_ATTRIBUTE}", why)


def _static_faults(template: VolumeTemplate, named: Named) -> Iterator[Fault]:
    """Yield why the template is not for a PersistentVolume that an administrator has written."""
    spec, allowed = named.volume.get("spec") or {}, template.provisioning
    if not spec or pod_volumes.is_provisioned(named.volume):
        return
    where = f"PersistentVolume {named.persistent_volume}: spec"
    if Mode.STATIC not in allowed.modes:
        yield Fault(f"{where}.csi", f"the template '{template.name}' is only for volumes that it creates")
    if (mode := spec.get("volumeMode") or VolumeMode.FILESYSTEM) not in allowed.volume_modes:
        yield Fault(f"{where}.volumeMode", f"must be {' or '.join(allowed.volume_modes)}, not {mode}")
    options = (spec.get("mountOptions"), named.attributes.get(MOUNT_OPTIONS))
    yield from block_faults(f"{where}.mountOptions", mode, options)
    for each in spec.get("accessModes") or []:
        if each not in allowed.access_modes:
            yield Fault(f"{where}.accessModes", f"must be of {', '.join(allowed.access_modes)}, not {each}")
    yield from capacity_faults(f"{where}.capacity.storage", named.capacity, allowed)


def _shared(pod: Manifest, use: Use, named: Named) -> Shared:
    identity = None
    if use.template.sharing.identity is Identity.SERVICE_ACCOUNT:
        identity = namespace_of(pod), str(pod["spec"].get("serviceAccountName") or _DEFAULT_ACCOUNT)
    attributes = {str(name): str(value) for name, value in named.attributes.items()}
    key = sharing_key(named.handle, attributes, named.mount_options, use.fs_group, identity, block=named.is_block)
    return Shared(use, key, named, identity)
