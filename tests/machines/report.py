"""The tables of promises and branches by kernels in docs/compatibility.md, from the last results of each machine.

``python -m tests.machines.report`` writes them, if each machine has run all its tests.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from tests.machines import branches, lines
from tests.machines.promises import MACHINES, PROMISES, selection

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_ROOT = Path(__file__).parents[2]
FILE = _ROOT / "docs/compatibility.md"
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


def keep_selection(machine: str, tests: Sequence[str]) -> None:
    """Note beside its results which tests a machine has run."""
    (OUTPUT / machine / "selection").write_text("".join(f"{test}\n" for test in tests))


def is_whole(machine: str) -> bool:
    """Return whether the machine has run all that it shows."""
    wanted = selection(MACHINES[machine], smoke=False)
    noted = OUTPUT / machine / "selection"
    return noted.exists() and noted.read_text().splitlines() == wanted


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
            return Case(file, name, result, found.attrib.get("message", ""))
    return Case(file, name, "passed")


def table(results: Mapping[str, Sequence[Case]]) -> str:
    """Return the table in Markdown; `results` are those of each kernel, by its release.

    Promises of which no test ran anywhere are left out.
    """
    lines = [f"| promise | {' | '.join(results)} |", f"| --- |{' --- |' * len(results)}"]
    for promise, selectors in PROMISES.items():
        cells = [
            _cell([case for case in found if any(case.shows(each) for each in selectors)]) for found in results.values()
        ]
        if set(cells) != {_NOT_RUN}:
            lines.append(f"| {promise} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(found: Sequence[Case]) -> str:
    counts = Counter(case.result for case in found)
    parts = [f"{counts['passed']} passed"]
    parts += [f"{counts['failed']} **failed**"] if counts["failed"] else []
    reasons = dict.fromkeys(case.reason for case in found if case.result == "skipped")
    parts += [f"{counts['skipped']} not possible: {'; '.join(reasons)}"] if counts["skipped"] else []
    return ", ".join(parts) if found else _NOT_RUN


def write(results: Mapping[str, Sequence[Case]], recorded: Mapping[str, Mapping[tuple[str, str], bytes]]) -> None:
    """Write both tables into docs/compatibility.md: of the results, and of the recorded lines, by kernel."""
    text = FILE.read_text()
    for begin, rows in ((_PROMISES, table(results)), (_BRANCHES, branches.table(recorded))):
        before, found, after = text.partition(begin)
        assert found, f"{FILE} has no place for a table"
        rest = re.sub(r"\A(\|.*\n)*", "", after)
        text = before + begin + rows + rest
    FILE.write_text(text)


def main() -> int:
    if missing := [name for name in MACHINES if not is_whole(name)]:
        print(f"not all tests were run on {', '.join(missing)}: run python -m tests.machines", file=sys.stderr)
        return 1
    results = {kernel(name): cases(name) for name in MACHINES}
    write(results, {kernel(name): lines.recorded(OUTPUT / name / "lines") for name in MACHINES})
    return 0


if __name__ == "__main__":
    sys.exit(main())
