"""Disks that hold a broker's tables, and that can be filled to the last byte."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING

from fusermount3_broker.kernel import syscalls
from tests.lab.commands import run
from tests.lab.forked import ending_afterwards

if TYPE_CHECKING:
    from tests.lab.commands import Argument

MIB = 1024 * 1024
SMALL = ("-t", "tmpfs", "-o", "size=1m,nr_inodes=40", "small")
"""The options of mount(8) for such a disk."""


class Disk:
    """The disk that holds the broker's tables."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._filler = directory / "filler"

    def fill(self) -> None:
        """Leave no free byte, and no name for another file."""
        descriptor = os.open(self._filler, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        with contextlib.suppress(OSError):
            for number in range(1000):
                (self.directory / f"name{number}").touch()
        # The broker tries now and then whether there is room again, and removes the file of that.
        while any(self.directory.glob("*-room")) or os.statvfs(self.directory).f_bavail:
            for size in (65536, 4096, 1):
                with contextlib.suppress(OSError):
                    while True:
                        os.write(descriptor, bytes(size))
        os.close(descriptor)

    def free(self) -> None:
        for path in (self._filler, *self.directory.glob("name*")):
            path.unlink(missing_ok=True)

    def rows(self) -> int:
        """Return how many mounts the table records."""
        with contextlib.closing(sqlite3.connect(self.directory / "mounts.sqlite")) as table:
            (count,) = table.execute("SELECT count(*) FROM mounts").fetchone()
        assert isinstance(count, int)
        return count


class SmallDisk:
    """A disk of so many bytes at `directory`, for processes that `command` starts; gone when the block ends.

    with SmallDisk(path) as disk, Broker(command=disk.command(PROGRAM), state=path) as broker:
        disk.fill()
    """

    def __init__(self, directory: Path, size: int = 32 * MIB) -> None:
        """Make `directory` if it is missing."""
        self._directory = directory
        self._size = size
        self._keeper = 0

    def __enter__(self) -> SmallDisk:
        self._directory.mkdir(parents=True, exist_ok=True)
        reader, writer = os.pipe()
        self._keeper = os.fork()
        if self._keeper == 0:
            self._keep(writer)
        os.close(writer)
        with os.fdopen(reader, "rb") as ready:
            if not ready.read(1):
                self.__exit__()
                raise AssertionError("there is no small disk: see stderr")
        return self

    def __exit__(self, *exception: object) -> None:
        os.kill(self._keeper, signal.SIGKILL)
        os.waitpid(self._keeper, 0)

    def _keep(self, writer: int) -> None:
        """Make the disk, and wait for the end; runs in the process that keeps the namespace."""
        with ending_afterwards():
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
            for number in (signal.SIGINT, signal.SIGTERM):  # the broker is ended first
                signal.signal(number, signal.SIG_IGN)
            syscalls.unshare(syscalls.CLONE_NEWNS)
            run(["mount", "--make-rslave", "/"])
            run(["mount", "-t", "tmpfs", "-o", f"size={self._size},mode=0700", "small-disk", self._directory])
            os.write(writer, b"!")
            while True:
                signal.pause()

    def command(self, *argv: Argument) -> tuple[Argument, ...]:
        """Return the command that executes `argv` where the disk is, in the same process."""
        return ("nsenter", f"--mount=/proc/{self._keeper}/ns/mnt", "--", *argv)

    @property
    def path(self) -> Path:
        """Return the disk's root directory, as seen from here."""
        return Path(f"/proc/{self._keeper}/root") / self._directory.absolute().relative_to("/")

    def fill(self) -> None:
        """Fill the disk to the last byte."""
        Disk(self.path).fill()

    def free(self) -> None:
        """Make space again."""
        Disk(self.path).free()
