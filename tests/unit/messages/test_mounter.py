"""The records between front and mounter: a record loads only if it has exactly the fields of its kind."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusermount3_broker.messages import mounter
from fusermount3_broker.messages.mounter import Failed, Keep, Made, MountPlan, Record, StartUnmount, UnmountPlan
from fusermount3_broker.messages.records import bounds
from fusermount3_proxy.wire import ProtocolError, pack, unpack

KINDS: tuple[type[Record], ...] = Record.__args__

MADE = Made(device=12, mount_namespace=34, pids=mounter.PIDS_SEEN)


def values_of(hint: Any) -> st.SearchStrategy[object]:
    if hint is bytes:
        return st.binary(max_size=60).map(lambda value: value.replace(b"\0", b""))
    if hint is bool:
        return st.booleans()
    return st.integers(0, bounds(hint)[-1])


def records_of(kind: type[Record]) -> st.SearchStrategy[Record]:
    hints = get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{name: values_of(hint) for name, hint in hints.items()})


records = st.one_of([records_of(kind) for kind in KINDS])


def test_every_class_of_records_can_be_said() -> None:
    classes = {value for value in vars(mounter).values() if isinstance(value, type) and hasattr(value, "_fields")}
    assert classes == set(KINDS)


@given(records)
def test_a_record_comes_out_as_it_went_in(record: Record) -> None:
    loaded = mounter.load(mounter.dump(record))
    assert type(loaded) is type(record)
    assert loaded == record
    assert [type(value) for value in loaded] == [type(value) for value in record]


@given(records, st.data())
def test_a_record_that_lacks_a_field_is_refused(record: Record, data: st.DataObject) -> None:
    fields = unpack(mounter.dump(record))
    del fields[data.draw(st.sampled_from(sorted(fields)))]
    refuse(pack(fields) if fields else b"")


@given(records)
def test_a_record_with_a_surplus_field_is_refused(record: Record) -> None:
    refuse(mounter.dump(record) + b"surplus=1\0")


@given(records.filter(len), st.data())
def test_a_number_that_is_none_is_refused(record: Record, data: st.DataObject) -> None:
    hints = get_type_hints(type(record))
    numbers = [name for name, hint in hints.items() if hint is not bytes]
    if not numbers:
        return
    name = data.draw(st.sampled_from(numbers))
    wrong = [b"", b"-1", b"x", b"1.0", b"+1", b" 1", b"1" * 21, b"0x1"]
    if hints[name] is int:
        wrong.append(b"%d" % bounds(get_type_hints(type(record), include_extras=True)[name]).stop)
    else:
        wrong += [b"2", b"01", b"true"]
    fields = unpack(mounter.dump(record))
    fields[name.replace("_", "-")] = data.draw(st.sampled_from(wrong))
    refuse(pack(fields))


@pytest.mark.parametrize("kind", KINDS)
def test_an_errno_is_one_that_has_a_description(kind: type[Record]) -> None:
    """The mounter's errno goes to strerror(3), to which Python doesn't pass every number."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if name.endswith("errno"):
            assert os.strerror(bounds(hint)[-1])


@pytest.mark.parametrize("kind", [b"", b"made", b"Record", b"Reply", b"StartMount2", b"Made\xff"])
def test_an_unknown_kind_is_refused(kind: bytes) -> None:
    refuse(pack({**unpack(mounter.dump(MADE)), "kind": kind}))


def test_the_fields_of_another_kind_are_refused() -> None:
    refuse(mounter.dump(MADE).replace(b"Made", b"Failed"))
    refuse(mounter.dump(Keep()).replace(b"Keep", b"UnmountPlan"))


def test_a_record_of_no_fields_is_its_kind_alone() -> None:
    assert mounter.dump(Keep()) == b"kind=Keep\0"


def test_a_value_with_a_nul_byte_cannot_be_said() -> None:
    with pytest.raises(ProtocolError):
        mounter.dump(StartUnmount(5, b"a\0b", False))
    with pytest.raises(ProtocolError):
        mounter.dump(Failed(5, b"\0lazy=1"))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_record_or_refused(data: bytes) -> None:
    with suppress(ProtocolError):
        mounter.load(data)


def test_every_change_of_one_byte_is_a_record_or_refused() -> None:
    for data in (mounter.dump(UnmountPlan(True, b"id")), mounter.dump(MADE)):
        for position in range(len(data)):
            for value in range(256):
                with suppress(ProtocolError):
                    mounter.load(data[:position] + bytes([value]) + data[position + 1 :])


def test_the_longest_plan_fits_into_a_record() -> None:
    hints = get_type_hints(MountPlan)
    longest: dict[type, Any] = {int: 1, bool: True, bytes: b"x" * 4096}
    record = MountPlan(**{name: longest[hint] for name, hint in hints.items()})
    assert mounter.load(mounter.dump(record)) == record


def refuse(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        mounter.load(data)
