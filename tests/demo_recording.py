"""`make demo-recording`: run the demonstration, and draw what it tells as docs/demo.svg, an animated terminal.

The picture plays once, and needs no script, no font and no network. Pauses of the run that are longer than a reader
needs are cut. Who has asked for reduced motion sees its end.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs/demo.svg"

#: The terminal, in characters.
_COLUMNS, _ROWS = 100, 30
#: A character, in the picture's units.
_WIDTH, _HEIGHT = 7.25, 16
_MARGIN = 14
#: Seconds between two paragraphs of what is told: long enough to read one, and no longer than a reader has patience.
_SHORTEST, _LONGEST = 1.5, 3.0

_STYLE = """\
text { font: 12px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #c9d1d9; white-space: pre; }
.step { fill: #ffffff; font-weight: bold; }
.command { fill: #7ee787; }
.told { animation: appear 1ms backwards; }
#screen { animation: scroll %(seconds).1fs step-end; transform: translateY(%(last)gpx); }
@keyframes appear { from { visibility: hidden; } }
@keyframes scroll { %(scrolls)s }
@media (prefers-reduced-motion: reduce) { .told, #screen { animation: none; } }
"""


class Line(NamedTuple):
    """What came at that time, in seconds since the start."""

    seconds: float
    text: str


@dataclass(frozen=True)
class Row:
    """A row of the terminal: when it is seen for the first time, in seconds, and what kind of text it is."""

    seconds: float
    text: str
    kind: str


def record(command: list[str]) -> list[Line]:
    """Run the command, and return the lines that it prints. CalledProcessError if it fails."""
    start = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        lines = [Line(time.monotonic() - start, line.rstrip("\n").expandtabs()) for line in process.stdout]
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return lines


def rows(lines: Iterable[Line]) -> Iterator[Row]:
    """Yield the rows of the terminal, whose paragraphs follow each other at a pace for readers."""
    seconds, came = -_SHORTEST, 0.0
    kind = ""
    for line in lines:
        if not line.text:
            seconds += min(max(line.seconds - came, _SHORTEST), _LONGEST)
            came = line.seconds
            kind = ""
        elif line.text.startswith("   $ "):
            kind = "command"
        elif line.text.startswith("   | "):
            kind = "output"
        else:
            kind = kind or ("step" if line.text[0].isdigit() else "remark")
        for at in range(0, max(len(line.text), 1), _COLUMNS):
            yield Row(seconds, line.text[at : at + _COLUMNS], kind)


def draw(lines: Iterable[Line]) -> str:
    """Return the picture of what was told, in SVG."""
    told = list(rows(lines))
    duration = told[-1].seconds + _LONGEST
    width, height = _COLUMNS * _WIDTH + 2 * _MARGIN, _ROWS * _HEIGHT + 2 * _MARGIN

    def shift(number: int) -> int:
        """How far the screen has moved when so many rows are there."""
        return min(_ROWS - number, 0) * _HEIGHT

    seen = {row.seconds: number for number, row in enumerate(told, 1)}
    scrolls = " ".join(
        f"{100 * seconds / duration:.2f}% {{ transform: translateY({shift(number)}px); }}"
        for seconds, number in seen.items()
    )
    style = _STYLE % {"seconds": duration, "last": shift(len(told)), "scrolls": scrolls}
    texts = "\n".join(
        f'<text class="told {row.kind}" style="animation-delay: {row.seconds:.2f}s" '
        f'y="{number * _HEIGHT - 4}">{escape(row.text)}</text>'
        for number, row in enumerate(told, 1)
        if row.text
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" width="{width:g}" '
        f'height="{height}" role="img" aria-label="A recording of make demo">\n<style>\n{style}</style>\n'
        f'<rect width="100%" height="100%" rx="8" fill="#0d1117"/>\n'
        f'<svg x="{_MARGIN}" y="{_MARGIN}" width="{width - 2 * _MARGIN:g}" height="{_ROWS * _HEIGHT}">\n'
        f'<g id="screen">\n{texts}\n</g>\n</svg>\n</svg>\n'
    )


def main() -> None:
    FILE.write_text(draw(record([sys.executable, "-m", "tests.demo"])))


if __name__ == "__main__":
    main()
