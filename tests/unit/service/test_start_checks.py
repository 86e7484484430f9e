"""What would fail at the broker's start is found before."""

from __future__ import annotations

import http.server
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusermount3_broker.service import configuration_file, start_checks
from fusermount3_broker.service.configuration_file import ConfigurationError


def told(directory: Path, text: str) -> list[str]:
    """Return the mistakes that a check finds in a file with `text`, each with its line."""
    file = directory / "broker.toml"
    if "[[socket]]" not in text:
        text += f'\n[[socket]]\npath = "{directory}/run/broker.sock"'
    file.write_text(f'control_socket = "{directory}/run/control.sock"\nstate_directory = "{directory}"\n{text}')
    configuration_file.load(file)
    try:
        configuration_file.load(file, start_checks.mistakes)
    except ConfigurationError as error:
        return [each.removeprefix(f"{file}:").replace(str(directory), "DIRECTORY") for each in error.args]
    return []


@pytest.fixture
def port() -> Iterator[int]:
    """A port on which a program listens that is no broker."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_what_can_be_made_is_good(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "here/left.sock"))
    text = f'metrics = "{tmp_path}/here/left.sock"\n[[socket]]\npath = "{tmp_path}/a/b/c"'
    before = sorted(tmp_path.rglob("*"))
    assert told(tmp_path, text) == []
    assert sorted(set(tmp_path.rglob("*")) - {tmp_path / "broker.toml"}) == before, "nothing was made"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('metrics = "{}/file/sock"', "3: 'metrics': 'DIRECTORY/file' is not a directory"),
        ('metrics = "{}/file"', "3: 'metrics': 'DIRECTORY/file' is not a socket"),
        ('metrics = "{}/link/sock"', "3: 'metrics': 'DIRECTORY/link' is a broken link"),
        ('[[socket]]\npath = "{}"', "4: 'socket.path': 'DIRECTORY' is not a socket"),
    ],
)
def test_a_path_where_nothing_can_be_made_is_told(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    assert told(tmp_path, text.replace("{}", str(tmp_path))) == [expected]


def test_all_of_them_are_told_at_once(tmp_path: Path, port: int) -> None:
    (tmp_path / "file").touch()
    text = f'metrics = "127.0.0.1:{port}"\n[[socket]]\npath = "{tmp_path}/file"'
    assert told(tmp_path, text) == [
        f"3: 'metrics': 127.0.0.1:{port}: Address already in use",
        "5: 'socket.path': 'DIRECTORY/file' is not a socket",
    ]


@pytest.mark.parametrize(
    ("body", "is_told"), [(b'fusermount3_broker_build_info{version="1"} 1.0\n', False), (b"node_info 1.0\n", True)]
)
def test_a_port_of_the_running_broker_is_not_in_its_way(tmp_path: Path, body: bytes, is_told: bool) -> None:
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the name that http.server calls
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            assert bool(told(tmp_path, f'metrics = "127.0.0.1:{server.server_port}"')) is is_told
        finally:
            server.shutdown()
            thread.join()


def test_what_the_service_cannot_do_is_noted_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "broker.toml"
    file.write_text(
        'metrics = "[::1]:9467"\nstate_directory = "/srv/state"\ncontrol_socket = "/run/fusermount3-broker/c"'
    )
    found = configuration_file.load(file)
    monkeypatch.setattr(start_checks, "_UNITS", (tmp_path / "none", tmp_path))
    assert list(start_checks.notes(found)) == []
    (tmp_path / "fusermount3-broker.service").touch()
    noted = [each.partition("; ")[0] for each in start_checks.notes(found)]
    assert noted == [
        "'metrics': the systemd service has no network, so it can't start with a port",
        "'state_directory': the systemd service can write to '/srv/state' only if it is in its ReadWritePaths=",
    ]


@pytest.mark.parametrize("uid", [0, 1000])
def test_roots_rights_are_checked_by_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr(os, "access", lambda path, _: path.name != "read-only")
    (tmp_path / "read-only").mkdir()
    expected = "3: 'metrics': the broker can't write to 'DIRECTORY/read-only'"
    assert told(tmp_path, f'metrics = "{tmp_path}/read-only/a/sock"') == ([] if uid else [expected])
