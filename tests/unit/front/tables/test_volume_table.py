"""The table of volumes: a volume that was recorded before a crash is known after it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusermount3_broker.front.model import Volume
from fusermount3_broker.front.tables.volume_table import Volumes
from fusermount3_broker.messages.mounter import NO_GROUP
from tests.unit.samples import VOLUME

OTHER = replace(VOLUME, target=b"other", id=b"csi-2", name=b"other.sock")

texts = st.binary(max_size=50).map(lambda text: text.replace(b"\0", b""))  # NUL, which no record of the plugin holds
volumes = st.builds(
    Volume,
    target=texts,
    id=texts,
    pod=st.text("0123456789abcdef-", max_size=36),
    directory=texts,
    name=texts,
    old_clients=st.booleans(),
    eager=st.booleans(),
    read_only=st.booleans(),
    allow_other=st.booleans(),
    options=texts,
    group=st.integers(0, NO_GROUP),
    alone=st.booleans(),
    share=texts,
    namespace=texts,
    borrows=texts,
)


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Volumes]:
    table = Volumes(tmp_path)
    yield table
    table.close()


def reopened(table: Volumes, directory: Path) -> Volumes:
    """Return the table as the next front opens it, after the last one was killed."""
    table.close()
    return Volumes(directory)


@settings(max_examples=20)
@given(st.lists(volumes, unique_by=lambda volume: volume.target, max_size=4))
def test_volumes_come_out_as_they_went_in(tmp_path_factory: pytest.TempPathFactory, given: list[Volume]) -> None:
    directory = tmp_path_factory.mktemp("state")
    table = Volumes(directory)
    for volume in given:
        table.add(volume)
    table = reopened(table, directory)
    assert list(table) == given
    assert [type(value) for each in table for value in vars_of(each)] == [
        type(value) for each in given for value in vars_of(each)
    ]
    table.close()


def test_a_volume_keeps_the_nonce_with_which_its_socket_is_made(table: Volumes, tmp_path: Path) -> None:
    again = replace(VOLUME, nonce=b"another")
    assert again == VOLUME, "kubelet does not know it"
    table.add(VOLUME)
    table = reopened(table, tmp_path)
    found = table.find(VOLUME.target)
    assert found is not None
    assert found.nonce == VOLUME.nonce
    table.close()


def test_what_kubelet_asks_for_again_is_known_to_a_table_of_an_earlier_version(table: Volumes, tmp_path: Path) -> None:
    table.add(VOLUME)
    table.close()
    with sqlite3.connect(tmp_path / "volumes.sqlite", isolation_level=None) as database:
        for column in ("share", "namespace", "borrows"):
            database.execute(f"ALTER TABLE volumes DROP COLUMN {column}")
    database.close()
    table = Volumes(tmp_path)
    assert list(table) == [replace(VOLUME, namespace=b"shop", borrows=b"k\n")]
    table.close()


def test_sources_and_borrowers_are_found_by_their_keys(table: Volumes, tmp_path: Path) -> None:
    first = replace(VOLUME, target=b"1", name=b"1", share=b"k")
    second = replace(VOLUME, target=b"2", name=b"2", share=b"k")
    other = replace(VOLUME, target=b"3", name=b"3", share=b"l")
    borrower = replace(VOLUME, target=b"4", borrows=b"k\nk2\n").as_borrower()
    sidecar = replace(VOLUME, target=b"5", borrows=b"k\n")
    for each in (first, second, other, borrower, sidecar):
        table.add(each)
    table.note_taken(first.target)
    table = reopened(table, tmp_path)
    assert table.sources(borrower.keys) == [second, first], "the last published first"
    assert table.sources({b""}) == []
    assert (table.borrowers(b"k"), table.borrowers(b"k2"), table.borrowers(b"l")) == ([borrower], [borrower], [])
    table.close()


def test_a_borrower_has_no_socket(table: Volumes) -> None:
    table.add(replace(VOLUME, target=b"1").as_borrower())
    assert table.with_same_socket(replace(VOLUME, target=b"2").as_borrower()) is None


def vars_of(volume: Volume) -> list[object]:
    return [getattr(volume, name) for name in Volume.__slots__]


def test_what_was_removed_is_not_known_any_more(table: Volumes, tmp_path: Path) -> None:
    table.add(VOLUME)
    table.add(OTHER)
    table.remove(VOLUME.target)
    table.remove(b"no such target")
    table = reopened(table, tmp_path)
    assert (list(table), table.find(VOLUME.target), table.find(OTHER.target)) == ([OTHER], None, OTHER)
    table.close()


def test_that_a_program_has_the_filesystem_is_known_until_the_machine_is_booted(table: Volumes, tmp_path: Path) -> None:
    table.add(VOLUME)
    table.add(OTHER)
    table.note_taken(VOLUME.target)
    table = reopened(table, tmp_path)
    assert (table.is_taken(VOLUME.target), table.is_taken(OTHER.target)) == (True, False)
    with sqlite3.connect(tmp_path / "volumes.sqlite") as database:
        database.execute("PRAGMA user_version = 1")  # of another boot
    table = reopened(table, tmp_path)
    assert list(table) == [VOLUME, OTHER], "what was made for them has to be removed all the same"
    assert not table.is_taken(VOLUME.target)
    table.close()


def test_a_volume_that_is_published_anew_has_no_program_yet(table: Volumes) -> None:
    table.add(VOLUME)
    table.note_taken(VOLUME.target)
    table.remove(VOLUME.target)
    table.add(VOLUME)
    assert not table.is_taken(VOLUME.target)
    table.note_taken(b"no such target")
    assert not table.is_taken(b"no such target")


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (replace(VOLUME, target=b"other"), True),
        (replace(VOLUME, target=b"other", name=b"fuse.sock.seqpacket"), False),
        (replace(VOLUME, target=b"other", name=b"fuse.sock.seqpacket", directory=b"elsewhere"), False),
        (replace(VOLUME, target=b"other", directory=b"elsewhere"), False),
    ],
)
def test_two_volumes_cannot_have_one_socket(table: Volumes, other: Volume, expected: bool) -> None:
    table.add(VOLUME)
    assert table.with_same_socket(VOLUME) is None, "itself"
    assert (table.with_same_socket(other) is not None) == expected


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (False, False, False),
        (True, False, True),
        (False, True, True),
        (True, True, True),
    ],
)
def test_a_volume_that_is_to_be_alone_has_no_other_target(
    table: Volumes, one: bool, other: bool, expected: bool
) -> None:
    table.add(replace(VOLUME, alone=one))
    second = replace(VOLUME, target=b"other", directory=b"elsewhere", alone=other)
    assert table.at_other_target(replace(VOLUME, alone=one)) is None, "itself"
    assert (table.at_other_target(second) is not None) == expected
    assert table.at_other_target(replace(second, id=b"csi-2")) is None


def test_the_second_socket_of_old_clients_is_the_volumes_too(table: Volumes) -> None:
    table.add(replace(VOLUME, old_clients=True))
    assert table.with_same_socket(replace(VOLUME, target=b"other", name=b"fuse.sock.seqpacket"))


def test_a_damaged_table_is_put_aside(tmp_path: Path) -> None:
    (tmp_path / "volumes.sqlite").write_bytes(b"nonsense" * 1000)
    table = Volumes(tmp_path)
    assert list(table) == []
    assert table.table.lost and "volumes.sqlite.damaged-" in table.table.lost
    table.close()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("target", "text"), ("target", None), ("pod", b"x"), ("eager", 2), ("alone", "yes"), ("group", -1)),
        *(("options", b"a\0b"), ("taken", 5), ("nonce", None)),
    ],
)
def test_a_row_that_cannot_be_is_put_aside_and_the_others_are_kept(tmp_path: Path, column: str, value: object) -> None:
    table = Volumes(tmp_path)
    table.add(VOLUME)
    table.add(OTHER)
    table.note_taken(OTHER.target)
    table.close()
    database = sqlite3.connect(tmp_path / "volumes.sqlite", isolation_level=None)
    database.execute(f'UPDATE volumes SET "{column}" = ? WHERE target = ?', [value, VOLUME.target])
    database.close()
    table = Volumes(tmp_path)
    assert list(table) == [OTHER]
    assert table.is_taken(OTHER.target)
    assert table.table.lost and table.table.lost.startswith("1 rows with invalid values: ")
    table = reopened(table, tmp_path)
    assert (list(table), table.table.lost) == ([OTHER], None)
    table.close()
