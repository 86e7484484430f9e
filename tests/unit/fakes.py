"""Fakes of the broker, where only its answers matter, of the clock, and of the kernel's table of FUSE connections."""

from __future__ import annotations

import gc
import os
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from fusermount3_broker.front.tables.database import Table
from fusermount3_proxy import client, wire


def open_descriptors() -> int:
    """Return the number of descriptors of this process, except those that tests left to the garbage collector."""
    gc.collect()
    return all_descriptors()


def all_descriptors() -> int:
    """Return the number of descriptors of this process, including those that only the garbage collector knows."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - an iterator would itself be a descriptor


Answer = Callable[[socket.socket], None]


class FakeBroker:
    """A SEQPACKET server in a thread, which receives a request from each caller and gives the next of its answers."""

    def __init__(self, path: Path, *answers: Answer) -> None:
        self.requests: list[wire.Request] = []
        self.pinned: list[os.stat_result] = []
        """The files that the descriptors of the requests referred to."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(bytes(path))
        self._listener.listen(8)
        self._listener.settimeout(10)
        self._thread = threading.Thread(target=self._serve, args=(answers,), daemon=True)
        self._thread.start()

    def __enter__(self) -> FakeBroker:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive(), "an answer was not fetched"

    def _serve(self, answers: Sequence[Answer]) -> None:
        with self._listener:
            for answer in answers:
                try:
                    connection, _ = self._listener.accept()
                except TimeoutError:
                    return
                with connection:
                    connection.settimeout(10)
                    self._receive(connection)
                    answer(connection)

    def _receive(self, connection: socket.socket) -> None:
        data, descriptors, _, _ = socket.recv_fds(connection, wire.MAX_MESSAGE, 8)
        request = wire.decode_request(data)
        for descriptor in descriptors:
            self.pinned.append(os.fstat(descriptor))
            os.close(descriptor)
        assert len(descriptors) == request.DESCRIPTORS
        self.requests.append(request)


class FakeFusectl:
    """A directory in place of the root of fusectl."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.path = path
        self.descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY)

    def connect(self, device: int) -> int:
        """Add a FUSE connection; return its inode."""
        (self.path / str(device)).mkdir()
        return (self.path / str(device)).stat().st_ino

    def disconnect(self, device: int) -> None:
        (self.path / str(device)).rmdir()

    def reconnect(self, device: int) -> int:
        """Reuse the number with another inode: the new directory is made before the old one is removed."""
        (self.path / "new").mkdir()
        self.disconnect(device)
        (self.path / "new").rename(self.path / str(device))
        return (self.path / str(device)).stat().st_ino


@contextmanager
def full_disk() -> Iterator[None]:
    """Make SQLite report a full disk for every row; tests/e2e/test_full_disk.py uses a real disk."""

    def finds_no_room(*_: object) -> None:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Table, "_write_in_transaction", finds_no_room)
        yield


class FakeClock:
    """A clock that only sleeping advances; in this module, it takes the place of the real one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType = client) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []
        monkeypatch.setattr(module, "monotonic", lambda: self.now)
        monkeypatch.setattr(module, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def hang_up(_: socket.socket) -> None:
    """Send no answer; the server then closes the connection."""


def nothing_until(given_up: threading.Event) -> Answer:
    """Return an answer that sends nothing, and does not hang up, before the event."""

    def answer(_: socket.socket) -> None:
        given_up.wait(10)

    return answer


def raw(record: bytes, *descriptors: int) -> Answer:
    return lambda connection: _send(connection, record, descriptors)


def reply(message: wire.Reply, *descriptors: int) -> Answer:
    return raw(wire.encode_reply(message), *descriptors)


def reply_and_hear(message: wire.Reply, descriptor: int, heard: list[bytes]) -> Answer:
    """Return an answer that sends the reply, then appends the caller's next record to `heard`, empty if it hangs up."""

    def answer(connection: socket.socket) -> None:
        _send(connection, wire.encode_reply(message), [descriptor])
        heard.append(connection.recv(wire.MAX_MESSAGE))

    return answer


def _send(connection: socket.socket, record: bytes, descriptors: Sequence[int]) -> None:
    socket.send_fds(connection, [record], list(descriptors))
