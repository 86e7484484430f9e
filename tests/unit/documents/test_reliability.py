"""Each test that docs/reliability.md names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NAMED = re.findall(r"`([\w/]*test_\w+\.py)::(\w+)`", (ROOT / "docs/reliability.md").read_text())


@cache
def functions_in(file: Path) -> set[str]:
    return {each.name for each in ast.walk(ast.parse(file.read_text())) if isinstance(each, ast.FunctionDef)}


def test_some_are_named() -> None:
    assert len(NAMED) > 50


@pytest.mark.parametrize(("file", "test"), NAMED, ids=[f"{file}::{test}" for file, test in NAMED])
def test_it_exists(file: str, test: str) -> None:
    assert any(test in functions_in(path) for path in (ROOT / "tests").rglob(file))
