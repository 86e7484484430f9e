"""A VolumeTemplate made of few answers, to begin with. Pure."""

import re
import shlex
from typing import Any, NamedTuple

from fusermount3_controller import offline, volume_templates
from fusermount3_controller.faults import Fault, Invalid
from fusermount3_controller.volume_templates import Placement

Manifest = dict[str, Any]

_EXPRESSION = re.compile(r"\{\{.*?\}\}")
_PARAMETER = re.compile(r"\bparams\.(\w+)")
#: Of users and groups, the first that Debian gives to a person.
_UID = 1000


class Answers(NamedTuple):
    """`command`: a command line with expressions. `secret`: one with environment variables; empty: none."""

    name: str
    image: str
    command: str
    secret: str
    placement: Placement


def made(answers: Answers) -> Manifest:
    """Return the template: each parameter in the command is one that users must give. Raises Invalid."""
    words = _words(answers.command)
    if not any("mountpoint" in each for word in words for each in _EXPRESSION.findall(word)):
        raise Invalid([Fault("the command", "must have {{ mountpoint }}, the directory on which the program mounts")])
    names = dict.fromkeys(_PARAMETER.findall(" ".join(_EXPRESSION.findall(answers.command))))
    container: Manifest = {"name": "fuse", "image": answers.image, "command": words}
    if answers.secret:
        container["envFrom"] = [{"secretRef": {"name": answers.secret}}]
    container["terminationMessagePath"] = "/dev/fuse"
    container["securityContext"] = {"runAsUser": _UID, "runAsGroup": _UID}
    spec: Manifest = {"placement": str(answers.placement)}
    if names:
        spec["parameters"] = {name: {"required": True} for name in names}
    spec["volumeStaging"] = {"podTemplate": {"spec": {"containers": [container]}}}
    result = {
        "apiVersion": volume_templates.API_VERSION,
        "kind": volume_templates.KIND,
        "metadata": {"name": answers.name},
        "spec": spec,
    }
    volume_templates.parse(result)
    # As `render` shows it, with a word for each parameter.
    _, faults = offline.rendered([("the template", result)], dict.fromkeys(names, "value"))
    if faults:
        raise Invalid(Fault("", each) for each in faults)
    return result


def _words(command: str) -> list[str]:
    """Return the words of a command line; blanks in expressions separate none. Raises Invalid."""
    found: list[str] = _EXPRESSION.findall(command)
    numbers = iter(range(len(found)))
    try:
        words = shlex.split(_EXPRESSION.sub(lambda _: f"\0{next(numbers)}\0", command))
    except ValueError as error:
        raise Invalid([Fault("the command", f"is no command line: {error}")]) from None
    return [re.sub("\0([0-9]+)\0", lambda match: found[int(match[1])], word) for word in words]
