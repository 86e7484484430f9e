"""The table of promises by kernels has what the machines report, and each promise has tests that exist."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.machines import branches, report
from tests.machines.promises import PROMISES
from tests.machines.report import Case

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
JUNIT = """\
<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite name="pytest">
<testcase classname="tests.e2e.test_kernel" name="test_one" time="0.1" />
<testcase classname="tests.e2e.test_hung" name="test_two[True]"><failure message="assert 1">x</failure></testcase>
<testcase classname="tests.e2e.test_hung.TestClass" name="test_three"><skipped message="no room">x</skipped></testcase>
<testcase classname="tests.machines.installed" name="test_four"><error message="failed on setup">x</error></testcase>
</testsuite></testsuites>
"""
CASES = [
    Case("tests/e2e/test_kernel.py", "test_one", "passed"),
    Case("tests/e2e/test_hung.py", "test_two[True]", "failed", "assert 1"),
    Case("tests/e2e/test_hung.py", "TestClass.test_three", "skipped", "no room"),
    Case("tests/machines/installed.py", "test_four", "failed", "failed on setup"),
]


def test_results_are_read_from_what_pytest_writes(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(JUNIT)
    assert report.cases(tmp_path / "junit.xml") == CASES


def test_the_table_has_a_row_for_each_promise_and_a_column_for_each_kernel() -> None:
    lines = report.table({"6.1.0-1": CASES, "6.12.0-2": []}).splitlines()
    assert lines[0] == "| promise | 6.1.0-1 | 6.12.0-2 |"
    assert len(lines) == 2 + 3, "of the other promises, no test was run"
    assert "| what the kernel lacks is said | 1 passed | not run |" in lines
    assert (
        "| hung filesystems hold up nobody else | 0 passed, 1 **failed**, 1 not possible: no room | not run |" in lines
    )


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
