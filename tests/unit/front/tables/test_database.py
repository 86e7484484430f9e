"""Tables as copies of memory: a row that can't be written is refused, or written as soon as possible."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusermount3_broker.front.deferred_writes import DeferredWrites
from fusermount3_broker.front.tables import database, mount_table, volume_table
from fusermount3_broker.front.tables.database import Form, NotWritten, Row, Table, TableUnreadable
from fusermount3_broker.service import log
from fusermount3_broker.service.state_directory import TABLES, file_of

FORM = Form("things", {"key": int, "value": bytes}, {}, each_boot="DELETE FROM things", synchronous="OFF")
LONG = b"x" * 50_000


class Scene:
    """A table whose memory is the test, on a disk that is full when the test says so."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.memory: dict[int, bytes] = {}
        self.table = self.open()

    def open(self, form: Form = FORM) -> Table:
        self.table = Table(self.directory, form, self.rows)
        return self.table

    def rows(self) -> list[Row]:
        return list(self.memory.items())

    def put(self, key: int, value: bytes = b"value") -> None:
        self.table.write([key, value])
        self.memory[key] = value

    def drop(self, key: int) -> None:
        del self.memory[key]
        self.table.write_or_defer(key, None)

    def fill(self) -> None:
        """Leave SQLite no room for another page."""
        connection = self.connection()
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")

    def free(self) -> None:
        self.connection().execute("PRAGMA max_page_count = 1000000")

    def connection(self) -> sqlite3.Connection:
        assert self.table._connection
        return self.table._connection

    def written(self) -> dict[int, bytes]:
        """Return the rows that another process would find in the table."""
        other = sqlite3.connect(self.directory / "things.sqlite")
        found = dict(other.execute("SELECT * FROM things").fetchall())
        other.close()
        return found


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.table.close()


def test_what_was_put_is_found_by_the_next(scene: Scene) -> None:
    scene.put(1)
    scene.put(2)
    scene.put(1, b"another")
    scene.table.write_or_defer(2, None)
    again = Table(scene.directory, FORM, scene.rows)  # the first was never closed, as if its process had been killed
    assert again.found == [(1, b"another")]
    assert again.is_of_this_boot
    again.close()


def test_what_finds_no_room_is_refused_and_changes_nothing(scene: Scene) -> None:
    scene.put(1)
    scene.fill()
    with pytest.raises(NotWritten) as raised:
        scene.put(2, LONG)
    text = f"the broker can't write its table of things in {scene.directory}: No space left on device"
    assert (raised.value.errno, raised.value.text) == (errno.ENOSPC, text)
    assert (scene.table.problem, scene.table.failures) == (text, 1)
    assert scene.written() == {1: b"value"}
    scene.free()
    scene.put(2, LONG)
    assert scene.table.problem == text, "it is over when there is room for more than that"
    scene.table.retry()
    assert scene.table.problem == ""
    assert scene.written() == scene.memory


def test_what_is_so_anyway_is_written_when_there_is_room(scene: Scene) -> None:
    scene.put(1)
    scene.put(2)
    scene.fill()
    scene.table.write_or_defer(1, [1, LONG])
    scene.table.write_or_defer(2, None)
    assert scene.written() == {1: b"value", 2: b"value"}
    failures = scene.table.failures
    assert failures
    scene.table.retry()
    assert scene.table.failures > failures, "it is tried"
    assert scene.table.problem
    scene.free()
    scene.table.retry()
    assert scene.table.problem == ""
    assert scene.written() == {1: LONG}


def test_a_row_that_is_put_is_not_taken_for_one_that_was_to_go(scene: Scene) -> None:
    """As with a device number that is used again, after its last mount ended while the disk was full."""
    scene.put(1)
    scene.fill()
    with pytest.raises(NotWritten):
        scene.put(2, LONG)
    scene.table.write_or_defer(1, None)
    scene.free()
    scene.put(1, b"new")
    scene.table.retry()
    assert scene.written() == {1: b"new"}


def test_it_is_not_over_before_there_is_room_for_more(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.fill()
    with pytest.raises(NotWritten):
        scene.put(1, LONG)
    scene.free()

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", no_room)
        scene.table.retry()
        assert scene.table.problem
    scene.table.retry()
    assert scene.table.problem == ""
    assert sorted(path.name for path in scene.directory.glob("*-room")) == []


def test_a_file_that_is_damaged_while_it_is_used_is_begun_anew_with_all_that_is_in_memory(scene: Scene) -> None:
    for key in range(50):
        scene.put(key, LONG)
    scene.table.close()
    path = scene.directory / "things.sqlite"
    path.write_bytes(b"nonsense" * 10_000)
    with pytest.raises(NotWritten):
        scene.put(50)
    assert scene.table.lost and "things.sqlite.damaged-" in scene.table.lost
    scene.put(50)
    scene.table.retry()
    assert scene.table.problem == ""
    assert scene.written() == scene.memory


def test_a_file_that_is_gone_is_made_again_with_all_that_is_in_memory(scene: Scene) -> None:
    scene.put(1)
    scene.put(2)
    scene.table.close()
    (scene.directory / "things.sqlite").unlink()
    scene.drop(2)
    scene.put(3)
    assert scene.written() == scene.memory == {1: b"value", 3: b"value"}


def test_a_table_that_somebody_locks_is_refused_soon_and_then_at_once(scene: Scene) -> None:
    scene.put(1)
    other = sqlite3.connect(scene.directory / "things.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    for _ in range(2):
        with pytest.raises(NotWritten, match="Input/output error"):
            scene.put(2)
    other.execute("ROLLBACK")
    other.close()
    scene.put(2)
    assert scene.written() == scene.memory


def test_a_boot_that_could_not_be_noted_is_noted_with_the_first_row(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.put(1)
    scene.table.close()
    scene.memory.clear()
    monkeypatch.setattr(database, "_boot", lambda: 4711)
    other = sqlite3.connect(scene.directory / "things.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    table = scene.open()
    assert (table.found, table.is_of_this_boot) == ([(1, b"value")], False)
    assert table.problem
    other.execute("ROLLBACK")
    other.close()
    scene.put(2)
    assert scene.written() == {2: b"value"}
    table.close()
    assert scene.open().found == [(2, b"value")]
    assert scene.table.is_of_this_boot


@pytest.mark.parametrize("failures", [1, 2])
def test_a_table_is_read_without_the_files_for_which_there_is_no_room(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    scene.put(1)
    scene.table.close()
    ways = ["_connect", "_connect_alone"][:failures]

    def fails(_: Table) -> sqlite3.Connection:
        raise sqlite3.OperationalError("disk I/O error")

    for way in ways:
        monkeypatch.setattr(Table, way, fails)
    table = scene.open()
    assert table.found == [(1, b"value")]
    assert table.problem, "it can't be written"


def test_a_table_that_cannot_be_read_is_no_empty_one(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.put(1)
    (scene.directory / "things.sqlite-wal").stat()

    def fails(_: Table) -> sqlite3.Connection:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(Table, "_connect", fails)
        patch.setattr(Table, "_connect_alone", fails)
        with pytest.raises(TableUnreadable, match=r"can't read its table of things in .*: disk I/O error"):
            Table(scene.directory, FORM, scene.rows)


# Log messages


class FakeFront:
    def __init__(self, table: Table) -> None:
        self.tables = [table]
        self.logged: list[tuple[int, str]] = []

    def log(self, priority: int, message: str, **_: Any) -> None:
        self.logged.append((priority, message))


def no_room(_path: Path, _data: bytes) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_log_is_told_once_when_it_begins_and_once_when_it_is_over(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = FakeFront(scene.table)
    writes = DeferredWrites(front)  # type: ignore[arg-type]  # has as much of a front as this needs
    writes.look()
    scene.fill()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", no_room)
        for _ in range(5):
            with pytest.raises(NotWritten):
                scene.put(1, LONG)
            writes.look()
    problem = scene.table.problem
    assert problem
    scene.free()
    for _ in range(3):
        writes.look()
    assert front.logged == [
        (log.ERROR, f"{problem}; until it can, requests that need it are refused"),
        (log.NOTICE, "the broker writes its table of things again"),
    ]


def test_a_row_that_is_forgotten_is_deleted_a_moment_later(scene: Scene) -> None:
    writes = DeferredWrites(FakeFront(scene.table))  # type: ignore[arg-type]  # has as much of a front as this needs
    for key in (1, 2, 3):
        scene.put(key)
    scene.table.delete_later(1)
    scene.table.delete_later(2)
    scene.put(2, b"new")
    assert scene.written() == {1: b"value", 2: b"new", 3: b"value"}
    writes.look()
    assert scene.written() == {2: b"new", 3: b"value"}


def test_no_descriptor_is_left_of_a_table_that_could_not_be_written(scene: Scene) -> None:
    other = sqlite3.connect(scene.directory / "things.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - no iterator that is itself a descriptor
    for _ in range(5):
        with pytest.raises(NotWritten):
            scene.put(1)
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208
    other.close()


def test_the_supervisor_looks_at_the_files_of_all_tables() -> None:
    assert {form.file for form in (mount_table.FORM, volume_table.FORM)} == set(map(file_of, TABLES))
