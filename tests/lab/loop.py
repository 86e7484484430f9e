"""Loop devices: block devices whose disk is a file. They are the whole machine's, so each has to be detached again."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab.commands import run

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 1 << 20


@contextlib.contextmanager
def device(file: Path, content: bytes = b"hello", *, size: int = SIZE) -> Iterator[Path]:
    """Yield a device of `size` bytes, which begins with that content; its disk is a new file."""
    with file.open("wb") as made:
        made.write(content)
        made.truncate(size)
    path = attach(file)
    try:
        yield path
    finally:
        detach(path)


def attach(file: Path, path: Path | None = None) -> Path:
    """Make a file the disk of a device, of that one if it is given; return its path."""
    if path:
        run(["losetup", path, file])
        return path
    return Path(run(["losetup", "--find", "--show", file]).stdout.strip())


def detach(path: Path) -> None:
    """Take the disk away from a device; return when nobody has that open any more."""
    run(["losetup", "--detach", path], check=False)
    give_up = time.monotonic() + 20
    while Path("/sys/block", path.name, "loop").exists():
        assert time.monotonic() < give_up, f"somebody has {path} open"
        time.sleep(0.02)
