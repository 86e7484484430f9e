"""The state directory: its lock, names of the tables in it, and setting aside files there that can't be tables.

For the supervisor, which has the right to rename files there, and for the front, which has its tables there.
"""

import fcntl
import itertools
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

#: The front's tables.
TABLES = ("mounts", "volumes")
#: Files that SQLite has beside a database, by the suffix that it adds to the name.
_BESIDE = ("-wal", "-shm", "-journal")


def lock(directory: int) -> bool:
    """Lock the directory for one broker (flock(2)); return False if a process of another broker has a lock.

    Each process has its lock until it closes its descriptor. A supervisor's is exclusive only for a moment, in which no
    other process may have one, and then shared, so that its fronts can have one, too (`lock_beside_supervisor`).

    The lock is of the directory itself, so that there is no file of it that the front could remove. Raises OSError: not
    all filesystems can lock directories, NFS can't.
    """
    try:
        for operation in (fcntl.LOCK_EX, fcntl.LOCK_SH):
            fcntl.flock(directory, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_beside_supervisor(directory: Path) -> None:
    """Lock the directory for a front, whose supervisor has it locked, for as long as this process lives.

    A front outlives a killed supervisor for a moment, and writes its tables; the next broker must not have read them
    before. On filesystems that can't lock directories, this does nothing. Raises OSError if there is no directory.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def file_of(table: str) -> str:
    """Return the file name of a table."""
    return f"{table}.sqlite"


def put_aside_what_is_no_table(path: Path) -> str:
    """Set aside files that can't be the database at `path` or a part of it; return their new names and the reasons, or
    "".

    These are directories, FIFOs (opening one may block for ever), symbolic and hard links, whose file may be another's,
    and files that may not be read. Raises OSError.
    """
    problems = []
    for each in (path, *(path.with_name(path.name + suffix) for suffix in _BESIDE)):
        if why := _why_no_table(each):
            problems.append(f"{put_aside(path if each == path else each)}: {why}")
    return ", ".join(problems)


def _why_no_table(path: Path) -> str:
    """Return why SQLite can't use that file; empty if it can, or the file does not exist. Raises OSError."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return "not a regular file"
        if status.st_nlink != 1:
            return "a file of several names"
    except FileNotFoundError:
        return ""
    # Without opening it: closing it again would drop the locks of another user of the file in this process (fcntl(2)).
    return "" if os.access(path, os.R_OK, effective_ids=True) else "not to be read"


def put_aside(path: Path) -> Path:
    """Rename the file, and SQLite's files beside it, to unused names; return the file's new name. Raises OSError."""
    names = (f"{path.name}.damaged-{int(time.time())}{suffix}" for suffix in _suffixes())
    new = next(each for each in map(path.with_name, names) if not os.path.lexists(each))
    path.rename(new)
    for suffix in _BESIDE:  # SQLite would write their pending changes to another database
        beside = path.with_name(path.name + suffix)
        if os.path.lexists(beside):
            beside.rename(new.with_name(new.name + suffix))
    return new


def _suffixes() -> Iterator[str]:
    yield ""
    yield from (f".{number}" for number in itertools.count(1))
