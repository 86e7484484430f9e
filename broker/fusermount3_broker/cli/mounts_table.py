"""The table of mounts, for `mounts` and `top`: as wide as its values, or fitted to a terminal."""

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.text import Text

from fusermount3_broker.cli import formatting
from fusermount3_broker.cli.mounts import Answered, container_of
from fusermount3_broker.messages.untrusted_text import visible

#: PID and COMMAND are those of the FUSE program.
HEADINGS = ("REQUEST", "STATE", "AGE", "MOUNTPOINT", "TYPE", "SOURCE", "UID", "PID", "COMMAND", "CONTAINER")
#: The column for filesystems that pods share, in a table with any.
SHARED = "PODS"
#: The most pods whose names are shown.
_MOST_PODS = 3
#: Columns whose cells are short, and are neither folded nor cut.
_WHOLE = {"REQUEST", "STATE", "AGE", "UID", "PID", "COMMAND"}


def cells(mount: Answered, now: float) -> list[str]:
    """Return the row of a mount, for `HEADINGS`, at that time."""
    return [
        visible(each)
        for each in (
            mount["request_id"],
            mount["state"],
            formatting.age(now - mount["mounted_at"]),
            mount["mountpoint"] or mount["volume"],
            mount["type"],
            mount["source"],
            str(mount["uid"]),
            str(mount.get("program_pid") or "-"),
            mount.get("program_command") or "-",
            container_of(mount) or "-",
        )
    ]


def pods(mount: Answered) -> str:
    """Return which pods share the filesystem with the mount pod; empty, if it is not shared."""
    names: list[Any] = mount.get("borrower_pods", [])
    more = len(names) - _MOST_PODS
    shown = [*names[:_MOST_PODS], *([f"{more} more"] if more > 0 else [])]
    return visible(", ".join(shown)) or ("-" if mount.get("share") else "")


def lines(mounts: Iterable[Answered]) -> list[str]:
    """Return the table with each mount on one line, whatever its length."""
    rows = _rows(mounts)
    widths = _natural_widths(rows)
    return [line for row in rows for line in _laid_out(row, widths, is_folded=False)]


@dataclass(frozen=True)
class MountsTable:
    """The table in the width of a console: with all of the cells, in several lines where necessary; or of the first
    `most` mounts, each on one line, with the ends of cells cut off."""

    mounts: Collection[Answered]
    most: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        rows = _rows(list(self.mounts)[: self.most])
        widths = _fitted_widths(rows, options.max_width)
        for number, row in enumerate(rows):
            for line in _laid_out(row, widths, is_folded=self.most is None):
                yield Text(line, style="" if number else "bold", no_wrap=True, overflow="crop")
        if more := len(self.mounts) - len(rows) + 1:
            yield Text(f"and {more} more")


def _rows(mounts: Iterable[Answered]) -> list[Sequence[str]]:
    """Return the headings, and the cells of each mount."""
    now = time.time()
    listed = list(mounts)
    if not any(mount.get("share") for mount in listed):
        return [HEADINGS, *(cells(mount, now) for mount in listed)]
    return [(*HEADINGS, SHARED), *([*cells(mount, now), pods(mount)] for mount in listed)]


def _natural_widths(rows: Iterable[Sequence[str]]) -> list[int]:
    return [max(map(cell_len, column)) for column in zip(*rows, strict=True)]


def _fitted_widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the widths of the columns in a table of that width. What does not fit, the widest columns lack."""
    natural = _natural_widths(rows)
    least = [own if heading in _WHOLE else len(heading) for own, heading in zip(natural, rows[0], strict=True)]
    room = width - (len(natural) - 1)
    most = min(max(natural), max(room, 1))
    while sum(fitted := [min(own, max(least_, most)) for own, least_ in zip(natural, least, strict=True)]) > room:
        if fitted == least:
            break
        most -= 1
    return fitted


def _laid_out(row: Sequence[str], widths: Sequence[int], *, is_folded: bool) -> Iterator[str]:
    """Yield the lines of a row: one, unless it is folded."""
    shape = _folded if is_folded else _cut
    parts = [
        [part + " " * (width - cell_len(part)) for part in shape(cell, width)]
        for cell, width in zip(row, widths, strict=True)
    ]
    for line in zip_longest(*parts):
        padded = (" " * width if part is None else part for part, width in zip(line, widths, strict=True))
        yield " ".join(padded).rstrip()


def _folded(cell: str, width: int) -> list[str]:
    """Return the cell in parts that are at most so wide; some characters take two places."""
    parts = [""]
    for character in cell:
        if cell_len(parts[-1] + character) > width:
            parts.append("")
        parts[-1] += character
    return parts


def _cut(cell: str, width: int) -> list[str]:
    """Return the cell, or what of it fits before an ellipsis."""
    return [cell] if cell_len(cell) <= width else [f"{_folded(cell[:width], width - 1)[0]}…"]
