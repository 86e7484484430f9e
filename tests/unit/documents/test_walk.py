"""The walk in docs/architecture.md passes functions that exist, and never goes back and forth."""

from __future__ import annotations

import ast
import re
from collections import Counter
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/architecture.md").read_text()
WALK = PAGE.partition("## A mount, function by function\n")[2].partition("\n## ")[0]
FOLDERS = {
    "Proxy": ROOT / "fusermount3_proxy",
    "Front": ROOT / "broker/fusermount3_broker/front",
    "Mounter": ROOT / "broker/fusermount3_broker/mounter",
}
#: Process, module, function.
STEPS = [
    (process, *name.rsplit(".", 1))
    for process, text in re.findall(r"^\*\*(\w+)\*\*(.*?)(?=^\*\*|\Z)", WALK, re.MULTILINE | re.DOTALL)
    for name in re.findall(r"`([a-z_.]+\.[a-z_]+)`", text)
]


def test_it_leads_through_all_three_processes_and_back() -> None:
    assert [process for process, _ in groupby(STEPS, key=lambda step: step[0])] == [
        *("Proxy", "Front", "Mounter"),
        *("Front", "Mounter", "Proxy"),
    ]


@pytest.mark.parametrize("step", STEPS, ids=".".join)
def test_each_function_is_there(step: tuple[str, str, str]) -> None:
    process, module, function = step
    tree = ast.parse((FOLDERS[process] / f"{module.replace('.', '/')}.py").read_text())
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    assert function in {node.name for node in functions}


def test_no_function_is_passed_twice() -> None:
    assert [step for step, times in Counter(STEPS).items() if times > 1] == []


def test_no_module_is_visited_more_than_twice() -> None:
    visits = Counter(place for place, _ in groupby(STEPS, key=lambda step: step[:2]))
    assert {place for place, times in visits.items() if times > 2} == set()
