"""A target that fails, to test that failures are reported."""

from __future__ import annotations

from fusermount3_proxy import wire
from fusermount3_proxy.wire import ProtocolError

WORDS = [b"a=1", b"\0"]
SEEDS: list[bytes] = []


def check(data: bytes) -> None:
    """Fail for every input that is a record."""
    try:
        wire.unpack(data)
    except ProtocolError:
        return
    raise AssertionError("a record")
