"""What is wrong with a manifest: a sentence for each field, so that all of it can be corrected at once."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

#: The most of a manifest's text that a sentence quotes, in characters.
_LONGEST_QUOTE = 80


class Fault(NamedTuple):
    """`field` is a path as the API server writes it, such as `spec.parameters.bucket`; empty: the whole manifest."""

    field: str
    text: str

    def __str__(self) -> str:
        return f"{self.field}: {self.text}" if self.field else self.text


class Invalid(Exception):
    """A manifest can't be used, for at least one reason."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("; ".join(map(str, self.faults)))


def quoted(value: object) -> str:
    """Return what a sentence quotes of `value`, on one line: its beginning, if it is long."""
    text = value if isinstance(value, str) else repr(value)
    return repr(text if len(text) <= _LONGEST_QUOTE else f"{text[: _LONGEST_QUOTE - 1]}…")


def unknown(name: object, known: Iterable[str]) -> str:
    """Return the sentence about a name that is none of `known`, with the closest of these, if one is close."""
    near = difflib.get_close_matches(str(name), known, 1)
    return f"unknown {quoted(name)}" + (f", did you mean '{near[0]}'?" if near else "")


def object_in(parent: Mapping[str, Any], name: str, field: str, faults: list[Fault]) -> Mapping[str, Any]:
    """Return the object with this name; empty, if it is missing, or none: then there is a fault more."""
    value = parent.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        faults.append(Fault(field, f"must be an object, not {quoted(value)}"))
        return {}
    return value


def unknown_in(value: Mapping[str, Any], known: Iterable[str], field: str) -> Iterator[Fault]:
    """Yield a fault for each name in `value` that is none of `known`."""
    names = tuple(known)
    yield from (Fault(field, unknown(name, names)) for name in value if name not in names)
