"""Generate the section on callers of docs/compatibility.md from the results of the tests.

    .venv/bin/python -m tests.callers.table

runs the tests of the callers, and writes the section from their results. Any other run compares its results with the
section, ignoring versions.
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
YES, NEEDS = "yes", "needs `user_allow_other`"
VERSION = "version"
HEADER = ("caller", VERSION, "through", *COLUMNS)

INTRODUCTION = f"""\
{HEADING}
Programs and libraries, unmodified, in an unprivileged container (default capabilities, no device, no network), as a
user and as root, with the broker's default configuration. The tests that run them write this section
(`tests/callers`): `.venv/bin/python -m tests.callers.table`.

- **{NEEDS}**: the program requests `allow_other` by itself, which users may do only if the administrator
  has set `user_allow_other = true`. The tests see it refused without the setting, and work with it.
- **mount, read**, **write**: as uid 1000. A dash: the caller does not support it.
- **unmount**: with `fusermount3 -u`, or under the helper's name that the caller uses; the caller then exits with
  status 0.
- **at a signal**: the caller unmounts by itself at SIGTERM, or at the signal or command that its documentation names.
- **auto_unmount**: after the caller is killed, mount and helper are gone.
- **as root**: mount, read, write and `fusermount3 -u` as root of the container, without CAP_SYS_ADMIN.
- **as root at a signal**: `left`: a dead mount is left behind until `fusermount3 -u` or the broker removes it
  (`dead_mounts_seconds`; off in these tests). libfuse sees uid 0, calls umount(2) itself, is refused, and does not call
  the helper.
- **/dev/fuse**: `needed`: the caller gives up before it calls fusermount3 unless it can open /dev/fuse. Any file that
  can be opened will do: `podman run -v /dev/null:/dev/fuse:ro …`. The others work without /dev/fuse.

Also tested, but not in the table: `clone_fd` of libfuse 3 (with the stand-in, libfuse reports that it continues with
one descriptor; with `--device /dev/fuse` it gets its own), and several mounts of one caller at the same time.

"""


@dataclass
class Seen:
    """The results of the tests, by the caller's name and the column."""

    cells: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))

    @contextlib.contextmanager
    def cell(self, caller: str, column: str, text: str = YES) -> Iterator[None]:
        """Record `text` if the block succeeds."""
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
    """Replace the section in the file, where it is the last one."""
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
    """Run the tests, which write the file at the end."""
    import pytest

    return pytest.main([str(Path(__file__).parent), "-q"])


if __name__ == "__main__":
    os.environ[WRITE] = "1"
    sys.exit(main())
