"""What the promises' tests have shown on each machine, as docs/kernels.json keeps it from one run to the next.

A run of all machines takes hours, so a run may also be of one machine, or of a promise that is new. What it has run
takes the place of what is kept; the rest stays, with the commit and the kernel on which it was shown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cattrs.preconf.json import make_converter

if TYPE_CHECKING:
    from pathlib import Path

_converter = make_converter()


@dataclass(frozen=True)
class Shown:
    """What the tests of a promise have shown on a machine."""

    commit: str
    kernel: str
    passed: int
    failed: int
    not_possible: list[str]
    """The reason of each test that could not run there."""


@dataclass(frozen=True)
class Sides:
    """Whether a machine has executed the side of a branch with the feature, and the one without it, in some run."""

    with_it: bool
    without_it: bool

    def and_in(self, other: Sides) -> Sides:
        return Sides(self.with_it or other.with_it, self.without_it or other.without_it)


@dataclass
class Kept:
    """The results of all machines, by name."""

    kernels: dict[str, str] = field(default_factory=dict)
    """The kernel of each machine's last run."""
    promises: dict[str, dict[str, Shown]] = field(default_factory=dict)
    """By promise, then by machine."""
    branches: dict[str, dict[str, Sides]] = field(default_factory=dict)
    """By module and function, then by machine."""

    def missing(self, shown: dict[str, list[str]]) -> dict[str, list[str]]:
        """Return the promises of which nothing is kept, of those that each machine shows; machines without are out."""
        lacking = {
            machine: [promise for promise in promises if machine not in self.promises.get(promise, {})]
            for machine, promises in shown.items()
        }
        return {machine: promises for machine, promises in lacking.items() if promises}


def store(kept: Kept, file: Path) -> None:
    file.write_text(_converter.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def load(file: Path) -> Kept:
    """Return what `store` has written. Raises OSError, ValueError."""
    return _converter.loads(file.read_text(), Kept)
