"""The registry of live mounts; a plain directory stands in for fusectl, and each directory in it for a connection."""

from __future__ import annotations

import dataclasses
import functools
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fusermount3_broker.front.decisions.limits import AccountName
from fusermount3_broker.front.model import Device, Mount, MountNamespace
from fusermount3_broker.front.tables.database import TableUnreadable
from fusermount3_broker.front.tables.mount_table import Registry
from tests.unit.fakes import FakeFusectl


@pytest.fixture
def fake_fusectl(tmp_path: Path) -> Iterator[FakeFusectl]:
    fake = FakeFusectl(tmp_path / "fusectl")
    yield fake
    os.close(fake.descriptor)


class State:
    """The state directory and the registries opened on it."""

    def __init__(self, directory: Path, fake: FakeFusectl) -> None:
        self.directory = directory
        self.fake = fake
        self.opened: list[Registry] = []

    def open(self) -> Registry:
        for each in self.opened:
            each.close()
        self.opened = [Registry(self.directory, self.fake.descriptor)]
        return self.opened[0]


@pytest.fixture
def state(tmp_path: Path, fake_fusectl: FakeFusectl) -> Iterator[State]:
    state = State(tmp_path / "state" / "deep", fake_fusectl)
    yield state
    for each in state.opened:
        each.close()


def mount(device: int, connection: int, **changes: Any) -> Mount:
    values: dict[str, Any] = {
        "namespace": MountNamespace(7),
        "uid": 1000,
        "pid": 42,
        "command": "sshfs",
        "container": "c0ffee",
        "mountpoint": b"/m\xff\n",
        "type": "fuse.sshfs",
        "source": b"host:\xff",
        "mounted_at": 1.5,
        "request_id": f"r{device}",
        "account": AccountName("container /c0ffee"),
    }
    return Mount(device=Device(device), connection=connection, **(values | changes))


def devices(registry: Registry) -> list[int]:
    return [each.device for each in registry]


def test_the_state_directory_is_made_for_its_owner_alone(state: State) -> None:
    state.open()
    assert state.directory.stat().st_mode & 0o777 == 0o700


def test_a_mount_is_found_as_it_was_added(state: State, fake_fusectl: FakeFusectl) -> None:
    live = state.open()
    added = mount(3, fake_fusectl.connect(3))
    live.add(added)
    assert live.find(Device(3)) == added
    assert live.find(Device(4)) is None
    assert (len(live), list(live)) == (1, [added])


def test_mounts_are_listed_oldest_first(state: State, fake_fusectl: FakeFusectl) -> None:
    live = state.open()
    for device, when in ((3, 30.0), (1, 20.0), (2, 40.0)):
        live.add(mount(device, fake_fusectl.connect(device), mounted_at=when))
    assert devices(live) == [1, 3, 2]


def test_a_mount_whose_connection_is_gone_is_no_more(state: State, fake_fusectl: FakeFusectl) -> None:
    live = state.open()
    for device in (1, 2):
        live.add(mount(device, fake_fusectl.connect(device)))
    fake_fusectl.disconnect(1)
    assert live.find(Device(1)) is None
    assert devices(live) == [2]
    fake_fusectl.disconnect(2)
    live.reconcile()
    assert (len(live), devices(live)) == (0, [])


def test_a_mount_whose_number_is_used_again_is_no_more(state: State, fake_fusectl: FakeFusectl) -> None:
    live = state.open()
    live.add(mount(1, fake_fusectl.connect(1)))
    fake_fusectl.reconnect(1)
    assert live.find(Device(1)) is None


def test_shared_filesystems_are_found_by_their_key_the_newest_first(state: State, fake_fusectl: FakeFusectl) -> None:
    live = state.open()
    for device, share in ((1, b"k"), (2, b"l"), (3, b"k"), (4, b"")):
        live.add(mount(device, fake_fusectl.connect(device), share=share))
    live = state.open()
    assert [each.device for each in live.shared(b"k")] == [3, 1]
    assert live.shared(b"") == []


def test_a_mount_that_is_gone_does_not_replace_one_on_its_number(state: State, fake_fusectl: FakeFusectl) -> None:
    """As when its caller commits late, and the child that kept the number from being used again was killed."""
    live = state.open()
    late = mount(3, fake_fusectl.connect(3))
    added = mount(3, fake_fusectl.reconnect(3), request_id="another")
    live.add(added)
    live.add(late)
    assert list(live) == [added]
    assert list(state.open()) == [added]


def test_a_mount_on_a_number_used_again_replaces_the_one_before(state: State, fake_fusectl: FakeFusectl) -> None:
    live = state.open()
    live.add(mount(1, fake_fusectl.connect(1), namespace=MountNamespace(7)))
    second = mount(1, fake_fusectl.reconnect(1), namespace=MountNamespace(8))
    live.add(second)
    assert list(live) == [second]
    assert (live.count(MountNamespace(7), 0), live.count(MountNamespace(8), 0)) == (0, 1)
    assert list(state.open()) == [second]


def test_a_mount_that_was_gone_when_it_was_added_does_not_live(state: State) -> None:
    live = state.open()
    live.add(mount(1, live.connection(Device(1))))
    assert live.find(Device(1)) is None
    live.reconcile()
    assert len(live) == 0


def test_a_connection_is_known_by_its_inode_and_one_that_does_not_exist_by_0(
    state: State, fake_fusectl: FakeFusectl
) -> None:
    live = state.open()
    assert live.connection(Device(9)) == 0
    assert live.connection(Device(9)) != fake_fusectl.connect(9) == live.connection(Device(9))
    before = live.connection(Device(9))
    assert before != fake_fusectl.reconnect(9) == live.connection(Device(9))


def test_mounts_are_counted_for_each_namespace(state: State, fake_fusectl: FakeFusectl) -> None:
    live = state.open()
    for device in (1, 2, 3):
        live.add(mount(device, fake_fusectl.connect(device), namespace=MountNamespace(device % 2)))
    assert [live.count(MountNamespace(namespace), 10) for namespace in (0, 1, 2)] == [1, 2, 0]
    assert live.most_in_a_namespace() == 2


def test_where_nothing_is_mounted_the_most_is_none(state: State) -> None:
    assert state.open().most_in_a_namespace() == 0


def test_a_count_that_reaches_the_limit_counts_the_living_only(state: State, fake_fusectl: FakeFusectl) -> None:
    live = state.open()
    for device in (1, 2, 3):
        live.add(mount(device, fake_fusectl.connect(device)))
    fake_fusectl.disconnect(2)
    assert live.count(MountNamespace(7), 3) == 2
    fake_fusectl.disconnect(1)
    fake_fusectl.disconnect(3)
    assert live.count(MountNamespace(7), 0) == 0
    assert live.count(MountNamespace(7), -1) == 0


def test_a_restart_forgets_no_live_mount_and_every_other(state: State, fake_fusectl: FakeFusectl) -> None:
    live = state.open()
    added = [mount(device, fake_fusectl.connect(device)) for device in (1, 2, 3)]
    for each in added:
        live.add(each)
    fake_fusectl.disconnect(1)
    fake_fusectl.reconnect(2)
    again = state.open()
    assert list(again) == [added[2]]
    assert again.count(MountNamespace(7), 0) == 1
    assert again.table.lost is None


def test_a_broker_that_was_killed_forgets_no_mount(state: State, fake_fusectl: FakeFusectl) -> None:
    live = state.open()
    added = mount(1, fake_fusectl.connect(1))
    live.add(added)
    second = Registry(state.directory, fake_fusectl.descriptor)  # the first was never closed
    assert list(second) == [added]
    second.close()


def test_the_mounts_of_another_boot_are_forgotten_although_their_numbers_are_used(
    state: State, fake_fusectl: FakeFusectl
) -> None:
    live = state.open()
    for device in (1, 2):
        live.add(mount(device, fake_fusectl.connect(device)))
    live.close()
    database = sqlite3.connect(state.directory / "mounts.sqlite", isolation_level=None)
    (this_boot,) = database.execute("PRAGMA user_version").fetchone()
    database.execute(f"PRAGMA user_version = {this_boot ^ 1}")
    database.close()

    again = state.open()
    assert (list(again), len(again), again.count(MountNamespace(7), 0)) == ([], 0, 0)
    assert again.find(Device(1)) is None
    assert again.table.lost is None
    added = mount(1, fake_fusectl.reconnect(1))
    again.add(added)
    assert list(state.open()) == [added], "and what was mounted since is not"


GARBAGE = b"\xde\xad\xbe\xef" * 4096


def damage(file: Path, kind: str) -> None:
    content = file.read_bytes()
    match kind:
        case "garbage":
            file.write_bytes(GARBAGE)
        case "garbage after the header":
            file.write_bytes(content[:100] + GARBAGE[: len(content) - 100])
        case "table page overwritten":
            file.write_bytes(content[:4096] + GARBAGE[: len(content) - 4096])
        case "cut in half":
            file.write_bytes(content[: len(content) // 2])
        case "another table":
            file.unlink()
            with sqlite3.connect(file) as database:
                database.execute("CREATE TABLE mounts (something, else_)")
            database.close()


@pytest.mark.parametrize(
    "kind", ["garbage", "garbage after the header", "table page overwritten", "cut in half", "another table"]
)
def test_a_damaged_table_is_put_aside_and_begun_anew(state: State, fake_fusectl: FakeFusectl, kind: str) -> None:
    live = state.open()
    for device in range(1, 50):
        live.add(mount(device, fake_fusectl.connect(device)))
    live.close()
    damage(state.directory / "mounts.sqlite", kind)
    damaged = (state.directory / "mounts.sqlite").read_bytes()

    again = state.open()
    assert again.table.lost is not None
    aside = Path(again.table.lost.partition(": ")[0])
    assert aside.parent == state.directory
    assert aside.name.startswith("mounts.sqlite.damaged-")
    assert aside.read_bytes()[100:] == damaged[100:], "but for SQLite's own header, it is as it was"

    added = mount(100, fake_fusectl.connect(100))
    again.add(added)
    third = state.open()
    assert third.table.lost is None
    assert list(third) == [added]


@pytest.mark.parametrize("journal", ["-journal", "-wal"])
def test_a_table_of_an_earlier_version_loses_no_mount(state: State, fake_fusectl: FakeFusectl, journal: str) -> None:
    """The table is as version 0.1 made it, which had no accounts, with and without its log beside it."""
    live = state.open()
    added = mount(1, fake_fusectl.connect(1))
    live.add(added)
    live.close()
    database = sqlite3.connect(state.directory / "mounts.sqlite", isolation_level=None)
    database.execute("ALTER TABLE mounts DROP COLUMN account")
    if journal == "-journal":
        database.execute("PRAGMA journal_mode = DELETE")
    database.close()

    again = state.open()
    assert again.table.lost is None
    assert list(again) == [dataclasses.replace(added, account=AccountName(""))]
    second = mount(2, fake_fusectl.connect(2))
    again.add(second)
    assert again.count(second.account, 10) == 1
    assert list(state.open())[1] == second


def test_a_table_of_a_later_version_loses_no_mount(state: State, fake_fusectl: FakeFusectl) -> None:
    live = state.open()
    added = mount(1, fake_fusectl.connect(1))
    live.add(added)
    live.close()
    database = sqlite3.connect(state.directory / "mounts.sqlite", isolation_level=None)
    database.execute("ALTER TABLE mounts ADD COLUMN later DEFAULT 7")
    database.close()

    again = state.open()
    again.add(mount(2, fake_fusectl.connect(2)))
    assert devices(state.open()) == [1, 2]


def test_mounts_are_counted_for_each_account(state: State, fake_fusectl: FakeFusectl) -> None:
    live = state.open()
    for device, account in ((1, "a"), (2, "a"), (3, "b")):
        live.add(mount(device, fake_fusectl.connect(device), account=AccountName(account)))
    fake_fusectl.disconnect(1)
    assert [live.count(AccountName(each), 2) for each in "abc"] == [1, 1, 0]
    assert [state.open().count(AccountName(each), 10) for each in "abc"] == [1, 1, 0]


def connect_at_once(connect: Any, *arguments: Any, **options: Any) -> sqlite3.Connection:
    """Connect, but don't wait for a lock."""
    connection: sqlite3.Connection = connect(*arguments, **{**options, "timeout": 0})
    return connection


def test_a_table_that_somebody_has_locked_is_not_damaged(
    state: State, fake_fusectl: FakeFusectl, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = state.open()
    added = mount(1, fake_fusectl.connect(1))
    live.add(added)
    live.close()
    monkeypatch.setattr(
        "fusermount3_broker.front.tables.database.sqlite3.connect", functools.partial(connect_at_once, sqlite3.connect)
    )
    other = sqlite3.connect(state.directory / "mounts.sqlite", isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")  # before the first access, so that the lock covers the log as well
    other.execute("BEGIN EXCLUSIVE")
    other.execute("UPDATE mounts SET uid = uid")
    other.execute("COMMIT")
    try:
        with pytest.raises(TableUnreadable, match="database is locked"):
            state.open()
    finally:
        other.close()
    assert list(state.open()) == [added]


def test_files_of_others_are_left_alone(state: State, fake_fusectl: FakeFusectl) -> None:
    state.directory.mkdir(parents=True)
    (state.directory / "README").write_text("mine")
    (state.directory / "mounts.sqlite.damaged-1").write_text("old")
    (fake_fusectl.path / "garbage").write_text("x")
    live = state.open()
    assert live.table.lost is None
    live.reconcile()
    live.close()
    assert (state.directory / "README").read_text() == "mine"
    assert (state.directory / "mounts.sqlite.damaged-1").read_text() == "old"
    assert (fake_fusectl.path / "garbage").read_text() == "x"


def test_a_state_directory_that_cannot_be_made_is_an_os_error(tmp_path: Path, fake_fusectl: FakeFusectl) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        Registry(tmp_path / "file" / "state", fake_fusectl.descriptor)


def test_mounts_that_another_fusectl_does_not_tell_of_are_decided_by_who_asks(
    state: State, fake_fusectl: FakeFusectl
) -> None:
    live = state.open()
    for device in (1, 2, 3):
        live.add(mount(device, fake_fusectl.connect(device), mount_id=0 if device == 3 else 1000 + device))
    for device in (1, 2, 3):
        fake_fusectl.reconnect(device)
    live = state.open()
    assert list(live) == []
    assert sorted(live.unsure) == [1, 2], "by its number alone no mount is known"
    live.decide(list(live.unsure.values()), {Device(1)})
    assert [(each.device, each.connection) for each in live] == [(1, live.connection(Device(1)))]
    live = state.open()
    assert ([each.device for each in live], live.unsure) == ([1], {})


def test_a_mount_that_is_not_there_any_more_leaves_one_on_its_number(state: State, fake_fusectl: FakeFusectl) -> None:
    live = state.open()
    live.add(mount(1, fake_fusectl.connect(1), mount_id=1001))
    fake_fusectl.reconnect(1)
    live = state.open()
    new = mount(1, live.connection(Device(1)), mount_id=1002)
    live.add(new)
    live.decide(list(live.unsure.values()), set())
    assert list(state.open()) == [new]


def test_however_many_are_decided_the_table_is_written_once(
    state: State, fake_fusectl: FakeFusectl, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = state.open()
    for device in range(1, 101):
        live.add(mount(device, fake_fusectl.connect(device), mount_id=1000 + device))
        fake_fusectl.reconnect(device)
    live = state.open()
    written = []
    write = live.table._write

    def write_and_count(rows: Mapping[Any, Any]) -> None:
        written.append(len(rows))
        write(rows)

    monkeypatch.setattr(live.table, "_write", write_and_count)
    live.decide(list(live.unsure.values()), set(live.unsure))
    assert written == [100]
    assert (len(live), live.unsure) == (100, {})
    assert len(state.open()) == 100


def write(directory: Path, statement: str, *values: object) -> None:
    database = sqlite3.connect(directory / "mounts.sqlite", isolation_level=None)
    database.execute(statement, values)
    database.close()


DAMAGED_ROWS: list[tuple[str, object]] = [
    *(("device", value) for value in ("x", None, -1, 2**40, 1.5, b"1")),
    *(("connection", value) for value in ("x", None, -1)),
    *(("namespace", value) for value in ("x", None, 2**32)),
    *(("uid", value) for value in ("x", None, -1, 2**32)),
    *(("pid", value) for value in ("x", None, -1)),
    *(
        (column, value)
        for column in ("command", "container", "type", "request", "account")
        for value in (5, None, b"x")
    ),
    *((column, value) for column in ("mountpoint", "source", "volume") for value in (5, None, "x")),
    *(("mounted_at", value) for value in ("now", None, -1.0, 1e300)),
    *(("mount_id", value) for value in ("x", None)),
    *(("mountpoint", value) for value in (b"/a\0b", b"x" * 65537)),
]


@pytest.mark.parametrize(("column", "value"), DAMAGED_ROWS, ids=range(len(DAMAGED_ROWS)))
def test_a_row_that_cannot_be_is_put_aside_and_the_others_are_kept(
    state: State, fake_fusectl: FakeFusectl, column: str, value: object
) -> None:
    live = state.open()
    added = [mount(device, fake_fusectl.connect(device)) for device in (1, 2, 3)]
    for each in added:
        live.add(each)
    live.close()
    write(state.directory, f"UPDATE mounts SET {column} = ? WHERE device = 2", value)

    again = state.open()
    assert list(again) == [added[0], added[2]]
    assert again.table.lost is not None
    assert again.table.lost.startswith("1 rows with invalid values: [")
    assert len(again.table.lost) < 300
    database = sqlite3.connect(state.directory / "mounts.sqlite")
    ((row,),) = database.execute("SELECT row FROM damaged")
    database.close()
    assert repr(value)[:100] in row
    again.add(mount(4, fake_fusectl.connect(4)))
    third = state.open()
    assert third.table.lost is None
    assert devices(third) == [1, 3, 4]


def test_a_command_that_is_not_utf_8_is_no_reason_to_lose_a_mount(state: State, fake_fusectl: FakeFusectl) -> None:
    live = state.open()
    live.add(mount(1, fake_fusectl.connect(1)))
    live.close()
    write(state.directory, "UPDATE mounts SET command = CAST(x'ff41' AS TEXT)")
    again = state.open()
    assert again.table.lost is None
    assert [each.command for each in again] == ["\N{REPLACEMENT CHARACTER}A"]


def test_rows_that_cannot_be_put_aside_are_passed_over(state: State, fake_fusectl: FakeFusectl) -> None:
    """The disk may be full."""
    live = state.open()
    for device in (1, 2):
        live.add(mount(device, fake_fusectl.connect(device)))
    live.close()
    write(state.directory, "UPDATE mounts SET uid = 'x' WHERE device = 2")
    write(state.directory, "CREATE TRIGGER full BEFORE DELETE ON mounts BEGIN SELECT RAISE(FAIL, 'full'); END")
    again = state.open()
    assert devices(again) == [1]
    assert again.table.lost is not None
    assert "(not put aside: " in again.table.lost


def make_directory(path: Path) -> None:
    path.mkdir()
    (path / "something").touch()


def make_dangling_link(path: Path) -> None:
    path.symlink_to("/nowhere")


@pytest.mark.parametrize("make", [make_directory, os.mkfifo, make_dangling_link])
@pytest.mark.parametrize("name", ["mounts.sqlite", "mounts.sqlite-wal", "mounts.sqlite-shm", "mounts.sqlite-journal"])
def test_what_is_no_file_is_put_aside_without_waiting_for_it(
    state: State, fake_fusectl: FakeFusectl, name: str, make: Callable[[Path], None]
) -> None:
    live = state.open()
    added = mount(1, fake_fusectl.connect(1))
    live.add(added)
    live.close()
    (state.directory / name).unlink(missing_ok=True)
    make(state.directory / name)
    again = state.open()
    assert again.table.lost is not None
    assert "not a regular file" in again.table.lost
    assert list(again) == ([] if name == "mounts.sqlite" else [added])
    again.add(mount(2, fake_fusectl.connect(2)))
    assert 2 in devices(state.open())


def test_the_mounts_of_a_volume_are_found_by_its_target_newest_first(state: State) -> None:
    registry = state.open()
    for device, volume in ((5, b"pods/1/mount"), (6, b""), (7, b"pods/2/mount"), (8, b"pods/1/mount")):
        registry.add(mount(device, state.fake.connect(device), volume=volume))
    assert [each.device for each in registry.mounts_of(b"pods/1/mount")] == [8, 5]
    assert registry.mounts_of(b"pods/3/mount") == []
