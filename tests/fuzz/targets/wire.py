"""The codec of proxy and broker: an input is a record as a peer may send it, to either side."""

from __future__ import annotations

from _socket import SCM_RIGHTS, SOL_SOCKET
from collections.abc import Callable
from typing import TypeVar

from fusermount3_proxy import wire
from fusermount3_proxy.wire import ProtocolError, Reply, Request

T = TypeVar("T")

_FIELDS = [
    *(b"protocol", b"operation", b"mountpoint", b"options", b"sync-init", b"name", b"lazy", b"only-dead", b"mount"),
    *(b"id", b"errno", b"text", b"warnings", b"auto-unmount"),
]
WORDS = [b"\0" + field + b"=" for field in _FIELDS] + [b"1-1", b"=1\0", b"=0\0", *wire._REQUESTS]
SEEDS: list[bytes] = []

#: Bytes by which a message may grow when it is encoded again: the defaults of omitted fields.
_DEFAULTS = 64


def check(data: bytes) -> None:
    """Check that a decoded message survives encoding and decoding, and that all other input raises ProtocolError."""
    fields = _decoded(wire.unpack, data)
    if fields is not None:
        assert wire.pack(fields) == data
    room = len(data) <= wire.MAX_MESSAGE - _DEFAULTS
    request = _decoded(wire.decode_request, data)
    if request and room:
        _check_same(wire.decode_request(wire.encode_request(request)), request)
    reply = _decoded(wire.decode_reply, data)
    if reply and room:
        _check_same(wire.decode_reply(wire.encode_reply(reply)), reply)
    _check_descriptors(data)


def _decoded(decode: Callable[[bytes], T], data: bytes) -> T | None:
    """Return the decoded record; None if it is refused, with a text that can be sent to the peer."""
    try:
        return decode(data)
    except ProtocolError as error:
        told = Reply(b"id", error.errno, f"bad request: {error.text}".encode())
    _check_same(wire.decode_reply(wire.encode_reply(told)), told)
    return None


def _check_same(one: Request | Reply, other: Request | Reply) -> None:
    assert type(one) is type(other)
    for name in one.__slots__:
        value = getattr(one, name)
        assert value == getattr(other, name)
        assert type(value) is type(getattr(other, name))
        assert not isinstance(value, bytes) or b"\0" not in value


def _check_descriptors(data: bytes) -> None:
    """Check the bytes as ancillary data that recvmsg(2) delivers with a record."""
    found = wire.descriptors([(SOL_SOCKET, SCM_RIGHTS, data), (SOL_SOCKET, SCM_RIGHTS + 1, data)])
    assert len(found) == len(data) // 4
    assert all(0 <= each < 2**32 for each in found)
