"""CONTRIBUTING.md explains how to run tests: one is run as described. The other commands there run this test."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.e2e.documented import block

ROOT = Path(__file__).parents[3]
ONE_TEST, *OTHERS = block("CONTRIBUTING.md", ".venv/bin/python").text.splitlines()


def test_one_test_is_run() -> None:
    program, *words = ONE_TEST.split()
    assert program == ".venv/bin/python"
    command = [sys.executable, *words, "-p", "no:cacheprovider"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert re.search(r"^=+ [1-9]\d* passed, \d+ deselected in ", result.stdout, re.MULTILINE), result.stdout
    assert result.returncode == 0


def test_what_the_other_commands_name_is_there() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in OTHERS:
        program, *words = command.split()
        assert words[-1] in targets if program == "make" else (ROOT / words[-1]).exists()
