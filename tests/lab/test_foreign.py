"""Programs for arm64 run in a namespace of their own, and this machine's own setting stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.commands import run
from tests.lab.foreign import run_emulating

pytestmark = pytest.mark.e2e

SOURCE = """\
#include <stdio.h>
int main(void) {
    char line[99];
    return fgets(line, sizeof line, fopen("/proc/self/uid_map", "r")) && puts(line) >= 0 ? 0 : 1;
}
"""
SETTING = Path("/proc/sys/fs/binfmt_misc")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    program = tmp_path / "program"
    run(["aarch64-linux-gnu-gcc", "-static", "-x", "c", "-", "-o", program], input=SOURCE)
    return program


def test_a_program_for_arm64_sees_all_users(program: Path) -> None:
    before = sorted(SETTING.iterdir())
    result = run_emulating([program])
    assert (result.returncode, result.stdout.split()) == (0, ["0", "0", "4294967295"])
    assert sorted(SETTING.iterdir()) == before


def test_what_a_program_says_is_returned_with_its_status() -> None:
    result = run_emulating(["sh", "-c", "echo said; echo wrong >&2; exit 3"])
    assert (result.returncode, result.stdout) == (3, "said\nwrong\n")
