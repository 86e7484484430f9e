"""VolumeTemplates: how an administrator has a FUSE program run for a volume, checked by field. Pure.

packaging/kubernetes/controller/volumetemplates.yaml defines the resource, so the API server checks the types of fields.
What that can't say is here: whether expressions can be evaluated, and whether the pod may be (`pod_rules`).
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from fusermount3_controller import (
    label_selectors,
    pod_rules,
    provisioning_fields,
    template_expressions,
    template_parameters,
)
from fusermount3_controller.expressions import Names
from fusermount3_controller.faults import Fault, Invalid, object_in, quoted, unknown, unknown_in
from fusermount3_controller.label_selectors import Selector
from fusermount3_controller.pod_rules import Role
from fusermount3_controller.provisioning_fields import Provisioning
from fusermount3_controller.template_expressions import Stage
from fusermount3_controller.template_parameters import Parameter

API_VERSION = "fusermount3-proxy.dev/v1alpha1"
KIND = "VolumeTemplate"

_NAME = re.compile("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
#: A day. A pod that nobody uses for longer is no cache, but forgotten.
LONGEST_IDLE = 86400


class Placement(StrEnum):
    """Where the program runs: in the pod that uses the volume, or in one pod for all users on a node."""

    SIDECAR = "Sidecar"
    SHARED = "Shared"


class Identity(StrEnum):
    """Whose rights a shared program has: those that the template names, or those of each user's ServiceAccount."""

    TEMPLATE = "Template"
    SERVICE_ACCOUNT = "ServiceAccount"


class Upgrade(StrEnum):
    """When users of a shared program get that of a changed template: as they come, or all at once."""

    ON_IDLE = "OnIdle"
    REPLACE = "Replace"


class Sharing(NamedTuple):
    """What a template says of programs that pods share; `idle_seconds`: so long one stays that nobody uses."""

    identity: Identity = Identity.TEMPLATE
    namespaces: Selector = ()
    allow_inline: bool = False
    idle_seconds: int = 0
    upgrade: Upgrade = Upgrade.ON_IDLE


#: The fields of a template that say it.
SHARING_FIELDS = ("allowInline", "allowedNamespaces", "idleSeconds", "identity", "upgrade")


class VolumeTemplate(NamedTuple):
    """A template that can be used; `pod` is the pod template of its program, with expressions in it.

    `generation` is the API server's: another one for each change. `is_ending`: it goes when it has no volume any more.
    `namespace`: of its mount pods, one of the administrators'; empty: that of all others.
    """

    name: str
    placement: Placement
    parameters: Mapping[str, Parameter]
    pod: Mapping[str, Any]
    sharing: Sharing = Sharing()
    provisioning: Provisioning = Provisioning()
    generation: int = 0
    is_ending: bool = False
    namespace: str = ""


def parse(manifest: Mapping[str, Any]) -> VolumeTemplate:
    """Return the template that `manifest` describes. Raises Invalid, with all that is wrong."""
    faults: list[Fault] = []
    for field, value in (("apiVersion", API_VERSION), ("kind", KIND)):
        if manifest.get(field) != value:
            faults.append(Fault(field, f"must be {value}, not {quoted(manifest.get(field))}"))
    metadata, spec = (object_in(manifest, name, name, faults) for name in ("metadata", "spec"))
    faults += unknown_in(manifest, ("apiVersion", "kind", "metadata", "spec", "status"), "")
    name = metadata.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        faults.append(Fault("metadata.name", "must be of at most 63 lower-case letters, digits and '-'"))
    known = ("parameters", "placement", Stage.STAGING, *SHARING_FIELDS, *provisioning_fields.FIELDS)
    faults += unknown_in(spec, known, "spec")
    placement = _placement(spec, faults)
    is_shared = placement is Placement.SHARED
    sharing = _sharing(spec, placement, faults)
    parameters = template_parameters.parse(object_in(spec, "parameters", "spec.parameters", faults), faults)
    staging = object_in(spec, Stage.STAGING, f"spec.{Stage.STAGING}", faults)
    faults += unknown_in(staging, ("namespace", "podTemplate"), f"spec.{Stage.STAGING}")
    namespace = _namespace(staging, placement, sharing, faults)
    field = f"spec.{Stage.STAGING}.podTemplate"
    pod = object_in(staging, "podTemplate", field, faults)
    if not pod:
        faults.append(Fault(field, "is missing: it says how the program is run"))
    else:
        of_sidecars = Names(template_expressions.OF_SIDECARS, parameters.keys())
        names = template_expressions.names(Stage.STAGING, frozenset(parameters)) if is_shared else of_sidecars
        role = Role.SIDECAR if not is_shared else Role.FREE_MOUNT_POD if namespace else Role.MOUNT_POD
        faults += pod_rules.faults(pod, field, role)
        faults += template_expressions.faults(pod, field, names)
        faults += _account_faults(pod, field, sharing)
    provisioning = provisioning_fields.parse(spec, frozenset(parameters), faults, shared=is_shared)
    if faults:
        raise Invalid(faults)
    generation = metadata.get("generation")
    return VolumeTemplate(
        name=str(name),
        placement=placement,
        parameters=parameters,
        pod=pod,
        sharing=sharing,
        provisioning=provisioning,
        generation=generation if isinstance(generation, int) else 0,
        is_ending=bool(metadata.get("deletionTimestamp")),
        namespace=namespace,
    )


def values(template: VolumeTemplate, given: Mapping[str, str], field: str) -> dict[str, str]:
    """Return the values of all parameters, given those that a user has named in `field`. Raises Invalid."""
    faults = []
    for name, value in given.items():
        where = f"{field}.{name}"
        if name not in template.parameters:
            faults.append(Fault(field, f"the template '{template.name}': {unknown(name, template.parameters)}"))
        elif not isinstance(value, str):
            faults.append(Fault(where, f"must be a string, in quotes, not {quoted(value)}"))
        elif len(value) > template_parameters.LONGEST_VALUE:
            faults.append(Fault(where, f"has more than {template_parameters.LONGEST_VALUE} characters"))
        elif not template_parameters.compiled(pattern := template.parameters[name].pattern).fullmatch(value):
            faults.append(Fault(where, f"{quoted(value)} does not match {pattern}"))
    for name, parameter in template.parameters.items():
        if parameter.required and not given.get(name):
            faults.append(Fault(field, f"the template '{template.name}' needs the parameter '{name}'"))
    if faults:
        raise Invalid(faults)
    return {name: given.get(name, parameter.default) for name, parameter in template.parameters.items()}


# Fields ------------------------------------------------------------------------------------------------------------


def _placement(spec: Mapping[str, Any], faults: list[Fault]) -> Placement:
    value = spec.get("placement")
    if value not in list(Placement):
        faults.append(Fault("spec.placement", f"must be {' or '.join(Placement)}, not {quoted(value)}"))
        return Placement.SIDECAR
    return Placement(value)


def _sharing(spec: Mapping[str, Any], placement: Placement, faults: list[Fault]) -> Sharing:
    if placement is not Placement.SHARED:
        why = f"has no effect with placement {placement}: each pod has a program of its own"
        faults += [Fault(f"spec.{name}", why) for name in SHARING_FIELDS if name in spec]
        return Sharing()
    identity, upgrade = spec.get("identity", Identity.TEMPLATE), spec.get("upgrade", Upgrade.ON_IDLE)
    inline, idle = spec.get("allowInline", False), spec.get("idleSeconds", 0)
    found = []
    for name, value, known in (("identity", identity, list(Identity)), ("upgrade", upgrade, list(Upgrade))):
        if value not in known:
            found.append(Fault(f"spec.{name}", f"must be {' or '.join(known)}, not {quoted(value)}"))
    if not isinstance(inline, bool):
        found.append(Fault("spec.allowInline", f"must be true or false, not {quoted(inline)}"))
    if not isinstance(idle, int) or isinstance(idle, bool) or not 0 <= idle <= LONGEST_IDLE:
        found.append(Fault("spec.idleSeconds", f"must be 0 to {LONGEST_IDLE} seconds, not {quoted(idle)}"))
    field = "spec.allowedNamespaces"
    namespaces = label_selectors.parse(object_in(spec, "allowedNamespaces", field, faults), field, found)
    faults += found
    return Sharing() if found else Sharing(Identity(identity), namespaces, inline, idle, Upgrade(upgrade))


def _namespace(staging: Mapping[str, Any], placement: Placement, sharing: Sharing, faults: list[Fault]) -> str:
    """Return the namespace of mount pods that the template names; empty, if it names none."""
    field, value = f"spec.{Stage.STAGING}.namespace", staging.get("namespace")
    if value is None:
        return ""
    if placement is not Placement.SHARED:
        faults.append(Fault(field, f"has no effect with placement {placement}: the program runs in the user's pod"))
    elif sharing.identity is not Identity.TEMPLATE:
        why = f"has no effect with identity {sharing.identity}: the program runs in the namespace of its users"
        faults.append(Fault(field, why))
    elif not isinstance(value, str) or not _NAME.fullmatch(value):
        faults.append(Fault(field, f"must be the name of a namespace, not {quoted(value)}"))
    else:
        return value
    return ""


def _account_faults(pod: Mapping[str, Any], field: str, sharing: Sharing) -> list[Fault]:
    """The program has one account: that of the template, or that of the pod for which it runs."""
    spec = pod.get("spec")
    if sharing.identity is Identity.TEMPLATE or not isinstance(spec, Mapping):
        return []
    why = f"with identity {sharing.identity}, the program runs with that of the pod that uses the volume"
    names = ("serviceAccountName", "automountServiceAccountToken")
    return [Fault(f"{field}.spec.{name}", why) for name in names if name in spec]
