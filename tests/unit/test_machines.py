"""The table of promises by kernels has what the machines report, and each promise has tests that exist."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.machines import branches, kept_results, report
from tests.machines.kept_results import Kept, Shown, Sides
from tests.machines.promises import INSTALLED, LACKING, MACHINES, NEW, PROMISES, TOO_OLD, selection, selectors_of, shown
from tests.machines.report import Case

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.machine import Machine

ROOT = Path(__file__).parents[2]
PROMISE_OF_TWO_FILES = NEW
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


def results_of(output: Path, machine: str, ran: list[str], commit: str = "abc1234", kernel: str = "6.1.0-1") -> None:
    """Write results as a run of these tests does: all of them passed."""
    directory = output / machine
    cases = "".join(
        f'<testcase classname="{file.removesuffix(".py").replace("/", ".")}" name="{name or "test_any"}"/>'
        for file, _, name in (each.partition("::") for each in ran)
    )
    (directory / "junit.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    (directory / "selection").write_text("".join(f"{each}\n" for each in ran))
    (directory / "commit").write_text(commit)
    (directory / "kernel").write_text(f"{kernel}\n")
    if not (directory / "lines").exists():
        branches.create(str(directory / "lines"))


def test_a_promise_is_kept_with_its_commit_and_kernel_until_it_runs_again(output: Path) -> None:
    kept = Kept()
    results_of(output, "sid", selection(MACHINES["sid"], smoke=False), kernel="6.1.0-1")
    report.merge(kept)
    assert kept.missing({"sid": shown(MACHINES["sid"])}) == {}
    results_of(output, "sid", selectors_of([LACKING]), "def5678", kernel="6.1.0-2")
    report.merge(kept)
    assert kept.promises[LACKING]["sid"] == Shown("def5678", "6.1.0-2", 1, 0, [])
    assert kept.promises[INSTALLED]["sid"] == Shown("abc1234", "6.1.0-1", 1, 0, [])
    assert f"| {LACKING} | 1 passed | def5678 |" in report.table(kept)
    assert f"| {INSTALLED} | 1 passed (on 6.1.0-1) | abc1234 |" in report.table(kept)


def test_a_promise_of_which_only_some_tests_ran_is_not_shown_by_them(output: Path) -> None:
    kept = Kept()
    results_of(output, "sid", selectors_of([PROMISE_OF_TWO_FILES])[:1])
    report.merge(kept)
    assert kept.promises == {}
    assert f"| {PROMISE_OF_TWO_FILES} | not run |  |" in report.table(kept)
    assert PROMISE_OF_TWO_FILES in kept.missing({"sid": shown(MACHINES["sid"])})["sid"]


def test_a_side_of_a_branch_stays_executed_until_a_whole_run_executes_it_no_more(output: Path) -> None:
    name = branches.BRANCHES[0].name
    kept = Kept(branches={name: {"sid": Sides(with_it=True, without_it=False)}})
    results_of(output, "sid", selectors_of([LACKING]))
    report.merge(kept)
    assert kept.branches[name]["sid"] == Sides(with_it=True, without_it=False)
    results_of(output, "sid", selection(MACHINES["sid"], smoke=False))
    report.merge(kept)
    assert kept.branches[name]["sid"] == Sides(with_it=False, without_it=False)


def test_a_smoke_run_shows_its_promises_and_leaves_what_is_kept_of_the_branches(output: Path) -> None:
    name = branches.BRANCHES[0].name
    kept = Kept(branches={name: {"bullseye": Sides(with_it=False, without_it=True)}})
    results_of(output, "bullseye", selection(MACHINES["bullseye"], smoke=True))
    shutil.rmtree(output / "bullseye/lines")
    report.merge(kept)
    assert kept.promises[TOO_OLD]["bullseye"].passed == 1
    assert kept.branches == {name: {"bullseye": Sides(with_it=False, without_it=True)}}


def test_what_is_kept_is_stored_and_loaded(tmp_path: Path) -> None:
    kept = Kept(
        {"sid": "6.1"}, {"a": {"sid": Shown("abc1234", "6.1", 1, 2, ["no room"])}}, {"b": {"sid": Sides(True, False)}}
    )
    kept_results.store(kept, tmp_path / "kept.json")
    assert kept_results.load(tmp_path / "kept.json") == kept


def test_the_page_has_the_tables_of_what_is_kept() -> None:
    kept, page = kept_results.load(report.KEPT), report.FILE.read_text()
    advice = "write it anew: python -m tests.machines.report"
    assert report.table(kept) in page, advice
    assert branches.table(kept.kernels, kept.branches) in page, advice


def test_each_machine_has_shown_its_promises_and_none_failed() -> None:
    kept = kept_results.load(report.KEPT)
    assert kept.missing({name: shown(machine) for name, machine in MACHINES.items()}) == {}, (
        "run python -m tests.machines --promise, then python -m tests.machines.report"
    )
    assert [promise for promise, found in kept.promises.items() if any(each.failed for each in found.values())] == []


def test_each_side_of_a_branch_was_executed_on_some_machine() -> None:
    executed = kept_results.load(report.KEPT).branches
    for branch in branches.BRANCHES:
        sides = executed[branch.name].values()
        assert any(each.with_it for each in sides), branch.name
        assert any(each.without_it for each in sides), branch.name


def test_the_table_tells_kernels_of_the_same_release_apart(output: Path) -> None:
    for name in ("trixie", "selinux"):
        (output / name / "kernel").write_text("6.12.0-1\n")
    assert [report.kernel(name) for name in ("trixie", "selinux")] == ["6.12.0-1", "6.12.0-1, SELinux"]


def test_the_table_has_a_row_for_each_promise_and_a_column_for_each_machine() -> None:
    passed, failed = Shown("a", "6.1", 1, 0, []), Shown("b", "6.1", 0, 2, ["no room", "no room", "no time"])
    rows = report.table(Kept({"bookworm": "6.1", "sid": "6.12"}, {LACKING: {"bookworm": passed, "sid": failed}}))
    assert rows.splitlines()[0] == "| promise | 6.1 | 6.12 | commit |"
    assert len(rows.splitlines()) == 2 + len(PROMISES)
    cell = "0 passed, 2 **failed**, 3 not possible: no room; no time (on 6.1)"
    assert f"\n| {LACKING} | 1 passed | {cell} | a, b |\n" in rows


def test_the_tables_take_the_place_of_the_last_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    first, second = "<!-- The table is written", "<!-- The table of branches is written"
    page.write_text(
        f"before\n{first} by make test-kernels. -->\n\nbetween\n\n{second} by make test-kernels. -->\n\nafter"
    )
    monkeypatch.setattr(report, "FILE", page)
    for kernel in ("6.1", "6.12"):
        kept = Kept({"sid": kernel}, {LACKING: {"sid": Shown("a", kernel, 1, 0, [])}})
        report.write(kept)
        text = page.read_text()
        assert text.startswith(f"before\n{first}")
        assert f"\n\nbetween\n\n{second}" in text
        assert text.endswith("\n\nafter")
        assert report.table(kept) in text
        assert branches.table(kept.kernels, kept.branches) in text
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
    of_machines = {selector for machine in MACHINES.values() for selector in selection(machine, smoke=False)}
    assert of_machines == {selector for selectors in PROMISES.values() for selector in selectors}
