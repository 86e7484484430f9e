"""Records which lines of some functions are executed, in every process of the broker.

Most of these processes may write no file, have no right to anything, or end by _exit(2). So each maps the file of marks
into its memory when Python starts, before it gives up its rights, and its children inherit the map. In a machine, a
``.pth`` file has each Python load this module alone; so it imports nothing of the project.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType
    from typing import Any

#: The marks of a line, which may have been executed often: to its end, or with an exception.
DONE, RAISED = 1, 2
#: The functions whose lines are recorded, one line of the file each: a module and a qualified name.
NAMES = "functions"
#: For each function, a byte for each of its lines.
MARKS = "marks"
_LINES = 512


def create(directory: Path, functions: Sequence[tuple[str, str]]) -> None:
    """Prepare a directory for `record`, in which every process may record."""
    directory.mkdir()
    (directory / NAMES).write_text("".join(f"{module} {name}\n" for module, name in functions))
    (directory / MARKS).write_bytes(bytes(_LINES * len(functions)))
    (directory / MARKS).chmod(0o666)


def record(directory: str) -> None:
    """Record the lines that this process and its children execute from now on, if they can open the file."""
    try:
        names = Path(directory, NAMES).read_text().splitlines()
        descriptor = os.open(f"{directory}/{MARKS}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    functions = {tuple(line.split()): _LINES * number for number, line in enumerate(names)}
    marks = mmap.mmap(descriptor, _LINES * len(functions))
    os.close(descriptor)

    def begin(frame: FrameType, _event: str, _argument: Any) -> Any:
        place = functions.get((frame.f_globals.get("__name__", ""), frame.f_code.co_qualname))
        return None if place is None else _Call(marks, place - frame.f_code.co_firstlineno).trace

    sys.settrace(begin)
    threading.settrace(begin)


class _Call:
    """The trace of one call of a function. A line is done when the next event is not its exception."""

    def __init__(self, marks: mmap.mmap, offset: int) -> None:
        self._marks = marks
        self._offset = offset
        self._line = 0

    def trace(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if self._line:
            self._marks[self._offset + self._line] |= RAISED if event == "exception" else DONE
        self._line = frame.f_lineno if event == "line" else 0
        return self.trace


def recorded(directory: Path) -> Mapping[tuple[str, str], bytes]:
    """Return the marks of each function: a byte for each line from that of its ``def`` or first decorator on."""
    names = [tuple(line.split()) for line in (directory / NAMES).read_text().splitlines()]
    marks = (directory / MARKS).read_bytes()
    return {
        (module, name): marks[_LINES * number : _LINES * (number + 1)] for number, (module, name) in enumerate(names)
    }
