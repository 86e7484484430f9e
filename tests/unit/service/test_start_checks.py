"""What would fail at the broker's start is found before."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from fusermount3_broker.service import configuration_file, start_checks
from fusermount3_broker.service.configuration_file import ConfigurationError
from fusermount3_broker.service.listening_sockets import SocketError


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


def test_one_path_in_two_spellings_is_one_path(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    text = f'metrics = "{tmp_path}/link/control.sock"'
    expected = "3: 'metrics' is the path of another socket, too, 'control_socket': 'DIRECTORY/link/control.sock'"
    assert told(tmp_path, text) == [expected]


def test_all_of_them_are_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    text = f'metrics = "{tmp_path}"\n[[socket]]\npath = "{tmp_path}/file"'
    assert told(tmp_path, text) == [
        "3: 'metrics': 'DIRECTORY' is not a socket",
        "5: 'socket.path': 'DIRECTORY/file' is not a socket",
    ]


def test_a_port_in_use_is_noted_and_nobody_is_asked_whose_it_is(tmp_path: Path) -> None:
    """It may be the running broker's; a connection could start another service."""
    file = tmp_path / "broker.toml"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert told(tmp_path, f'metrics = "127.0.0.1:{port}"') == []
        found = list(start_checks.notes(configuration_file.load(file)))
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert found[0] == f"'metrics': port {port} is in use already; fine if it is this broker's"


@pytest.mark.parametrize(("uid", "is_told"), [(0, True), (1000, False)])
def test_what_only_root_may_know_is_no_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, is_told: bool
) -> None:
    def refused(*_: object) -> None:
        raise SocketError("127.0.0.1:80: Permission denied", errno.EACCES)

    text = f'metrics = "127.0.0.1:80"\n[[socket]]\npath = "{tmp_path}/socket"'
    told(tmp_path, text)
    stat = Path.stat

    def kept(path: Path, **given: bool) -> os.stat_result:
        if path.name == "socket":
            raise PermissionError(errno.EACCES, "Permission denied")
        return stat(path, **given)

    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr("fusermount3_broker.service.listening_sockets.listening_for_metrics", refused)
    monkeypatch.setattr(Path, "stat", kept)
    expected = [
        "3: 'metrics': 127.0.0.1:80: Permission denied",
        "5: 'socket.path': 'DIRECTORY/socket': Permission denied",
    ]
    assert told(tmp_path, text) == (expected if is_told else [])


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


def test_the_service_writes_only_where_it_may_and_listens_where_systemd_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fusermount3-broker.service").touch()
    monkeypatch.setattr(start_checks, "_UNITS", (tmp_path,))
    file = tmp_path / "broker.toml"

    def noted(text: str) -> list[str]:
        file.write_text(text)
        return list(start_checks.notes(configuration_file.load(file)))

    only = "only if it is in its ReadWritePaths="
    of_metrics = "'metrics': the systemd service can write to"
    assert noted('metrics = "/srv/metrics.sock"') == [f"{of_metrics} '/srv/metrics.sock' {only}"]
    outside = "/run/fusermount3-broker/../metrics.sock"
    assert noted(f'metrics = "{outside}"') == [f"{of_metrics} '{outside}' {only}"]
    (tmp_path / "link").symlink_to("/run/fusermount3-broker")
    assert noted(f'metrics = "//run/fusermount3-broker/a.sock"\ncontrol_socket = "{tmp_path}/link/b.sock"') == []
    (of_socket,) = noted('[[socket]]\nmode = "0600"')
    assert of_socket.startswith("'socket': callers of the systemd service connect where fusermount3-broker.socket")
    assert noted('[[socket]]\nmode = "0666"') == [], "nothing else than the default"


@pytest.mark.parametrize("uid", [0, 1000])
def test_roots_rights_are_checked_by_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr(os, "access", lambda path, _: path.name != "read-only")
    (tmp_path / "read-only").mkdir()
    expected = "3: 'metrics': the broker can't write to 'DIRECTORY/read-only'"
    assert told(tmp_path, f'metrics = "{tmp_path}/read-only/a/sock"') == ([] if uid else [expected])
