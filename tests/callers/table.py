"""The section on callers of docs/compatibility.md: which work, written by the tests in which they did.

    .venv/bin/python -m tests.callers.table

runs the tests of the callers, and writes the section from what they saw. In any other run, what the tests see is
compared with it, versions aside.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.callers.callers import CALLERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FILE = Path(__file__).parents[2] / "docs/compatibility.md"
HEADING = "## Callers\n"
WRITE = "FUSERMOUNT3PROXY_WRITE_TABLE"

READ, WRITTEN, UNMOUNT, STOP, AUTO_UNMOUNT, BACKGROUND, ROOT, ROOT_STOP, DEVICE = COLUMNS = (
    "mount, read",
    "write",
    "unmount",
    "at a signal",
    "auto_unmount",
    "in the background",
    "as root",
    "as root at a signal",
    "/dev/fuse",
)
VERSION = "version"
HEADER = ("caller", VERSION, "through", *COLUMNS)

INTRODUCTION = f"""\
{HEADING}
Programs and libraries, unmodified, in an unprivileged container (default capabilities, no device, no network), as a
user and as root. This section is written by the tests that run them (`tests/callers`):
`.venv/bin/python -m tests.callers.table`.

- **mount, read**, **write**: as uid 1000. A dash: it is not made for that.
- **unmount**: by `fusermount3 -u`, after which the caller ends with status 0.
- **at a signal**: it unmounts, by itself, at SIGTERM or what the program documents instead.
- **auto_unmount**: the caller is killed; mount and helper are gone.
- **as root**: mount, read, write and `fusermount3 -u` as root of the container, who has no CAP_SYS_ADMIN.
- **as root at a signal**: `left`: the mount is left behind, dead, until `fusermount3 -u` removes it, or the broker
  finds it (`dead_mounts_seconds`; off in these tests). libfuse sees uid 0, tries umount(2) itself, is refused, and
  asks no helper.
- **/dev/fuse**: `needed`: the caller gives up, before it calls fusermount3, unless it can open /dev/fuse. Any file that
  can be opened will do: `podman run -v /dev/null:/dev/fuse:ro …`. Otherwise it works with no /dev/fuse at all.

Not in the table, but tested: `clone_fd` of libfuse 3 (with the stand-in libfuse says that it goes on with one
descriptor; with `--device /dev/fuse` it gets its own), and several mounts of one caller at the same time.

"""


@dataclass
class Seen:
    """What the tests have seen of each caller, by its name and the column."""

    cells: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))

    @contextlib.contextmanager
    def cell(self, caller: str, column: str, text: str = "yes") -> Iterator[None]:
        """Note `text` if the block ends well."""
        self.cells[caller][column] = "no"
        yield
        self.cells[caller][column] = text

    def is_whole(self) -> bool:
        return set(self.cells) == {caller.name for caller in CALLERS}


def rendered(cells: Mapping[str, Mapping[str, str]]) -> str:
    """Return the section."""
    lines = ["| " + " | ".join(HEADER) + " |", "| " + " | ".join("---" for _ in HEADER) + " |"]
    for caller in CALLERS:
        row = cells[caller.name]
        words = [caller.name, row.get(VERSION, "?"), caller.library, *(row.get(column, "-") for column in COLUMNS)]
        lines.append("| " + " | ".join(words) + " |")
    return INTRODUCTION + "\n".join(lines) + "\n"


def write(cells: Mapping[str, Mapping[str, str]]) -> None:
    """Put the section into the file, where it is the last one."""
    before, _, _ = FILE.read_text().partition(HEADING)
    FILE.write_text(before + rendered(cells))


def written_rows() -> dict[str, dict[str, str]]:
    """Return the rows of the committed section, by caller."""
    rows: dict[str, dict[str, str]] = {}
    for line in FILE.read_text().partition(HEADING)[2].splitlines():
        words = [word.strip() for word in line.strip("|").split("|")]
        if line.startswith("| ") and words[0] not in ("caller", "---"):
            rows[words[0]] = dict(zip(HEADER, words, strict=True))
    return rows


def main() -> int:
    """Run the tests, which write the file at their end."""
    import pytest

    return pytest.main([str(Path(__file__).parent), "-q"])


if __name__ == "__main__":
    os.environ[WRITE] = "1"
    sys.exit(main())
