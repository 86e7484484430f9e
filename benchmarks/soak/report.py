"""The observations of a soak, which of them are excused, and the page that reports them."""

import math
import os
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.lab.callers import Seen, Trouble
from tests.lab.dying import Died
from tests.lab.load import Holding

MIB = 1024 * 1024
#: The most children that the mounter may have, as docs/security.md promises.
MOST_CHILDREN = 128
#: Maximum number of problems in the report.
MOST_SHOWN = 40

#: The message to callers whose mount is refused because the broker can't write its table (docs/messages.md).
NO_SPACE = re.compile(r"mount failed: the broker can't write its table of mounts in \S+: No space left on device")
ANYTHING = re.compile("")

REFUSED = "mounts refused because the broker's disk was full"
KILLED_ALONG = "calls that were killed together with all of the broker"


@dataclass
class Ordeal:
    """A period, by the monotonic clock, in which calls may fail with a matching text; `row` counts them."""

    row: str
    text: re.Pattern[str]
    begun: float
    ended: float = math.inf

    def excuses(self, trouble: Trouble) -> bool:
        """Return whether the call was under way in that period, and failed with a matching text."""
        overlaps = trouble.begun <= self.ended and trouble.ended >= self.begun
        return overlaps and self.text.search(" ".join(trouble.text.split())) is not None


def excuse(troubles: Iterable[Trouble], ordeals: Sequence[Ordeal]) -> tuple[list[Trouble], Counter[str]]:
    """Return the troubles that no ordeal excuses, and the number of the others, by row."""
    remaining: list[Trouble] = []
    excused: Counter[str] = Counter()
    for trouble in troubles:
        row = next((ordeal.row for ordeal in ordeals if ordeal.excuses(trouble)), None)
        if row is None:
            remaining.append(trouble)
        else:
            excused[row] += 1
    return remaining, excused


@dataclass
class Report:
    """The events of a soak. `started` is its start, by the monotonic clock; `at_once` is how many mounts die together.

    `faults` has every kind of fault, with the number of times that it was survived.
    """

    seed: int
    minutes: float
    at_once: int
    started: float
    faults: Counter[str] = field(default_factory=Counter)
    seen: Seen = field(default_factory=Seen)
    #: Mounts made through the broker that it does not list.
    unknown: list[Trouble] = field(default_factory=list)
    ordeals: list[Ordeal] = field(default_factory=list)
    excused: Counter[str] = field(default_factory=Counter)
    #: Seconds until the mounts of a killed program were gone, and until those of very many at once were.
    gone: list[float] = field(default_factory=list)
    died: list[Died] = field(default_factory=list)
    #: Requests of the flush attack, and the most children that the mounter has had.
    attacks: int = 0
    children: int = 0
    cycles: int = 0
    begin: Holding | None = None
    end: Holding | None = None

    def excuse(self) -> None:
        """Remove the observations that the ordeals excuse."""
        self.seen.errors, excused = excuse(self.seen.errors, self.ordeals)
        self.excused += excused

    def problems(self) -> list[str]:
        """Return the violations, in the order in which they were seen; of similar ones, the first."""
        kinds = {
            "failed": self.seen.errors,
            "lost": self.seen.lost,
            "leaked": self.seen.leaked,
            "unknown": self.unknown,
        }
        found = sorted((trouble.begun, trouble, kind) for kind, troubles in kinds.items() for trouble in troubles)
        groups: dict[tuple[str, str], list[Trouble]] = {}
        for _, trouble, kind in found:
            groups.setdefault(alike(trouble, kind), []).append(trouble)
        return [self._told(kind, troubles) for (kind, _), troubles in groups.items()]

    def _told(self, kind: str, troubles: Sequence[Trouble]) -> str:
        first, *others = troubles
        when = f"{first.begun - self.started:.1f} to {first.ended - self.started:.1f} s"
        again = f" (and {len(others)} like it)" if others else ""
        return f"{when}: {kind}{again}: {' '.join(first.text.split())}"

    def good(self) -> bool:
        return not self.problems()

    def markdown(self) -> str:
        """Return the report for docs/reliability.md."""
        faults = [(kind, f"{count}") for kind, count in sorted(self.faults.items())]
        problems = self.problems()
        shown = "".join(f"    {text}\n" for text in problems[:MOST_SHOWN])
        if len(problems) > MOST_SHOWN:
            shown += f"    and {len(problems) - MOST_SHOWN} more\n"
        return (
            f"{self.minutes:g} minutes with seed {self.seed}; again: `make soak MINUTES={self.minutes:g} "
            f"SEED={self.seed}`. Linux {os.uname().release}, {os.cpu_count()} processors.\n\n"
            f"{table('what', 'figure', self._rows())}\n{table('fault', 'times', faults)}\n{shown}"
        )

    def _rows(self) -> list[tuple[str, str]]:
        assert self.begin, "the run has not begun"
        assert self.end, "the run has not ended"
        return [
            ("faults survived", f"{self.faults.total()}"),
            ("mounts and unmounts by callers", f"{len(self.seen.mounts) + len(self.seen.unmounts)}"),
            ("mounts and unmounts by FUSE programs in containers", f"{2 * self.cycles}"),
            ("lost mounts", f"{len(self.seen.lost)}"),
            ("leaked mounts", f"{len(self.seen.leaked)}"),
            ("mounts unknown to the broker", f"{len(self.unknown)}"),
            ("calls that failed", f"{len(self.seen.errors)}"),
            (REFUSED, f"{self.excused[REFUSED]}"),
            (KILLED_ALONG, f"{self.excused[KILLED_ALONG]}"),
            ("dead mounts gone after, worst", seconds(self.gone)),
            (f"… {self.at_once} that died at once", seconds([died.seconds for died in self.died])),
            ("requests of the flush attack", f"{self.attacks}"),
            (f"children of the mounter, most (at most {MOST_CHILDREN})", f"{self.children}"),
            ("a caller's mount, p50 and p99", milliseconds(self.seen.mounts)),
            ("a caller's unmount, p50 and p99", milliseconds(self.seen.unmounts)),
            ("PSS of the broker, at the beginning and the end", f"{mib(self.begin.pss)}, {mib(self.end.pss)}"),
            ("RSS of its processes, added up", f"{mib(self.begin.rss)}, {mib(self.end.rss)}"),
            ("its descriptors", f"{self.begin.descriptors}, {self.end.descriptors}"),
            ("its processes", f"{self.begin.processes}, {self.end.processes}"),
        ]


def alike(trouble: Trouble, kind: str) -> tuple[str, str]:
    """Return what two troubles have in common that differ by numbers, ids and times only."""
    return kind, re.sub(r"\b[0-9a-f]{8,}\b|\d+", "", trouble.text)


def table(what: str, figure: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = [(what, figure), ("---", "---"), *rows]
    return "".join(f"| {left} | {right} |\n" for left, right in lines)


def seconds(values: Sequence[float]) -> str:
    return f"{max(values):.1f} s" if values else "none"


def milliseconds(values: list[float]) -> str:
    if len(values) < 2:
        return "none"
    percentiles = statistics.quantiles(values, n=100)
    return f"{percentiles[49]:.0f} ms, {percentiles[98]:.0f} ms"


def mib(size: int) -> str:
    return f"{size / MIB:.1f} MB"
