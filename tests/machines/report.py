"""The tables of promises and branches by kernels in docs/compatibility.md, from the results of the machines."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from tests.machines import branches
from tests.machines.promises import PROMISES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FILE = Path(__file__).parents[2] / "docs/compatibility.md"
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


def cases(junit: Path) -> list[Case]:
    """Return the results in a file that pytest has written (--junitxml). Raises ParseError, OSError."""
    return [_case(element) for element in ElementTree.parse(junit).iter("testcase")]


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
