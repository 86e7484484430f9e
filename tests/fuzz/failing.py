"""A target that fails, to see that this is noticed."""

from __future__ import annotations

from fusermount3_proxy import wire
from fusermount3_proxy.wire import ProtocolError

WORDS = [b"a=1", b"\0"]
SEEDS: list[bytes] = []


def check(data: bytes) -> None:
    """What is a record passes only if it is none."""
    try:
        wire.unpack(data)
    except ProtocolError:
        return
    raise AssertionError("a record")
