"""Whether somebody has a socket, seen without a word to them."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from broker.presence import is_had, is_left

if TYPE_CHECKING:
    from pathlib import Path


def test_a_socket_is_had_as_long_as_it_is_open_and_left_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "broker.sock"
    address = bytes(path)
    assert not is_had(address)
    assert not is_left(address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(bytes(path))
        listener.listen(1)
        listener.setblocking(False)
        for _ in range(10):
            assert is_had(address)
            assert not is_left(address)
        with pytest.raises(BlockingIOError):  # nobody has come
            listener.accept()
    assert path.exists()
    assert not is_had(address)
    assert is_left(address)


def test_nobody_has_a_socket_at_a_path_that_none_can_have(tmp_path: Path) -> None:
    address = bytes(tmp_path) + b"/" + 120 * b"x"
    assert not is_had(address)
    assert not is_left(address)
