"""The branches of the code on features that a kernel may lack, and on which kernels each side was executed.

docs/architecture.md lists the branches; `tests.machines.lines` records what is executed.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.machines import lines

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.machines.kept_results import Sides

ROOT = Path(__file__).parents[2]
_PACKAGE = "fusermount3_broker"
NOWHERE = "nowhere"


class Branch(NamedTuple):
    """A function with two sides. Each side is known by the beginning of a line that only this side executes to its end;
    among lines that begin alike, the last one counts."""

    feature: str
    module: str
    function: str
    with_it: str
    without_it: str

    @property
    def key(self) -> tuple[str, str]:
        return f"{_PACKAGE}.{self.module}", self.function

    @property
    def name(self) -> str:
        """How tables name it."""
        return f"{self.module.rpartition('.')[2]}.{self.function}"

    def sides(self, marks: bytes) -> tuple[bool, bool]:
        """Return whether the side with the feature, and the one without it, were executed."""
        text = source(self.module, self.function)
        with_it, without_it = (marks[_last_that_begins(text, side)] for side in (self.with_it, self.without_it))
        return bool(with_it & lines.DONE), bool(without_it & lines.DONE)


@cache
def source(module: str, function: str) -> list[str]:
    """Return the lines of a function of the broker, without indentation. Raises LookupError if there is none."""
    text = (ROOT / "broker" / _PACKAGE / f"{module.replace('.', '/')}.py").read_text()
    nodes: list[ast.stmt] = ast.parse(text).body
    found: ast.stmt | None = None
    for name in function.split("."):
        found = next(node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name)
        nodes = found.body
    assert isinstance(found, ast.FunctionDef)
    first = min([found.lineno, *(each.lineno for each in found.decorator_list)])
    return [line.strip() for line in text.splitlines()[first - 1 : found.end_lineno]]


def _last_that_begins(text: list[str], beginning: str) -> int:
    return max(number for number, line in enumerate(text) if line.startswith(beginning))


BRANCHES = (
    Branch("SO_PEERPIDFD", "front.peer", "_pidfd", "return int(struct.unpack", "return pidfd_of_pid("),
    Branch("SO_PEERPIDFD", "mounter.namespaces", "pidfd_of_peer", "return int(struct.unpack", "return given"),
    Branch("MOVE_MOUNT_BENEATH", "mounter.volume_targets", "replace", "return True", "return False"),
    Branch(
        "FSCONFIG_CMD_CREATE_EXCL",
        "mounter.filesystem",
        "_create_superblock",
        "syscalls.fsconfig(context, exclusive,",
        "syscalls.fsconfig(context, shared[0],",
    ),
    Branch(
        "FUSE_ALLOW_IDMAP",
        "mounter.tombstone",
        "_initialization",
        "flags, flags2 = _INIT_EXT",
        "flags, flags2 = 0, 0",
    ),
    Branch("statmount(2)", "mounter.mount_tree", "hidden_by", "found =", "types:"),
    Branch("statmount(2)", "mounter.mount_tree", "_type_and_options", "status =", "line ="),
    Branch("statmount(2)", "mounter.mount_tree", "_parent_of", "status =", "line ="),
    Branch("statmount(2)", "mounter.mount_tree", "_is_covered", "here =", "places ="),
    Branch("fuse_connection in fdinfo", "mounter.fuse_connections", "may_serve", "return each", "possible = each"),
    Branch(
        "clones of detached mounts",
        "mounter.mounting",
        "Volume.attach",
        "copy = volume_targets.private_copy(",
        "copy = os.dup(",
    ),
)


def table(kernels: Mapping[str, str], executed: Mapping[str, Mapping[str, Sides]]) -> str:
    """Return the table in Markdown: on which kernels each side was executed.

    `kernels` has the kernel of each machine, `executed` the sides of each branch, by its name and that of the machine.
    """
    rows = ["| feature | function | executed with it | executed without it |", "| --- | --- | --- | --- |"]
    for branch in BRANCHES:
        sides = executed.get(branch.name, {})
        with_it, without_it = (
            ", ".join(kernel for name, kernel in kernels.items() if name in sides and getattr(sides[name], side))
            for side in ("with_it", "without_it")
        )
        rows.append(f"| `{branch.feature}` | `{branch.name}` | {with_it or NOWHERE} | {without_it or NOWHERE} |")
    return "\n".join(rows) + "\n"


def create(directory: str) -> None:
    """Prepare a directory in which the lines of all branches are recorded."""
    lines.create(Path(directory), [branch.key for branch in BRANCHES])
