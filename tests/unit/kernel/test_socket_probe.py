"""Test whether a Unix socket has a listener, without connecting to it."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from fusermount3_broker.kernel.socket_probe import has_listener, is_stale

if TYPE_CHECKING:
    from pathlib import Path


def test_a_socket_is_had_as_long_as_it_is_open_and_left_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "broker.sock"
    address = bytes(path)
    assert not has_listener(address)
    assert not is_stale(address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(bytes(path))
        listener.listen(1)
        listener.setblocking(False)
        for _ in range(10):
            assert has_listener(address)
            assert not is_stale(address)
        with pytest.raises(BlockingIOError):  # the probes made no connection
            listener.accept()
    assert path.exists()
    assert not has_listener(address)
    assert is_stale(address)


def test_nobody_has_a_socket_at_a_path_that_none_can_have(tmp_path: Path) -> None:
    address = bytes(tmp_path) + b"/" + 120 * b"x"
    assert not has_listener(address)
    assert not is_stale(address)
