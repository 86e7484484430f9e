"""Label selectors, as a VolumeTemplate chooses namespaces by them (apimachinery, meta/v1 LabelSelector). Pure."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fusermount3_controller.faults import Fault, quoted, unknown

#: The operators, and whether each has values.
OPERATORS = {"In": True, "NotIn": True, "Exists": False, "DoesNotExist": False}


class Requirement(NamedTuple):
    """What one label must be; `operator` is one of `OPERATORS`."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    def is_met(self, labels: Mapping[str, str]) -> bool:
        if self.operator == "Exists":
            return self.key in labels
        if self.operator == "DoesNotExist":
            return self.key not in labels
        return (labels.get(self.key) in self.values) == (self.operator == "In")


#: All of them must be met; without any, the selector matches everything.
Selector = tuple[Requirement, ...]


def matches(selector: Selector, labels: Mapping[str, str]) -> bool:
    return all(requirement.is_met(labels) for requirement in selector)


def parse(given: Mapping[str, Any], field: str, faults: list[Fault]) -> Selector:
    """Return the selector; what is wrong with it is appended to `faults`, by `field`."""
    known = ("matchExpressions", "matchLabels")
    faults += [Fault(field, unknown(name, known)) for name in given if name not in known]
    labels, expressions = given.get("matchLabels") or {}, given.get("matchExpressions") or []
    if not isinstance(labels, Mapping) or not all(isinstance(each, str) for pair in labels.items() for each in pair):
        faults.append(Fault(f"{field}.matchLabels", "must be strings by the names of labels, in quotes"))
        labels = {}
    if not isinstance(expressions, list):
        faults.append(Fault(f"{field}.matchExpressions", f"must be a list, not {quoted(expressions)}"))
        expressions = []
    result = [Requirement(key, "In", (value,)) for key, value in labels.items()]
    for index, expression in enumerate(expressions):
        result += _requirement(expression, f"{field}.matchExpressions[{index}]", faults)
    return tuple(result)


def _requirement(given: object, field: str, faults: list[Fault]) -> Iterator[Requirement]:
    if not isinstance(given, Mapping):
        faults.append(Fault(field, f"must be an object, not {quoted(given)}"))
        return
    known = Requirement._fields
    found = [Fault(field, unknown(name, known)) for name in given if name not in known]
    key, operator, values = given.get("key"), given.get("operator"), given.get("values") or []
    if not isinstance(key, str) or not key:
        found.append(Fault(f"{field}.key", "must be the name of a label"))
    if not isinstance(operator, str) or operator not in OPERATORS:
        found.append(Fault(f"{field}.operator", f"must be {' or '.join(OPERATORS)}, not {quoted(operator)}"))
    elif not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        found.append(Fault(f"{field}.values", "must be a list of strings"))
    elif OPERATORS[operator] != bool(values):
        found.append(Fault(f"{field}.values", f"{operator} needs {'some' if OPERATORS[operator] else 'none'}"))
    faults += found
    if not found:
        yield Requirement(str(key), str(operator), tuple(values))
