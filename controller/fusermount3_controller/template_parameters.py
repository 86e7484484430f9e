"""The parameters of VolumeTemplates: what users may say of a volume. Pure."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import re2

from fusermount3_controller.faults import Fault, object_in, quoted, unknown_in

#: volumeAttributes that are the driver's, so they can't be parameters (the broker's csi/volume_requests.py).
DRIVER_ATTRIBUTES = frozenset(
    (
        *("allowOther", "fdPassingEmptyDirName", "fdPassingSocketName", "mountOptions", "mountTiming", "oldClients"),
        *("share", "shareCapacity"),
    )
)
#: That of them with the options of FUSE filesystems.
MOUNT_OPTIONS = "mountOptions"
#: The attribute that names the template.
TEMPLATE_ATTRIBUTE = "volumeTemplate"

#: What a parameter without a pattern may be: one word for any shell, no list for `-o`, and no option.
DEFAULT_PATTERN = "([A-Za-z0-9@%+=:./_][A-Za-z0-9@%+=:./_-]*)?"
#: In characters.
LONGEST_VALUE = 1024
_LONGEST_PATTERN = 512
_MOST_PARAMETERS = 32
#: Bytes that RE2 may use for a pattern.
_PATTERN_MEMORY = 1 << 20
_PARAMETER_NAME = re.compile("[a-zA-Z][a-zA-Z0-9_]{0,62}")


class Parameter(NamedTuple):
    """What users may say of a volume under this name; `pattern` is RE2's and has to match all of the value."""

    required: bool = False
    default: str = ""
    pattern: str = DEFAULT_PATTERN


def parse(given: Mapping[str, Any], faults: list[Fault]) -> dict[str, Parameter]:
    """Return the parameters that spec.parameters has; what is wrong with it is added to `faults`."""
    if len(given) > _MOST_PARAMETERS:
        faults.append(Fault("spec.parameters", f"has more than {_MOST_PARAMETERS} parameters"))
    result = {}
    for name in given:
        field = f"spec.parameters.{name}"
        if not _PARAMETER_NAME.fullmatch(name):
            faults.append(Fault(field, "a name has at most 63 letters, digits and '_', and begins with a letter"))
        if name in (*DRIVER_ATTRIBUTES, TEMPLATE_ATTRIBUTE):
            faults.append(Fault(field, "is a volumeAttribute of the driver; choose another name"))
        result[name] = _parameter(object_in(given, name, field, faults), field, faults)
    return result


def _parameter(given: Mapping[str, Any], field: str, faults: list[Fault]) -> Parameter:
    faults += unknown_in(given, ("default", "description", "pattern", "required"), field)
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
        matches = compiled(result.pattern).fullmatch(result.default)
        if "default" in given and not matches:
            faults.append(Fault(f"{field}.default", f"{quoted(result.default)} does not match {result.pattern}"))
    except ValueError as error:
        faults.append(Fault(f"{field}.pattern", str(error)))
    return result


def compiled(pattern: str) -> Any:
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
