"""The tables of promises and branches by kernels in docs/compatibility.md, from docs/kernels.json.

``python -m tests.machines.report`` puts the last results of each machine into that file, and writes the tables. Its
exit status is 1 if nothing is kept of a promise that a machine shows.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from tests.machines import branches, kept_results, lines
from tests.machines.kept_results import Kept, Shown, Sides
from tests.machines.promises import MACHINES, PROMISES, selection, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

_ROOT = Path(__file__).parents[2]
FILE = _ROOT / "docs/compatibility.md"
KEPT = _ROOT / "docs/kernels.json"
#: The results: a directory for each machine.
OUTPUT = _ROOT / "build/machines"
_NOT_RUN = "not run"
_PROMISES = "<!-- The table is written by make test-kernels. -->\n"
_BRANCHES = "<!-- The table of branches is written by make test-kernels. -->\n"


@dataclass(frozen=True)
class Case:
    """The result of one test: "passed", "failed" or "skipped", the latter with its reason."""

    file: str
    name: str
    result: str
    reason: str = ""

    def shows(self, selector: str) -> bool:
        """Return whether `selector`, an argument of pytest, selects this test."""
        file, _, name = selector.partition("::")
        return self.file == file and (not name or self.name.partition("[")[0] == name.replace("::", "."))


def note(machine: str, tests: Sequence[str], commit: str) -> None:
    """Note beside its results which tests of which commit a machine has run."""
    (OUTPUT / machine / "selection").write_text("".join(f"{test}\n" for test in tests))
    (OUTPUT / machine / "commit").write_text(commit)


def kernel(machine: str) -> str:
    """Return how a table names the kernel on which this machine has run."""
    release = (OUTPUT / machine / "kernel").read_text().strip()
    return f"{release}, SELinux" if MACHINES[machine].has_selinux else release


def cases(machine: str) -> list[Case]:
    """Return the results that pytest has written on a machine (--junitxml). Raises ParseError, OSError."""
    return [_case(element) for element in ElementTree.parse(OUTPUT / machine / "junit.xml").iter("testcase")]


def _case(element: ElementTree.Element) -> Case:
    words = element.attrib["classname"].split(".")
    depth = next(
        index for index, word in enumerate(words) if word.startswith("test_") or words[index - 1] == "machines"
    )
    file = "/".join(words[: depth + 1]) + ".py"
    name = ".".join([*words[depth + 1 :], element.attrib["name"]])
    for kind, result in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (found := element.find(kind)) is not None:
            return Case(file, name, result, found.attrib.get("message", "").removeprefix("not run: "))
    return Case(file, name, "passed")


def merge(kept: Kept) -> None:
    """Put the last results of each machine that has any in the place of what is kept of them. Raises OSError."""
    for name, machine in MACHINES.items():
        if not (OUTPUT / name / "selection").exists():
            continue
        ran = set((OUTPUT / name / "selection").read_text().splitlines())
        commit = (OUTPUT / name / "commit").read_text()
        kept.kernels[name] = kernel(name)
        found = cases(name)
        for promise in shown(machine):
            if set(PROMISES[promise]) <= ran:
                kept.promises.setdefault(promise, {})[name] = _shown(found, promise, commit, kernel(name))
        is_whole = set(selection(machine, smoke=False)) <= ran
        if not (OUTPUT / name / "lines").exists():  # a smoke run records none
            continue
        marks = lines.recorded(OUTPUT / name / "lines")
        for branch in branches.BRANCHES:
            sides = Sides(*branch.sides(marks[branch.key]))
            of_branch = kept.branches.setdefault(branch.name, {})
            of_branch[name] = sides if is_whole or name not in of_branch else sides.and_in(of_branch[name])


def _shown(found: Sequence[Case], promise: str, commit: str, release: str) -> Shown:
    of_promise = [case for case in found if any(case.shows(each) for each in PROMISES[promise])]
    return Shown(
        commit,
        release,
        passed=sum(case.result == "passed" for case in of_promise),
        failed=sum(case.result == "failed" for case in of_promise),
        not_possible=[case.reason for case in of_promise if case.result == "skipped"],
    )


def table(kept: Kept) -> str:
    """Return the table in Markdown: promises by kernel, and the commits at which they were shown."""
    machines = [name for name in MACHINES if name in kept.kernels]
    rows = [f"| promise | {' | '.join(kept.kernels[name] for name in machines)} | commit |"]
    rows.append(f"| --- |{' --- |' * len(machines)} --- |")
    for promise in PROMISES:
        of_promise = kept.promises.get(promise, {})
        cells = [_cell(of_promise.get(name), kept.kernels[name]) for name in machines]
        commits = dict.fromkeys(each.commit for each in of_promise.values())
        rows.append(f"| {promise} | {' | '.join(cells)} | {', '.join(commits)} |")
    return "\n".join(rows) + "\n"


def _cell(found: Shown | None, release: str) -> str:
    """Return what was shown of a promise on a machine whose last run was on this release of the kernel."""
    if not found:
        return _NOT_RUN
    parts = [f"{found.passed} passed"]
    parts += [f"{found.failed} **failed**"] if found.failed else []
    reasons = dict.fromkeys(found.not_possible)
    parts += [f"{len(found.not_possible)} not possible: {'; '.join(reasons)}"] if reasons else []
    return ", ".join(parts) + ("" if found.kernel == release else f" (on {found.kernel})")


def write(kept: Kept) -> None:
    """Write both tables into docs/compatibility.md."""
    text = FILE.read_text()
    for begin, rows in ((_PROMISES, table(kept)), (_BRANCHES, branches.table(kept.kernels, kept.branches))):
        before, found, after = text.partition(begin)
        assert found, f"{FILE} has no place for a table"
        rest = re.sub(r"\A(\|.*\n)*", "", after)
        text = before + begin + rows + rest
    FILE.write_text(text)


def main() -> int:
    kept = kept_results.load(KEPT)
    merge(kept)
    kept_results.store(kept, KEPT)
    write(kept)
    missing = kept.missing({name: shown(machine) for name, machine in MACHINES.items()})
    for name, promises in missing.items():
        print(f"{name} has not run: {'; '.join(promises)}", file=sys.stderr)
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
