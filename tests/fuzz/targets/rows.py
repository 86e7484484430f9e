"""The tables of mounts and volumes: an input is a row, whose values are separated by NUL bytes and begin with a
byte for their type."""

from __future__ import annotations

import json
import sqlite3
import time
from dataclasses import asdict
from struct import unpack_from

from fusermount3_broker.cli import formatting
from fusermount3_broker.front.model import Mount
from fusermount3_broker.front.tables import damaged_rows, mount_table, volume_table
from fusermount3_broker.messages import mounter

WORDS = [
    b"\0i1",
    b"\0i-1",
    b"\0i4294967296",
    b"\0tfuse",
    b"\0b/mnt",
    b"\0f",
    b"\0n",
    b"\0t\xff",
    b"\0i9223372036854775807",
]
SEEDS = [
    b"i7\0i7\0i7\0i1000\0i42\0tsshfs\0tbox\0b/mnt\0tfuse\0bhost:\0i1\0t1a2b\0tuid 7\0b\0i0",
    b"bpods/t\0bcsi-1\0tuid\0bdir\0bname\0i0\0i1\0i0\0i1\0bro\0i7\0i0\0bnonce\0i1",
]
_TABLES = {form.name: form.types for form in (mount_table.FORM, volume_table.FORM)}


def _database() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    for table, types in _TABLES.items():
        connection.execute(f"CREATE TABLE {table} ({', '.join(map(_quoted, types))})")
    return connection


def _quoted(column: str) -> str:
    return f'"{column}"'


def _rows_of(table: str) -> damaged_rows.Rows:
    types = _TABLES[table]
    rows = _database_of_all.execute(f"SELECT rowid, {', '.join(map(_quoted, types))} FROM {table}")
    return damaged_rows.sort_rows(rows, types.values())


_database_of_all = _database()


def check(data: bytes) -> None:
    """Check that a row is put aside, or that its mount or volume can be printed and sent to the mounter."""
    given = [_value(part) for part in data.split(b"\0")]
    for table, types in _TABLES.items():
        values = (given + [None] * len(types))[: len(types)]
        _database_of_all.execute(f"DELETE FROM {table}")
        _database_of_all.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(types))})", values)
        rows = _rows_of(table)
        assert len(rows.good) + len(rows.damaged) == 1
        damaged_rows.put_rows_aside(_database_of_all, table, rows.damaged)
        assert not _rows_of(table).damaged
        for row in rows.good:
            _use(row) if table == "mounts" else _publish(row)
    _database_of_all.execute("DROP TABLE IF EXISTS damaged")


def _value(part: bytes) -> int | float | str | bytes | None:
    kind, rest = part[:1], part[1:]
    if kind == b"i":
        digits = rest.removeprefix(b"-")[:18]
        number = int(digits) if digits.isdigit() else 0
        return -number if rest.startswith(b"-") else number
    if kind == b"f":
        return float(unpack_from("d", rest.ljust(8, b"\0"))[0])
    if kind == b"t":
        return rest.decode("utf-8", "replace")
    return None if kind == b"n" else rest


def _use(row: tuple[object, ...]) -> None:
    mount = Mount(*row)  # type: ignore[arg-type]
    start = mounter.StartReap(1, mount.namespace, True, b"%d\n" % mount.device)
    assert mounter.load(mounter.dump(start)) == start
    assert formatting.age(time.time() - mount.mounted_at)
    described = {name: repr(value) if isinstance(value, bytes) else value for name, value in asdict(mount).items()}
    assert json.loads(json.dumps(described)) == described


def _publish(row: tuple[object, ...]) -> None:
    volume = volume_table._volume(list(row[:-1]))
    start = mounter.StartUnpublish(1, volume.target, volume.directory, volume.name, volume.nonce)
    assert mounter.load(mounter.dump(start)) == start
