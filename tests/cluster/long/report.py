"""The report of `make test-cluster-long` in docs/reliability.md, from what pytest has written (--junitxml)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_VERSIONS = ("Kubernetes", "containerd", "runc", "crun", "Linux")


@dataclass(frozen=True)
class Case:
    """The result of one test: "passed", "failed" or "not run"; with its figures, and why it was not run."""

    name: str
    result: str
    figures: Sequence[tuple[str, str]] = ()
    reason: str = ""
    module: str = ""


def cases(file: Path) -> list[Case]:
    """Return the results in the order of the run. Raises ParseError, OSError."""
    return [_case(element) for element in ElementTree.parse(file).iter("testcase")]


def about(*files: Path) -> dict[str, str]:
    """Return what the tests have recorded of the node, and "minutes": of several runs, all together."""
    suites = [next(ElementTree.parse(file).iter("testsuite")) for file in files]
    properties = [each for suite in suites for each in suite.findall("properties/property")]
    found = {each.attrib["name"]: each.attrib["value"] for each in properties}
    return found | {"minutes": f"{sum(float(suite.attrib['time']) for suite in suites) / 60:.0f}"}


def _case(element: ElementTree.Element) -> Case:
    name, module = element.attrib["name"], element.attrib.get("classname", "").rpartition(".")[2]
    figures = [(each.attrib["name"], each.attrib["value"]) for each in element.findall("properties/property")]
    for kind, result in (("failure", "failed"), ("error", "failed"), ("skipped", "not run")):
        if (found := element.find(kind)) is not None:
            return Case(name, result, figures, found.attrib.get("message", ""), module)
    return Case(name, "passed", figures, module=module)


def markdown(node: Mapping[str, str], results: Sequence[Case]) -> str:
    """Return the report: what it was run with, and a row for each test."""
    versions = ", ".join(f"{name} {node[name]}" for name in _VERSIONS)
    lines = [f"{versions}, {node['processors']} processors; {node['minutes']} minutes.", ""]
    lines += ["| test | result | figures |", "| --- | --- | --- |"]
    lines += [f"| {_words(each.name)} | {_result(each)} | {_figures(each)} |" for each in results]
    return "\n".join(lines) + "\n"


def _words(name: str) -> str:
    """Return the name of a test as words, with its parameter."""
    plain, _, parameter = name.removeprefix("test_").removesuffix("]").partition("[")
    return plain.replace("_", " ") + (f": {parameter}" if parameter else "")


def _result(case: Case) -> str:
    if case.result == "not run":
        return f"not run: {' '.join(case.reason.removeprefix('not run: ').split())}".replace("|", "\\|")
    return f"**{case.result}**" if case.result == "failed" else case.result


def _figures(case: Case) -> str:
    return "; ".join(f"{name}: {value}" for name, value in case.figures).replace("|", "\\|")
