"""The comm socket: it is found by argument or environment, and carries one byte with one descriptor."""

from __future__ import annotations

import os
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusermount3_proxy import comm
from fusermount3_proxy.failure import Failure

KINDS = [socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair(socket.AF_UNIX, request.param)
    with near, far:
        yield near, far


@pytest.fixture
def device(tmp_path: Path) -> Iterator[int]:
    """A descriptor in place of that of /dev/fuse."""
    descriptor = os.open(tmp_path / "device", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def number_of(end: socket.socket) -> bytes:
    """Return the number of a duplicate of the socket, for its finder to own."""
    return b"%d" % os.dup(end.fileno())


def complaint(argument: bytes | None, environment: dict[bytes, bytes]) -> str:
    with pytest.raises(Failure) as caught:
        comm.find(argument, environment)
    return caught.value.text.decode("latin-1")


def test_the_environment_names_the_socket(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    found = comm.find(None, {b"_FUSE_COMMFD": number_of(near)})
    found.send(b"x")
    assert far.recv(2) == b"x"
    found.close()


def test_the_argument_beats_the_environment(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    number = number_of(near)
    found = comm.find(number, {b"_FUSE_COMMFD": b"garbage"})
    assert found.fileno() == int(number)
    found.send(b"x")
    assert far.recv(2) == b"x"
    found.close()


def test_without_either_the_call_is_of_a_style_that_is_gone() -> None:
    assert complaint(None, {}) == "old style mounting not supported"


@pytest.mark.parametrize(
    "text", [b"", b"x", b"3x", b"-", b"+", b"- 1", b"3.0", b"0x3", b"99999999999999999999", "٣".encode()]
)
def test_a_number_that_is_none_is_told(text: bytes) -> None:
    expected = f"invalid _FUSE_COMMFD: {text.decode('latin-1')}"
    assert complaint(None, {b"_FUSE_COMMFD": text}) == expected
    assert complaint(text, {}) == expected


def test_a_file_is_no_socket(device: int) -> None:
    told = complaint(None, {b"_FUSE_COMMFD": b"%d" % device})
    assert told == f"file descriptor {device} is not a socket, can't send fuse fd"
    os.fstat(device)  # still open


@pytest.mark.parametrize(
    ("text", "number"), [(b"999999", 999999), (b"-1", -1), (b" +999999", 999999), (b"000999999", 999999)]
)
def test_a_number_that_is_not_open_is_told_as_that(text: bytes, number: int) -> None:
    """The number is parsed as by strtol(3)."""
    assert complaint(text, {}) == f"fstat of comm fd {number} failed: Bad file descriptor"


def test_one_byte_and_one_descriptor_are_sent(pair: tuple[socket.socket, socket.socket], device: int) -> None:
    near, far = pair
    comm.send(near, device)
    near.close()
    data, descriptors, flags, _ = socket.recv_fds(far, 100, 10)
    assert data == b"\0"
    assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
    assert len(descriptors) == 1
    assert os.path.sameopenfile(descriptors[0], device)
    os.close(descriptors[0])
    if far.type != socket.SOCK_DGRAM:  # a datagram socket has no end of file
        assert far.recv(100) == b""


def test_a_caller_that_is_gone_is_a_failure_and_no_signal(
    pair: tuple[socket.socket, socket.socket], device: int
) -> None:
    near, far = pair
    far.close()
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as in the executable
    try:
        with pytest.raises(
            Failure, match=r"sending file descriptor: (Broken pipe|Connection refused|Connection reset)"
        ):
            comm.send(near, device)
    finally:
        signal.signal(signal.SIGPIPE, before)


# --sync-init


def test_a_byte_says_that_the_program_is_ready(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    far.send(b"\0")
    comm.wait_until_ready(near)


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_a_program_that_closes_is_not_ready(kind: socket.SocketKind) -> None:
    near, far = socket.socketpair(socket.AF_UNIX, kind)
    far.close()
    with near, pytest.raises(Failure, match="connection closed while waiting for signal"):
        comm.wait_until_ready(near)


def test_a_program_that_never_is_ready_is_given_up(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comm, "READY_TIMEOUT", 0.01)
    with pytest.raises(Failure, match="timed out after 0 seconds waiting for signal"):
        comm.wait_until_ready(pair[0])


@pytest.mark.parametrize("number", [0, 1, 110, 4095])
def test_the_status_is_an_int_of_c(pair: tuple[socket.socket, socket.socket], number: int) -> None:
    near, far = pair
    comm.send_status(near, number)
    assert struct.unpack("i", far.recv(100)) == (-number,)


def test_a_program_that_is_gone_is_seen(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    assert comm.is_open(near)
    far.send(b"unread")
    assert comm.is_open(near)
    assert near.recv(10) == b"unread"
    far.close()
    assert comm.is_open(near) is (near.type == socket.SOCK_DGRAM)  # it doesn't show the end
