"""Tables in SQLite, each in its own file in the state directory, as copies of the front's data in memory.

The data in memory is authoritative; the tables follow it in three ways. A row that others rely on is written first, or
the request is refused (`Table.write`). A fact that holds regardless, such as that a volume is unpublished, is written
as soon as possible (`Table.write_or_defer`). A row that the next broker would recognize as stale is deleted within a
second (`Table.delete_later`). So a full or read-only disk never fails an unmount, and the tables catch up when there is
room.

A damaged file is put aside and replaced with a new one; invalid rows are put aside, too (`damaged_rows`). A file that
can't be written is still read: SQLite creates auxiliary files even to read a table, so this module also has ways
without them.
"""

import errno
import os
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from fusermount3_broker.front.tables import damaged_rows
from fusermount3_broker.service import state_directory

#: SQLite's errors for a file that is damaged, not a database, or not ours. Other errors are temporary: locked, disk
#: full.
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
#: Seconds to wait for another process's lock on the file; callers wait meanwhile.
_PATIENCE = 0.2
#: Bytes that must be free before the disk counts as writable again: some rows, and SQLite's overhead.
_ROOM = 64 * 1024

Key = Any
Row = Sequence[Any]


class NotWritten(Exception):
    """A row could not be written; nothing is changed. `errno` says why; `text` also names the table."""

    def __init__(self, errno: int, text: str) -> None:
        super().__init__(text)
        self.errno = errno
        self.text = text


class TableUnreadable(Exception):
    """The contents of a table can't be determined; the message names the table and the reason."""


class _Damaged(Exception):
    """The file is not a database, or not one of ours."""


class Form(NamedTuple):
    """The form of a table: `types` maps its columns to their types (`damaged_rows.sort_rows`); the first column is the
    key. `added` maps the columns that tables of earlier versions lack to their values in SQL. `each_boot` is the SQL
    with which the first write after a boot of the machine begins. `synchronous` is the value of SQLite's PRAGMA of that
    name."""

    name: str
    types: Mapping[str, Any]
    added: Mapping[str, str]
    each_boot: str
    synchronous: str

    @property
    def columns(self) -> list[str]:
        return list(self.types)

    @property
    def file(self) -> str:
        return state_directory.file_of(self.name)


class Table:
    """A table in the file `directory`/NAME.sqlite. `rows` returns all rows in memory, to fill a new file.

    `found` holds the rows that the file had when it was opened; `is_of_this_boot` says whether they were written since
    the machine booted. `lost` describes damaged data that was put aside, or is None. `problem` says why the table can't
    be written; it is set from the first failed write until `retry` succeeds, and empty otherwise. `failures` counts
    failed writes.
    """

    def __init__(self, directory: Path, form: Form, rows: Callable[[], Iterable[Row]]) -> None:
        """Open or create the table, and test whether it can be written. Raises OSError, TableUnreadable."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.name = form.name
        self._path = directory / form.file
        self.lost: str | None = state_directory.put_aside_what_is_no_table(self._path) or None
        self.problem = ""
        self.failures = 0
        self._form = form
        self._rows: Callable[[], Iterable[Row]] = tuple
        #: Deferred writes: a row by its key, or None to delete the row with that key.
        self._deferred: dict[Key, Row | None] = {}
        self._connection: sqlite3.Connection | None = None
        self._is_ready = False
        #: Invalid rows that are not yet put aside.
        self._damaged: list[tuple[int, str]] = []
        self.found, self.is_of_this_boot = self._read()
        with suppress(NotWritten):
            self._write({})
        self._rows = rows

    def close(self) -> None:
        self._is_ready = False
        if self._connection:
            self._connection.close()
            self._connection = None

    def write(self, row: Row) -> None:
        """Write a row; it replaces the row with the same key. Raises NotWritten."""
        self._write({row[0]: row})
        self._deferred.pop(row[0], None)

    def write_or_defer(self, key: Key, row: Row | None) -> None:
        """Write a row, or delete the row of that key if `row` is None; do it later if it can't be done now."""
        self.write_later(key, row)
        self.write_deferred()

    def write_later(self, key: Key, row: Row | None) -> None:
        """As `write_or_defer`, but leave it to the next `write_deferred`: for many rows at once."""
        self._deferred[key] = row

    def delete_later(self, key: Key) -> None:
        """Delete the row of that key with the next `write_deferred`; a broker that reads the row before that must
        recognize it as stale."""
        self._deferred[key] = None

    def write_deferred(self) -> None:
        """Write the deferred rows, unless the table can't be written."""
        if self._deferred and not self.problem:
            with suppress(NotWritten):
                self._write_all_deferred()

    def retry(self) -> None:
        """If the table could not be written, write the deferred rows, and test whether there is room for more."""
        if self.problem:
            with suppress(NotWritten):
                self._write_all_deferred()
                self._rehearse()
                self.problem = ""

    # Reading ---------------------------------------------------------------------------------------------------

    def _read(self) -> tuple[Sequence[Row], bool]:
        """Return the rows, and whether they are of this boot. Raises OSError, TableUnreadable."""
        try:
            return self._read_somehow() if self._path.exists() else ([], True)
        except _Damaged as error:
            self._put_aside(error)
            return [], True

    def _put_aside(self, error: Exception) -> None:
        """Raises OSError."""
        self.close()
        self._damaged = []
        self._note_lost(f"{state_directory.put_aside(self._path)}: {error}")

    def _note_lost(self, what: str) -> None:
        self.lost = f"{self.lost}, {what}" if self.lost else what

    def _read_somehow(self) -> tuple[Sequence[Row], bool]:
        """As `_read`; keep the connection if the usual way of opening it worked. Raises OSError, TableUnreadable,
        _Damaged."""
        problem: Exception | None = None
        for connect in (self._connect, self._connect_alone, self._connect_to_what_does_not_change):
            connection = None
            try:
                connection = connect()
                found = self._contents(connection)
                if connect == self._connect:
                    self._connection, connection = connection, None
                return found
            except sqlite3.Error as error:
                if _is_damage(error):
                    raise _Damaged(error) from None
                problem = problem or error
                if _is_locked(error):
                    break
            finally:
                if connection:
                    connection.close()
        raise TableUnreadable(f"the broker can't read its table of {self.name} in {self._path.parent}: {problem}")

    def _contents(self, connection: sqlite3.Connection) -> tuple[Sequence[Row], bool]:
        """Raises sqlite3.Error, _Damaged."""
        there = self._columns_in(connection)
        if not there:
            return [], True
        lacking = set(self._form.columns) - there
        if not lacking <= self._form.added.keys():
            raise _Damaged(f"no such column: {min(lacking - self._form.added.keys())}")
        wanted = [self._form.added[name] if name in lacking else f'{self.name}."{name}"' for name in self._form.columns]
        rows = connection.execute(f"SELECT rowid, {', '.join(wanted)} FROM {self.name}")
        found, self._damaged = damaged_rows.sort_rows(rows, self._form.types.values())
        return found, _noted_boot(connection) == _boot()

    def _columns_in(self, connection: sqlite3.Connection) -> set[str]:
        return {column for _, column, *_ in connection.execute(f"PRAGMA table_info({self.name})")}

    def _connect(self) -> sqlite3.Connection:
        patience = 0 if self.problem else _PATIENCE
        return _as_text_may_be(sqlite3.connect(self._path, timeout=patience, isolation_level=None))

    def _connect_alone(self) -> sqlite3.Connection:
        """Connect without the file through which SQLite shares memory with other processes; the disk may have no room
        for it."""
        connection = self._connect()
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        return connection

    def _connect_to_what_does_not_change(self) -> sqlite3.Connection:
        """Connect with only the table's own file, if that contains everything. Raises sqlite3.Error."""
        with suppress(FileNotFoundError):
            if self._path.with_name(f"{self._path.name}-wal").stat().st_size:
                raise sqlite3.OperationalError("its log can't be read either")
        path = f"{self._path.absolute().as_uri()}?immutable=1"
        return _as_text_may_be(sqlite3.connect(path, uri=True, isolation_level=None))

    # Writing ---------------------------------------------------------------------------------------------------

    def _write_all_deferred(self) -> None:
        """Raises NotWritten."""
        self._write(self._deferred)
        self._deferred.clear()

    def _write(self, rows: Mapping[Key, Row | None]) -> None:
        """Write these rows. Raises NotWritten."""
        try:
            connection = self._ready()
            with _transaction(connection):
                self._write_in_transaction(connection, rows)
        except (sqlite3.Error, OSError) as error:
            raise self._failure(error) from None

    def _write_in_transaction(self, connection: sqlite3.Connection, rows: Mapping[Key, Row | None]) -> None:
        """Raises sqlite3.Error."""
        key_column, *others = self._form.columns
        listed, marks = _listed(self._form.columns), ", ".join("?" * len(self._form.columns))
        changes = ", ".join(f'"{each}" = excluded."{each}"' for each in others)
        replacing = f'ON CONFLICT ("{key_column}") DO UPDATE SET {changes}'  # keeps the row's place
        for key, row in rows.items():
            if row is None:
                connection.execute(f'DELETE FROM {self.name} WHERE "{key_column}" = ?', [key])
            else:
                connection.execute(f"INSERT INTO {self.name} ({listed}) VALUES ({marks}) {replacing}", row)

    def _failure(self, error: Exception) -> NotWritten:
        """Record that a write has failed; return the exception to raise."""
        self.failures += 1
        code = _errno_of(error, self._path.parent)
        if code != errno.ENOSPC:
            self.close()  # it may work again when it is reopened
        where = f"the broker can't write its table of {self.name} in {self._path.parent}"
        self.problem = f"{where}: {os.strerror(code)}"
        return NotWritten(code, self.problem)

    def _rehearse(self) -> None:
        """Test whether there is room for more than one row, so that a full disk is not reported over and over.

        Raises NotWritten.
        """
        trial = self._path.with_name(f"{self._path.name}-room")
        try:
            with _transaction(self._ready()) as connection:
                connection.execute(f"PRAGMA user_version = {_boot()}")
            try:
                trial.write_bytes(bytes(_ROOM))
            finally:
                trial.unlink(missing_ok=True)
        except (sqlite3.Error, OSError) as error:
            raise self._failure(error) from None

    def _ready(self) -> sqlite3.Connection:
        """Return the connection, ready to write the table. Raises sqlite3.Error, OSError."""
        if self._connection is None:
            self._connection = self._connect()
        if not self._is_ready:
            try:
                self._make(self._connection)
            except sqlite3.Error as error:
                if _is_damage(error):
                    self._put_aside(error)
                raise
            self._is_ready = True
            self._put_rows_aside(self._connection)
        return self._connection

    def _put_rows_aside(self, connection: sqlite3.Connection) -> None:
        """Put invalid rows aside, if possible: otherwise they stay, and are ignored."""
        if not self._damaged:
            return
        problem = damaged_rows.told(self._damaged)
        try:
            with _transaction(connection):
                damaged_rows.put_rows_aside(connection, self.name, self._damaged)
        except sqlite3.Error as error:
            problem += f" (not put aside: {error})"
        self._note_lost(problem)
        self._damaged = []

    def _make(self, connection: sqlite3.Connection) -> None:
        """Create the table unless it exists, and do what is due once per boot. Raises sqlite3.Error."""
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {self._form.synchronous}")
        there = self._columns_in(connection)
        key, *others = self._form.columns
        with _transaction(connection):
            if not there:
                connection.execute(f"CREATE TABLE {self.name} ({_listed([key])} PRIMARY KEY, {_listed(others)})")
                self._write_in_transaction(connection, {row[0]: row for row in self._rows()})
            for column in self._form.columns if there else ():
                if column not in there:
                    value = self._form.added[column]
                    connection.execute(f"ALTER TABLE {self.name} ADD COLUMN {_listed([column])} DEFAULT {value}")
            if _noted_boot(connection) != _boot():
                if there:
                    connection.execute(self._form.each_boot)
                connection.execute(f"PRAGMA user_version = {_boot()}")


def _as_text_may_be(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Make a connection accept text that is not UTF-8, which the broker never writes."""
    connection.text_factory = lambda data: data.decode("utf-8", "replace")
    return connection


def _listed(columns: Iterable[str]) -> str:
    """Return the columns as a list in SQL."""
    return ", ".join(f'"{column}"' for column in columns)


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Make the writes in the block one transaction: all or none. Raises sqlite3.Error."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")


def _is_damage(error: Exception) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGE


def _is_locked(error: Exception) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def _errno_of(error: Exception, directory: Path) -> int:
    """Return the errno that best describes why a file in the directory could not be written.

    SQLite does not report the errno of the failed system call.
    """
    if isinstance(error, OSError):
        return error.errno or errno.EIO
    code = getattr(error, "sqlite_errorcode", 0)
    if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE):
        return errno.ENOSPC
    if code & 0xFF == sqlite3.SQLITE_READONLY:
        return errno.EROFS
    with suppress(OSError):
        status = os.statvfs(directory)
        if status.f_flag & os.ST_RDONLY:
            return errno.EROFS
        if not status.f_bavail or (status.f_files and not status.f_favail):
            return errno.ENOSPC
    return errno.EIO


def _noted_boot(connection: sqlite3.Connection) -> int:
    """Raises sqlite3.Error."""
    (boot,) = connection.execute("PRAGMA user_version").fetchone()
    assert isinstance(boot, int)
    return boot


def _boot() -> int:
    """Return a number that identifies the current boot of the machine. Raises OSError."""
    return zlib.crc32(Path("/proc/sys/kernel/random/boot_id").read_bytes()) & 0x7FFFFFFF
