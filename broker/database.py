"""Tables in SQLite, each in a file of its own in the state directory; a damaged file is put aside for a new one."""

import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

#: What SQLite says of a file that is damaged, no database, or none of ours. Others pass: locked, disk full.
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)

RowsT = TypeVar("RowsT")


class Opened(NamedTuple):
    """An open database, and why the one that was there is put aside, if it is."""

    connection: sqlite3.Connection
    lost: str | None


def open_or_begin(path: Path, prepare: Callable[[sqlite3.Connection], RowsT]) -> tuple[Opened, RowsT]:
    """Open the database at `path` and have it made ready by `prepare`; return what that returns, too.

    Raises OSError, sqlite3.Error.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        connection, rows = _open(path, prepare)
        return Opened(connection, None), rows
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode not in _DAMAGE:
            raise
        damaged = path.with_name(f"{path.name}.damaged-{int(time.time())}")
        path.rename(damaged)
        connection, rows = _open(path, prepare)
        return Opened(connection, f"{damaged}: {error}"), rows


def _open(path: Path, prepare: Callable[[sqlite3.Connection], RowsT]) -> tuple[sqlite3.Connection, RowsT]:
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        return connection, prepare(connection)
    except sqlite3.Error:
        connection.close()
        raise


def listed(columns: Iterable[str]) -> str:
    """Return the columns as SQL lists them."""
    return ", ".join(f'"{column}"' for column in columns)


def make_table(database: sqlite3.Connection, name: str, columns: Sequence[str], added: Mapping[str, str]) -> None:
    """Make the table, unless it is there; the first of `columns` is its key.

    One of an earlier version gets the columns that it lacks, with the values, in SQL, of `added`. Raises sqlite3.Error.
    """
    key, *others = columns
    database.execute(f"CREATE TABLE IF NOT EXISTS {name} ({listed([key])} PRIMARY KEY, {listed(others)})")
    there = {column for _, column, *_ in database.execute(f"PRAGMA table_info({name})")}
    lacking = set(columns) - there
    for column in lacking if lacking <= added.keys() else ():  # another table is none of ours
        database.execute(f"ALTER TABLE {name} ADD COLUMN {listed([column])} DEFAULT {added[column]}")


def once_a_boot(database: sqlite3.Connection, statement: str) -> None:
    """Execute the statement if the machine has been booted since the last time. Raises OSError, sqlite3.Error."""
    boot = zlib.crc32(Path("/proc/sys/kernel/random/boot_id").read_bytes()) & 0x7FFFFFFF
    if database.execute("PRAGMA user_version").fetchone() != (boot,):
        database.execute(statement)
        database.execute(f"PRAGMA user_version = {boot}")
