"""The table of promises by kernels has what the machines report, and each promise has tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.machines import branches, report
from tests.machines.promises import MACHINES, PROMISES, selection
from tests.machines.report import Case

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.machine import Machine

ROOT = Path(__file__).parents[2]
JUNIT = """\
<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite name="pytest">
<testcase classname="tests.e2e.test_kernel" name="test_one" time="0.1" />
<testcase classname="tests.e2e.test_sandbox" name="test_the_front_cannot[1]"><failure message="no"/></testcase>
<testcase classname="tests.e2e.test_restart.TestClass" name="test_3"><skipped message="no room">x</skipped></testcase>
<testcase classname="tests.machines.installed" name="test_four"><error message="failed on setup">x</error></testcase>
</testsuite></testsuites>
"""
CASES = [
    Case("tests/e2e/test_kernel.py", "test_one", "passed"),
    Case("tests/e2e/test_sandbox.py", "test_the_front_cannot[1]", "failed", "no"),
    Case("tests/e2e/test_restart.py", "TestClass.test_3", "skipped", "no room"),
    Case("tests/machines/installed.py", "test_four", "failed", "failed on setup"),
]


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(report, "OUTPUT", tmp_path)
    for name in MACHINES:
        (tmp_path / name).mkdir()
    return tmp_path


def test_results_are_read_from_what_pytest_writes(output: Path) -> None:
    (output / "sid/junit.xml").write_text(JUNIT)
    assert report.cases("sid") == CASES


def test_a_machine_that_has_not_run_all_its_tests_is_in_no_table(
    output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, machine in MACHINES.items():
        report.keep_selection(name, selection(machine, smoke=name == "trixie"))
    (output / "sid/selection").unlink()
    assert report.main() == 1
    assert "not all tests were run on trixie, sid:" in capsys.readouterr().err


def test_the_table_tells_kernels_of_the_same_release_apart(output: Path) -> None:
    for name in ("trixie", "selinux"):
        (output / name / "kernel").write_text("6.12.0-1\n")
    assert [report.kernel(name) for name in ("trixie", "selinux")] == ["6.12.0-1", "6.12.0-1, SELinux"]


def test_the_table_has_a_row_for_each_promise_and_a_column_for_each_kernel() -> None:
    lines = report.table({"6.1.0-1": CASES, "6.12.0-2": []}).splitlines()
    assert lines[0] == "| promise | 6.1.0-1 | 6.12.0-2 |"
    assert lines[2:] == [
        "| what the kernel lacks is said | 1 passed | not run |",
        "| the package is installed, the service serves | 0 passed, 1 **failed** | not run |",
        "| mounts stay when a process is killed | 0 passed, 1 not possible: no room | not run |",
        "| the front is confined | 0 passed, 1 **failed** | not run |",
    ], "of the other promises, no test was run"


def test_the_table_takes_the_place_of_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    first, second = "<!-- The table is written", "<!-- The table of branches is written"
    page.write_text(
        f"before\n{first} by make test-kernels. -->\n\nbetween\n\n{second} by make test-kernels. -->\n\nafter"
    )
    monkeypatch.setattr(report, "FILE", page)
    for kernel in ("6.1", "6.12"):
        results, recorded = {kernel: CASES}, {kernel: {branch.key: bytes(512) for branch in branches.BRANCHES}}
        report.write(results, recorded)
        text = page.read_text()
        assert text.startswith(f"before\n{first}")
        assert f"\n\nbetween\n\n{second}" in text
        assert text.endswith("\n\nafter")
        assert report.table(results) in text
        assert branches.table(recorded) in text
    assert "6.1 |" not in text


def named_in(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            yield from (f"{node.name}::{each.name}" for each in node.body if isinstance(each, ast.FunctionDef))


@pytest.mark.parametrize("selector", [each for selectors in PROMISES.values() for each in selectors])
def test_each_promise_has_tests_that_exist(selector: str) -> None:
    file, _, name = selector.partition("::")
    found = list(named_in(ast.parse((ROOT / file).read_text())))
    assert name in found if name else any(each.startswith("test_") for each in found)


def end_to_end_tests_that_depend_on_the_kernel() -> Iterator[str]:
    """Yield what the rows of docs/security.md name that also name a release of Linux."""
    for row in (ROOT / "docs/security.md").read_text().splitlines():
        if row.startswith("|") and re.search(r"Linux [56]\.", row):
            for file, test in re.findall(r"`(test_\w+\.py)::(\w+)`", row):
                if (ROOT / "tests/e2e" / file).exists():
                    yield f"tests/e2e/{file}::{test}"


def test_what_security_says_of_a_kernel_is_attacked_on_kernels_of_both_sides() -> None:
    named = list(end_to_end_tests_that_depend_on_the_kernel())
    assert len(named) >= 2
    for name in ("bookworm", "trixie", "sid"):
        assert set(named) <= set(selection(MACHINES[name], smoke=False))


@pytest.mark.parametrize("machine", MACHINES.values(), ids=list(MACHINES))
def test_each_machine_has_tests_of_which_some_are_run_in_ci(machine: Machine) -> None:
    assert set() < set(selection(machine, smoke=True)) <= set(selection(machine, smoke=False))


def test_each_promise_is_shown_on_a_machine() -> None:
    shown = {selector for machine in MACHINES.values() for selector in selection(machine, smoke=False)}
    assert shown == {selector for selectors in PROMISES.values() for selector in selectors}
