"""The wire codec: unpacking reverses packing, and no input of a peer makes it raise anything but ProtocolError."""

from __future__ import annotations

import array
import errno
import os
import socket
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusermount3_proxy import wire
from fusermount3_proxy.wire import (
    CommitRequest,
    MountRequest,
    ProceedRequest,
    ProtocolError,
    Reply,
    Request,
    UnmountRequest,
    UnusedRequest,
    VolumeRequest,
)

_NAME_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789-"

names = st.text(_NAME_LETTERS, min_size=1, max_size=wire.MAX_NAME)
values = st.binary(max_size=200).map(lambda value: value.replace(b"\0", b""))
components = values.map(lambda value: value.replace(b"/", b"")).filter(lambda name: name not in (b"", b".", b".."))
requests = (
    st.builds(MountRequest, values, values, st.booleans())
    | st.builds(VolumeRequest, values)
    | st.builds(UnmountRequest, values, components, st.booleans(), st.booleans(), values)
    | st.builds(ProceedRequest)
    | st.builds(CommitRequest)
    | st.builds(UnusedRequest)
)
lines = values.map(lambda value: value.replace(b"\n", b"")).filter(bool)
replies = st.builds(
    Reply,
    id=values,
    errno=st.integers(0, 999_999_999),
    text=values,
    warnings=st.lists(lines, max_size=5).map(tuple),
    auto_unmount=st.booleans(),
)


def attributes(message: Request | Reply) -> dict[str, object]:
    return {name: getattr(message, name) for name in message.__slots__}


def request_record(**changes: bytes | None) -> bytes:
    """Return the record of a valid mount request with some fields replaced, or omitted where None."""
    fields = {"protocol": b"1", "operation": b"mount", "mountpoint": b"/mnt", "options": b"ro", **changes}
    return wire.pack({name: value for name, value in fields.items() if value is not None})


# The record layer


@given(st.dictionaries(names, values, min_size=1, max_size=wire.MAX_FIELDS))
def test_fields_come_out_as_they_went_in(fields: dict[str, bytes]) -> None:
    assert list(wire.unpack(wire.pack(fields)).items()) == list(fields.items())


@given(st.binary(max_size=300))
def test_any_bytes_are_fields_or_a_protocol_error(record: bytes) -> None:
    for decode in (wire.unpack, wire.decode_reply, wire.decode_request):
        with suppress(ProtocolError):
            decode(record)


@pytest.mark.parametrize("kind", ["request", "reply"])
def test_every_prefix_is_a_message_or_a_protocol_error(kind: str) -> None:
    for record in example_records(kind):
        for end in range(len(record)):
            with suppress(ProtocolError):
                decode(kind, record[:end])


@pytest.mark.parametrize("kind", ["request", "reply"])
def test_every_change_of_one_byte_is_a_message_or_a_protocol_error(kind: str) -> None:
    for record in example_records(kind):
        for position in range(len(record)):
            for value in range(256):
                with suppress(ProtocolError):
                    decode(kind, record[:position] + bytes([value]) + record[position + 1 :])


def example_records(kind: str) -> list[bytes]:
    if kind == "reply":
        return [wire.encode_reply(Reply(b"1a2b", 13, b"no", (b"w1", b"w2")))]
    messages = (MountRequest(b"/m", b"ro"), UnmountRequest(b"/a/m", b"m", True), VolumeRequest(b"ro"), CommitRequest())
    return [wire.encode_request(message) for message in messages]


def decode(kind: str, record: bytes) -> None:
    if kind == "reply":
        wire.decode_reply(record)
        return
    wire.decode_request(record)


def test_a_record_may_fill_a_message_and_not_more() -> None:
    room = wire.MAX_MESSAGE - len(b"a=\0")
    assert len(wire.pack({"a": b"x" * room})) == wire.MAX_MESSAGE
    with pytest.raises(ProtocolError, match="more than 65536 bytes") as caught:
        wire.pack({"a": b"x" * (room + 1)})
    assert caught.value.errno == errno.EMSGSIZE


def test_a_record_has_at_most_32_fields() -> None:
    wire.unpack(b"".join(b"f%d=\0" % number for number in range(32)))
    with pytest.raises(ProtocolError, match="more than 32 fields") as caught:
        wire.unpack(b"".join(b"f%d=\0" % number for number in range(33)))
    assert caught.value.errno == errno.EBADMSG


@pytest.mark.parametrize("name", [b"", b"A", b"a_b", b"a b", b"\xc3\xa4", b"x" * 33, b"a\n"])
def test_a_field_with_a_wrong_name_is_refused(name: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed field"):
        wire.unpack(name + b"=value\0")


def test_a_name_has_at_most_32_letters() -> None:
    assert wire.unpack(b"x" * 32 + b"=\0") == {"x" * 32: b""}


@pytest.mark.parametrize("record", [b"", b"a=b", b"a=b\0c", b"a=b\0c=d"])
def test_a_record_that_does_not_end_is_refused(record: bytes) -> None:
    with pytest.raises(ProtocolError, match="does not end with a NUL byte"):
        wire.unpack(record)


@pytest.mark.parametrize("record", [b"\0", b"ab\0", b"a=b\0\0", b"=b\0"])
def test_a_field_without_name_or_equals_sign_is_refused(record: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed field"):
        wire.unpack(record)


def test_a_field_given_twice_is_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match="field 'uid' given twice"):
        wire.unpack(b"uid=1\0gid=1\0uid=0\0")


@pytest.mark.parametrize("value", [b"\0", b"a\0", b"\0b=c", b"a\0b=c"])
def test_a_value_with_a_nul_byte_cannot_be_packed(value: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.pack({"a": value})


def test_a_value_may_hold_equals_signs_and_newlines() -> None:
    assert wire.unpack(b"options=fsname=a,b\n=\0") == {"options": b"fsname=a,b\n="}


# Descriptors


def test_descriptors_are_found_in_what_recvmsg_delivers() -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        near.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, near.fileno()]))])
        _, ancillary, flags, _ = far.recvmsg(16, wire.ANCILLARY_SPACE)
        wire.check_whole(flags)
        found = wire.descriptors(ancillary)
        try:
            assert [os.fstat(each) for each in found] == [os.fstat(0), os.fstat(near.fileno())]
        finally:
            for each in found:
                os.close(each)


@pytest.mark.parametrize(
    ("ancillary", "expected"),
    [
        ([], []),
        ([(socket.SOL_SOCKET, socket.SCM_RIGHTS, b"")], []),
        ([(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [3, 5]).tobytes())], [3, 5]),
        ([(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [n]).tobytes()) for n in (7, 2)], [7, 2]),
        ([(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [9]).tobytes() + b"cut")], [9]),
        ([(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, bytes(12))], []),
        ([(socket.IPPROTO_IP, socket.SCM_RIGHTS, bytes(4))], []),
    ],
)
def test_only_passed_descriptors_count(ancillary: list[tuple[int, int, bytes]], expected: list[int]) -> None:
    assert wire.descriptors(ancillary) == expected


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (socket.MSG_TRUNC, "more than 65536 bytes"),
        (socket.MSG_CTRUNC, "more file descriptors than there is room for"),
        (socket.MSG_TRUNC | socket.MSG_CTRUNC, "more than 65536 bytes"),
    ],
)
def test_a_message_that_was_cut_is_refused(flags: int, text: str) -> None:
    with pytest.raises(ProtocolError, match=text) as caught:
        wire.check_whole(flags)
    assert caught.value.errno == errno.EMSGSIZE


def test_a_message_that_was_not_cut_is_taken() -> None:
    wire.check_whole(socket.MSG_EOR | socket.MSG_CMSG_CLOEXEC)


# Requests


@given(requests)
def test_a_request_comes_out_as_it_went_in(request: Request) -> None:
    decoded = wire.decode_request(wire.encode_request(request))
    assert type(decoded) is type(request)
    assert attributes(decoded) == attributes(request)


@given(requests)
def test_what_points_at_something_takes_one_descriptor_and_all_else_none(request: Request) -> None:
    """The mounter's child checks how many descriptors came."""
    points = isinstance(request, MountRequest | UnmountRequest)
    assert (1 if points else 0) == request.DESCRIPTORS


def test_unknown_fields_are_ignored() -> None:
    request = wire.decode_request(request_record(**{"from-the-future": b"yes"}))
    assert attributes(request) == attributes(MountRequest(b"/mnt", b"ro"))


@pytest.mark.parametrize(
    ("operation", "shown"),
    [
        (b"frobnicate", "'frobnicate'"),
        (b"", "''"),
        (b"x" * 1000, f"'{'x' * 64}'"),
        (b"\xff", "'\N{REPLACEMENT CHARACTER}'"),
    ],
)
def test_an_unknown_operation_is_refused_by_name(operation: bytes, shown: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        wire.decode_request(request_record(operation=operation))
    assert caught.value.errno == errno.EOPNOTSUPP
    assert caught.value.text == f"unknown operation {shown}"


@pytest.mark.parametrize("field", ["protocol", "operation", "mountpoint"])
def test_a_missing_field_is_refused_by_name(field: str) -> None:
    with pytest.raises(ProtocolError, match=f"field '{field}' is missing"):
        wire.decode_request(request_record(**{field: None}))


@pytest.mark.parametrize("operation", [b"mount", b"volume"])
def test_options_may_be_left_out(operation: bytes) -> None:
    assert attributes(wire.decode_request(request_record(operation=operation, options=None)))["options"] == b""


def test_a_mount_on_the_volume_names_no_mountpoint() -> None:
    request = wire.decode_request(request_record(operation=b"volume", mountpoint=None))
    assert isinstance(request, VolumeRequest)
    assert attributes(request) == {"options": b"ro"}


@pytest.mark.parametrize("spoken", [b"1", b"1-1", b"1-9", b"0-1", b"0-999999999", b"01"])
def test_a_peer_that_speaks_our_version_too_is_understood(spoken: bytes) -> None:
    wire.decode_request(request_record(protocol=spoken))


@pytest.mark.parametrize("spoken", [b"0", b"2", b"2-9", b"0-0"])
def test_a_peer_without_a_version_in_common_is_told_both_ranges(spoken: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"versions 1 to 1 are supported, the peer speaks {spoken.decode()}$") as e:
        wire.decode_request(request_record(protocol=spoken))
    assert e.value.errno == errno.EPROTONOSUPPORT


@pytest.mark.parametrize(
    "spoken", [b"", b"-", b"1-", b"-1", b"x", b"1-x", b"+1", b" 1", b"1-2-3", b"1" * 10, "¹".encode()]
)
def test_a_malformed_version_is_refused(spoken: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        wire.decode_request(request_record(protocol=spoken))
    assert caught.value.errno == errno.EBADMSG


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a/b", b"/", b"x" * 256])
def test_what_is_unmounted_is_one_path_component(name: bytes) -> None:
    with pytest.raises(ProtocolError, match="'name' is not one path component"):
        wire.decode_request(request_record(operation=b"unmount", name=name))


@pytest.mark.parametrize(
    ("operation", "field"), [(b"unmount", "lazy"), (b"unmount", "only-dead"), (b"mount", "sync-init")]
)
@pytest.mark.parametrize("value", [b"", b"2", b"true", b"01"])
def test_what_is_yes_or_no_is_0_or_1(operation: bytes, field: str, value: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"'{field}' is neither 0 nor 1"):
        wire.decode_request(request_record(**{"operation": operation, "name": b"mnt", field: value}))


def test_an_unmount_is_neither_lazy_nor_only_of_the_dead_unless_it_says_so() -> None:
    request = wire.decode_request(request_record(operation=b"unmount", name=b"mnt"))
    assert attributes(request) == attributes(UnmountRequest(b"/mnt", b"mnt", lazy=False, only_dead=False))


# Replies


@given(replies)
def test_a_reply_comes_out_as_it_went_in(reply: Reply) -> None:
    assert attributes(wire.decode_reply(wire.encode_reply(reply))) == attributes(reply)


@pytest.mark.parametrize("number", [b"", b"-1", b"1.0", b"x", b"1" * 10])
def test_a_reply_with_a_malformed_errno_is_refused(number: bytes) -> None:
    with pytest.raises(ProtocolError, match="number is malformed"):
        wire.decode_reply(wire.pack({"protocol": b"1", "id": b"a", "errno": number}))


@pytest.mark.parametrize("field", ["protocol", "id", "errno"])
def test_a_reply_without_a_field_is_refused_by_name(field: str) -> None:
    fields = {"protocol": b"1", "id": b"a", "errno": b"0"}
    del fields[field]
    with pytest.raises(ProtocolError, match=f"field '{field}' is missing"):
        wire.decode_reply(wire.pack(fields))
