"""What the expressions in each pod template of a VolumeTemplate can use, and what is wrong with them. Pure.

The names are those of Pods-as-Volumes (Faria, Macedo and Paulo, WoC '21). What a user writes into a claim is not
matched with any pattern, so it may become words of a command, no more.
"""

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

from fusermount3_controller import expressions
from fusermount3_controller.expressions import ExpressionError, Names
from fusermount3_controller.faults import Fault


class Stage(StrEnum):
    """When a pod of a template runs; the value is the field that has its pod template."""

    VALIDATION = "volumeValidation"
    CREATION = "volumeCreation"
    EXPANSION = "volumeExpansion"
    STAGING = "volumeStaging"
    UNSTAGING = "volumeUnstaging"
    DELETION = "volumeDeletion"


#: What a program can use that is a container of the pod with the volume.
OF_SIDECARS = frozenset({"fsGroup", "mountpoint", "readOnly"})
_REQUESTED = frozenset({"requestedMaxCapacity", "requestedMinCapacity", "requestedVolumeMode"})
_OF_REQUESTS = frozenset({"pvc", "requestedAccessModes", "sc"})
_CREATED = frozenset({"capacity", "defaultHandle", "handle", "volumeMode"})
_STAGED = frozenset({"capacity", "handle", "readOnly", "volumeMode"})
_OF_STAGED = frozenset({"accessModes", "node", "pv", "pvc"})

#: The variables of each stage, and the objects with fields.
VARIABLES: Mapping[Stage, frozenset[str]] = {
    Stage.VALIDATION: _REQUESTED | {"defaultHandle", "handle"},
    Stage.CREATION: _REQUESTED | {"defaultHandle"},
    Stage.EXPANSION: _REQUESTED | _CREATED,
    Stage.STAGING: _STAGED | OF_SIDECARS,
    Stage.UNSTAGING: _STAGED,
    Stage.DELETION: _REQUESTED | _CREATED,
}
OBJECTS: Mapping[Stage, frozenset[str]] = {
    Stage.VALIDATION: _OF_REQUESTS | {"node", "pv"},
    Stage.CREATION: _OF_REQUESTS | {"node"},
    Stage.EXPANSION: _OF_REQUESTS | {"accessModes", "pv"},
    Stage.STAGING: _OF_STAGED,
    Stage.UNSTAGING: _OF_STAGED,
    Stage.DELETION: _OF_REQUESTS | {"accessModes", "pv"},
}

#: All strings of one pod template, in characters.
_LONGEST_TEMPLATE = 65536
#: What a user can't choose of a claim, or only among the names that Kubernetes allows.
_FIXED = frozenset({"pvc.metadata.namespace", "pvc.metadata.uid"})
_WORD = re.compile(r".*\.(command|args)\[[0-9]+\]")
_TEXT = re.compile(r".*\.env\[[0-9]+\]\.value|.*\.metadata\.annotations\..*")
_OPTION = "begins with what a user says of a claim, so it could be an option: write something before it"
_PLACE = "what a user says of a claim can only be in command, args, values of env, and annotations"


def names(stage: Stage, parameters: frozenset[str]) -> Names:
    """Return the names that the pod template of a stage can use."""
    return Names(VARIABLES[stage], parameters, OBJECTS[stage])


def faults(pod: Mapping[str, Any], field: str, known: Names) -> Iterator[Fault]:
    """Yield what is wrong with the expressions of a pod template."""
    length = 0
    for where, text in expressions.strings(pod, field):
        length += len(text)
        yield from text_faults(text, where, known)
    if length > _LONGEST_TEMPLATE:
        yield Fault(field, f"its strings have more than {_LONGEST_TEMPLATE} characters")


def text_faults(text: str, where: str, known: Names) -> Iterator[Fault]:
    """Yield what is wrong with the expressions of one string."""
    if not expressions.has_any(text):
        return
    try:
        expressions.check(text, known)
        if not any(path.partition(".")[0] == "pvc" and path not in _FIXED for path in expressions.paths_in(text)):
            return
    except ExpressionError as error:
        yield Fault(where, str(error))
        return
    if _WORD.fullmatch(where):
        if text.startswith("{{"):
            yield Fault(where, _OPTION)
    elif not _TEXT.fullmatch(where):
        yield Fault(where, _PLACE)
