"""VolumeTemplates: how an administrator has a FUSE program run for a volume, checked by field. Pure.

packaging/kubernetes/controller/volumetemplates.yaml defines the resource, so the API server checks the types of fields.
What that can't say is here: whether expressions can be evaluated, and whether the pod may be (`pod_rules`).
"""

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import re2

from fusermount3_controller import expressions, label_selectors, pod_rules
from fusermount3_controller.expressions import ExpressionError, Names
from fusermount3_controller.faults import Fault, Invalid, quoted, unknown
from fusermount3_controller.label_selectors import Selector

API_VERSION = "fusermount3-proxy.dev/v1alpha1"
KIND = "VolumeTemplate"

#: What the expressions of a template can use besides `params`.
VARIABLES = frozenset({"fsGroup", "mountpoint", "readOnly"})
#: volumeAttributes that are the driver's, so they can't be parameters (the broker's csi/volume_requests.py).
DRIVER_ATTRIBUTES = frozenset(
    (
        *("allowOther", "fdPassingEmptyDirName", "fdPassingSocketName", "mountOptions", "mountTiming", "oldClients"),
        "share",
    )
)
#: The attribute that names the template.
TEMPLATE_ATTRIBUTE = "volumeTemplate"

#: What a parameter without a pattern may be: one word for any shell, no list for `-o`, and no option.
DEFAULT_PATTERN = "([A-Za-z0-9@%+=:./_][A-Za-z0-9@%+=:./_-]*)?"
#: In characters.
LONGEST_VALUE = 1024
_LONGEST_PATTERN = 512
_MOST_PARAMETERS = 32
#: All strings of one pod template, in characters.
_LONGEST_TEMPLATE = 65536
#: Bytes that RE2 may use for a pattern.
_PATTERN_MEMORY = 1 << 20

_NAME = re.compile("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_PARAMETER_NAME = re.compile("[a-zA-Z][a-zA-Z0-9_]{0,62}")
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


class Parameter(NamedTuple):
    """What users may say of a volume under this name; `pattern` is RE2's and has to match all of the value."""

    required: bool = False
    default: str = ""
    pattern: str = DEFAULT_PATTERN


class VolumeTemplate(NamedTuple):
    """A template that can be used; `pod` is its pod template with expressions in it.

    `generation` is the API server's: another one for each change.
    """

    name: str
    placement: Placement
    parameters: Mapping[str, Parameter]
    pod: Mapping[str, Any]
    sharing: Sharing = Sharing()
    generation: int = 0


def parse(manifest: Mapping[str, Any]) -> VolumeTemplate:
    """Return the template that `manifest` describes. Raises Invalid, with all that is wrong."""
    faults: list[Fault] = []
    for field, value in (("apiVersion", API_VERSION), ("kind", KIND)):
        if manifest.get(field) != value:
            faults.append(Fault(field, f"must be {value}, not {quoted(manifest.get(field))}"))
    metadata, spec = (_object(manifest, name, name, faults) for name in ("metadata", "spec"))
    _check_fields(manifest, ("apiVersion", "kind", "metadata", "spec", "status"), "", faults)
    name = metadata.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        faults.append(Fault("metadata.name", "must be of at most 63 lower-case letters, digits and '-'"))
    _check_fields(spec, ("parameters", "placement", "volumeStaging", *SHARING_FIELDS), "spec", faults)
    placement = _placement(spec, faults)
    sharing = _sharing(spec, placement, faults)
    parameters = _parameters(_object(spec, "parameters", "spec.parameters", faults), faults)
    staging = _object(spec, "volumeStaging", "spec.volumeStaging", faults)
    _check_fields(staging, ("podTemplate",), "spec.volumeStaging", faults)
    field = "spec.volumeStaging.podTemplate"
    pod = _object(staging, "podTemplate", field, faults)
    if not pod:
        faults.append(Fault(field, "is missing: it says how the program is run"))
    else:
        faults += pod_rules.faults(pod, field, shared=placement is Placement.SHARED)
        faults += _expression_faults(pod, field, frozenset(parameters))
        faults += _account_faults(pod, field, sharing)
    if faults:
        raise Invalid(faults)
    generation = metadata.get("generation")
    return VolumeTemplate(
        str(name), placement, parameters, pod, sharing, generation if isinstance(generation, int) else 0
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
        elif len(value) > LONGEST_VALUE:
            faults.append(Fault(where, f"has more than {LONGEST_VALUE} characters"))
        elif not _compiled(pattern := template.parameters[name].pattern).fullmatch(value):
            faults.append(Fault(where, f"{quoted(value)} does not match {pattern}"))
    for name, parameter in template.parameters.items():
        if parameter.required and not given.get(name):
            faults.append(Fault(field, f"the template '{template.name}' needs the parameter '{name}'"))
    if faults:
        raise Invalid(faults)
    return {name: given.get(name, parameter.default) for name, parameter in template.parameters.items()}


# Fields ------------------------------------------------------------------------------------------------------------


def _object(parent: Mapping[str, Any], name: str, field: str, faults: list[Fault]) -> Mapping[str, Any]:
    value = parent.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        faults.append(Fault(field, f"must be an object, not {quoted(value)}"))
        return {}
    return value


def _check_fields(value: Mapping[str, Any], known: Sequence[str], field: str, faults: list[Fault]) -> None:
    faults += [Fault(field, unknown(name, known)) for name in value if name not in known]


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
    namespaces = label_selectors.parse(_object(spec, "allowedNamespaces", field, faults), field, found)
    faults += found
    return Sharing() if found else Sharing(Identity(identity), namespaces, inline, idle, Upgrade(upgrade))


def _account_faults(pod: Mapping[str, Any], field: str, sharing: Sharing) -> list[Fault]:
    """The program has one account: that of the template, or that of the pod for which it runs."""
    spec = pod.get("spec")
    if sharing.identity is Identity.TEMPLATE or not isinstance(spec, Mapping):
        return []
    why = f"with identity {sharing.identity}, the program runs with that of the pod that uses the volume"
    names = ("serviceAccountName", "automountServiceAccountToken")
    return [Fault(f"{field}.spec.{name}", why) for name in names if name in spec]


def _parameters(given: Mapping[str, Any], faults: list[Fault]) -> dict[str, Parameter]:
    if len(given) > _MOST_PARAMETERS:
        faults.append(Fault("spec.parameters", f"has more than {_MOST_PARAMETERS} parameters"))
    result = {}
    for name in given:
        field = f"spec.parameters.{name}"
        if not _PARAMETER_NAME.fullmatch(name):
            faults.append(Fault(field, "a name has at most 63 letters, digits and '_', and begins with a letter"))
        if name in (*DRIVER_ATTRIBUTES, TEMPLATE_ATTRIBUTE):
            faults.append(Fault(field, "is a volumeAttribute of the driver; choose another name"))
        result[name] = _parameter(_object(given, name, field, faults), field, faults)
    return result


def _parameter(given: Mapping[str, Any], field: str, faults: list[Fault]) -> Parameter:
    _check_fields(given, ("default", "description", "pattern", "required"), field, faults)
    types = {"default": str, "description": str, "pattern": str, "required": bool}
    wrong = [name for name, kind in types.items() if name in given and not isinstance(given[name], kind)]
    for name in wrong:
        kind = "true or false" if name == "required" else "a string, in quotes"
        faults.append(Fault(f"{field}.{name}", f"must be {kind}, not {quoted(given[name])}"))
    if wrong:
        return Parameter()
    result = Parameter(**{name: given[name] for name in Parameter._fields if name in given})
    if result.required and "default" in given:
        faults.append(Fault(f"{field}.default", "has no effect, for the parameter is required"))
    try:
        if len(result.pattern) > _LONGEST_PATTERN:
            raise ValueError(f"has more than {_LONGEST_PATTERN} characters")
        matches = _compiled(result.pattern).fullmatch(result.default)
        if "default" in given and not matches:
            faults.append(Fault(f"{field}.default", f"{quoted(result.default)} does not match {result.pattern}"))
    except ValueError as error:
        faults.append(Fault(f"{field}.pattern", str(error)))
    return result


def _compiled(pattern: str) -> Any:
    """Return the pattern for RE2, which matches in time proportional to a value's length. Raises ValueError."""
    options = re2.Options()
    options.max_mem = _PATTERN_MEMORY
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        (reason,) = error.args
        text = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
        raise ValueError(f"is not a regular expression of RE2: {text}") from None


def _expression_faults(pod: Mapping[str, Any], field: str, parameters: frozenset[str]) -> list[Fault]:
    result = []
    length = 0
    for where, text in expressions.strings(pod, field):
        length += len(text)
        if not expressions.has_any(text):
            continue
        try:
            expressions.check(text, Names(VARIABLES, parameters))
        except ExpressionError as error:
            result.append(Fault(where, str(error)))
    if length > _LONGEST_TEMPLATE:
        result.append(Fault(field, f"its strings have more than {_LONGEST_TEMPLATE} characters"))
    return result
