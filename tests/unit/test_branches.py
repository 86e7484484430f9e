"""The branches on features of the kernel: their lines are recorded in all processes, and architecture.md lists them."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fusermount3_broker.mounter import mount_tree
from tests.lab.commands import run
from tests.lab.forked import ending_afterwards
from tests.machines import branches, lines
from tests.machines.branches import BRANCHES, Branch
from tests.machines.kept_results import Sides

if TYPE_CHECKING:
    from collections.abc import Iterator

BRANCH = Branch("statmount(2)", "mounter.mount_tree", "_copy_of", "flags =", "return None")
NAMED = [branch.name for branch in BRANCHES]


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "lines"
    lines.create(directory, [BRANCH.key])
    before = sys.gettrace()
    yield directory
    assert sys.gettrace() is before, "the tests' process records nothing"


def record(directory: Path, *calls: int) -> bytes:
    """Call the function with these descriptors in a process that may write nothing; return its marks."""
    if (child := os.fork()) == 0:
        with ending_afterwards():
            lines.record(str(directory))
            os.chdir("/")
            os.setresuid(65534, 65534, 65534)
            for descriptor in calls:
                with contextlib.suppress(OSError):
                    mount_tree._copy_of(descriptor)
    assert os.waitpid(child, 0)[1] == 0
    return lines.recorded(directory)[BRANCH.key]


def test_a_line_that_was_not_executed_has_no_mark(directory: Path) -> None:
    assert not any(record(directory))
    assert BRANCH.sides(lines.recorded(directory)[BRANCH.key]) == (False, False)


def test_a_line_is_done_or_has_raised(directory: Path) -> None:
    marks = record(directory, -1)
    text = branches.source(BRANCH.module, BRANCH.function)
    assert (
        marks[text.index("flags = syscalls.OPEN_TREE_CLONE | syscalls.OPEN_TREE_CLOEXEC | syscalls.AT_EMPTY_PATH")]
        == lines.DONE
    )
    assert marks[text.index('return syscalls.open_tree(entry, b"", flags)')] == lines.RAISED
    assert marks[text.index("return None")] == 0
    assert BRANCH.sides(marks) == (True, False)


def test_a_program_with_an_isolated_python_records_too(directory: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(branches.ROOT / "tests/machines")!r})
import lines
lines.record({str(directory)!r})
sys.path.insert(0, {str(branches.ROOT / "broker")!r})
from fusermount3_broker.mounter import mount_tree
mount_tree._copy_of(-1)
"""
    run([sys.executable, "-I", "-c", program], check=False)
    assert BRANCH.sides(lines.recorded(directory)[BRANCH.key]) == (True, False)


def test_without_the_file_nothing_is_recorded_and_nothing_fails(tmp_path: Path) -> None:
    before = sys.gettrace()
    lines.record(str(tmp_path / "nothing"))
    assert sys.gettrace() is before


@pytest.mark.parametrize("branch", BRANCHES, ids=NAMED)
def test_a_branch_has_both_sides(branch: Branch) -> None:
    text = branches.source(branch.module, branch.function)
    for side in (branch.with_it, branch.without_it):
        assert any(line.startswith(side) for line in text), side
    assert branch.with_it != branch.without_it


def test_architecture_md_lists_each_branch() -> None:
    page = (branches.ROOT / "docs/architecture.md").read_text()
    missing = [name for name in NAMED if f"`{name}`" not in page]
    assert missing == []


def test_the_table_names_the_kernels_that_executed_a_side() -> None:
    kernels = {"bookworm": "6.1", "sid": "6.12"}
    executed = {NAMED[0]: {"bookworm": Sides(True, True), "sid": Sides(False, True)}}
    rows = branches.table(kernels, executed).splitlines()
    assert len(rows) == 2 + len(BRANCHES)
    assert rows[2] == "| `SO_PEERPIDFD` | `peer._pidfd` | 6.1 | 6.1, 6.12 |"
    assert rows[3].endswith(f"| {branches.NOWHERE} | {branches.NOWHERE} |")
