"""What is wrong with a manifest: a sentence for each field, so that all of it can be corrected at once."""

import difflib
from collections.abc import Iterable
from typing import NamedTuple

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
