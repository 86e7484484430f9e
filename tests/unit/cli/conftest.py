"""A control socket that stands in for a broker's."""

from __future__ import annotations

import json
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class FakeControlSocket:
    """A control socket that answers each question with the next of the given values, or bytes.

    `config` is a configuration file that names it.
    """

    def __init__(self, directory: Path) -> None:
        self.config = directory / "broker.toml"
        self.path = directory / "control.sock"
        self.config.write_text(f'control_socket = "{self.path}"\n')
        self.questions: list[bytes] = []
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def answer(self, *values: Any) -> None:
        contents = [value if isinstance(value, bytes) else json.dumps(value).encode() + b"\n" for value in values]
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(bytes(self.path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, args=(self._listener, contents), daemon=True)
        self._thread.start()

    def _serve(self, listener: socket.socket, contents: list[bytes]) -> None:
        for content in contents:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as question:
                self.questions.append(question.readline())
                connection.sendall(content)

    def close(self) -> None:
        if self._thread and self._listener:
            self._thread.join(10)
            self._listener.close()


@pytest.fixture
def fake_control(tmp_path: Path) -> Iterator[FakeControlSocket]:
    fake = FakeControlSocket(tmp_path)
    yield fake
    fake.close()
