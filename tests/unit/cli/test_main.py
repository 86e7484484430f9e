"""The administrator's commands, with a fake control socket in place of the broker."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fusermount3_broker.cli import main
from fusermount3_proxy import __version__
from tests.unit.cli.conftest import FakeControlSocket

ROOT = Path(__file__).parents[3]


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(main.main, [str(each) for each in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), "no traceback"
    return result


# serve


def test_on_a_kernel_that_is_too_old_the_exit_status_keeps_systemd_from_trying_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fusermount3_broker.kernel.features.too_old", lambda: "Linux 5.10 is too old")
    result = run("serve")
    assert (result.exit_code, result.output) == (os.EX_UNAVAILABLE, "Error: Linux 5.10 is too old\n")
    service = ROOT / "packaging/systemd/fusermount3-broker.service"
    assert f"RestartPreventExitStatus={result.exit_code}" in service.read_text().splitlines()


# check-config


def test_a_good_configuration_is_said_to_be_good(tmp_path: Path) -> None:
    file = tmp_path / "broker.toml"
    file.write_text("mount_max = 5\n")
    result = run("check-config", file)
    assert (result.exit_code, result.output) == (0, f"{file}: good\n")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("mount_maxx = 5", "unknown key 'mount_maxx', did you mean 'mount_max'?"),
        ("mount_max = 'x'", "'mount_max' must be a whole number, not 'x'"),
    ],
)
def test_a_bad_configuration_is_told_in_one_line(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "broker.toml"
    file.write_text(text)
    result = run("check-config", file)
    assert (result.exit_code, result.output) == (1, f"Error: {file}:1: {complaint}\n")


def test_all_mistakes_are_told_each_in_a_line(tmp_path: Path) -> None:
    file = tmp_path / "broker.toml"
    file.write_text("mount_max = 'x'\nhung_seconds = -1")
    assert run("check-config", file).output == (
        f"Error: {file}:1: 'mount_max' must be a whole number, not 'x'\n"
        f"{file}:2: 'hung_seconds' must be between 0 and 1000000, not -1\n"
    )


def test_what_only_a_start_would_find_does_not_keep_a_running_broker_from_loading_the_file(tmp_path: Path) -> None:
    file = tmp_path / "broker.toml"
    file.write_text(f"control_socket = '{file}'")
    result = run("check-config", file)
    assert (result.exit_code, result.output) == (1, f"Error: {file}:1: 'control_socket': '{file}' is not a socket\n")
    assert run("check-config", "--reload", file).output == f"{file}: good\n"


def test_a_reload_is_checked_first() -> None:
    """systemd.service(5): if a command of ExecReload= fails, the next is not executed, and the reload fails."""
    service = (ROOT / "packaging/systemd/fusermount3-broker.service").read_text()
    reload = [line.partition("=")[2] for line in service.splitlines() if line.startswith("ExecReload=")]
    assert reload == ["/usr/bin/fusermount3-broker check-config --reload --pid $MAINPID", "kill -HUP $MAINPID"]


@pytest.mark.parametrize("given", [["--config", "edited.toml"], ["--log-format=text", "--config={}/edited.toml"]])
def test_the_file_is_checked_that_the_broker_was_started_with(tmp_path: Path, given: list[str]) -> None:
    (tmp_path / "edited.toml").write_text("mount_max = 'x'")
    arguments = [each.replace("{}", str(tmp_path)) for each in given]
    with sleeping(tmp_path, "serve", *arguments) as pid:
        result = run("check-config", "--reload", "--pid", str(pid))
    expected = f"Error: {tmp_path}/edited.toml:1: 'mount_max' must be a whole number, not 'x'\n"
    assert (result.exit_code, result.output) == (1, expected)


def test_of_a_broker_without_a_file_the_defaults_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusermount3_broker.service.configuration_file.DEFAULT_PATH", tmp_path / "none.toml")
    with sleeping(tmp_path, "csi", "--endpoint", "unix:///a", "--node-id=n") as pid:
        result = run("check-config", "--reload", "--pid", str(pid))
    assert (result.exit_code, result.output) == (0, f"{tmp_path}/none.toml does not exist: the defaults apply\n")


def test_a_process_that_is_no_broker_is_told(tmp_path: Path) -> None:
    with sleeping(tmp_path, "something") as pid:
        result = run("check-config", "--pid", str(pid))
    assert (result.exit_code, result.output) == (1, f"Error: process {pid} is no broker\n")
    result = run("check-config", "--pid", str(pid))
    assert result.output == f"Error: process {pid} can't be looked at: /proc/{pid}/cmdline: No such file or directory\n"
    assert run("check-config", "--pid", str(pid), "file").exit_code == 2


@contextlib.contextmanager
def sleeping(directory: Path, *arguments: str) -> Iterator[int]:
    """Run a process with these arguments in a directory.

    It writes when it runs: between execve(2)'s closing of descriptors and its end, /proc/PID/cmdline is empty.
    """
    program = [sys.executable, "-c", "print(flush=True); input()", *arguments]
    with subprocess.Popen(program, cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"\n"
            yield process.pid
        finally:
            process.stdin.write(b"\n")
            process.stdin.close()


def test_without_a_file_the_defaults_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusermount3_broker.service.configuration_file.DEFAULT_PATH", tmp_path / "none.toml")
    result = run("check-config", "--reload")
    assert (result.exit_code, result.output) == (0, f"{tmp_path}/none.toml does not exist: the defaults apply\n")


def test_a_configuration_that_is_missing_is_told(tmp_path: Path) -> None:
    result = run("check-config", tmp_path / "none.toml")
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: {tmp_path}/none.toml: ")


def test_serving_with_a_bad_configuration_fails_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "broker.toml"
    file.write_text("nonsense = 1")
    result = run("serve", "--config", file)
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: {file}:1: unknown key 'nonsense'")
    assert result.output.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--endpoint", "tcp://1.2.3.4", "--node-id", "n"], "Error: --endpoint must be like unix:///csi/csi.sock"),
        (["--endpoint", "unix:///csi.sock", "--node-id", "n" * 300], "Error: --node-id must be of 1 to 256 bytes"),
        (["--endpoint", "unix:///csi.sock"], "Missing option '--node-id'"),
        (["--node-id", "n"], "Missing option '--endpoint'"),
    ],
)
def test_a_plugin_that_cannot_serve_is_told_before_anything_begins(options: list[str], complaint: str) -> None:
    result = run("csi", *options)
    assert result.exit_code != 0
    assert complaint in result.output


def test_the_version_is_told() -> None:
    result = CliRunner().invoke(main.main, ["--version"], prog_name="fusermount3-broker")
    assert (result.exit_code, result.output) == (0, f"fusermount3-broker, version {__version__}\n")


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_lists_the_commands(option: str) -> None:
    output = run(option).output
    for command in ("serve", "check-config", "status", "mounts", "top"):
        assert command in output


@pytest.mark.parametrize("group", [[], ["cdi"]])
def test_help_cuts_no_summary(group: list[str]) -> None:
    output = run(*group, "--help").output
    summaries = re.sub(r"\s+", " ", output.partition("Commands:")[2])
    assert "..." not in summaries
    assert (
        group or "csi Run the broker as `serve` does, and the CSI node plugin, which publishes volumes for" in summaries
    )


# status and mounts

STATUS = {
    "version": "0.1.0",
    "configuration": "/etc/broker.toml",
    "kernel": {
        "release": "6.1.0-40-amd64",
        "lacks": [{"name": "SO_PEERPIDFD", "since": "6.5", "otherwise": "callers are identified by their pid"}],
    },
    "uptime_seconds": 12,
    "sockets": {"callers": ["/run/broker.sock"], "metrics": ["127.0.0.1:9467"]},
    "mounts": 2,
    "mount_states": {"live": 2, "dead": 0, "hung": 1},
    "requests": {"mount mounted": 3, "mount refused": 1},
    "latency": {"mount": {"buckets": [[0.002, 0], [0.004, 4], [None, 4]], "seconds": 0.012}},
    "limits_hit": {"mount_max": 1},
    "children": {"working": 2, "stuck": 1},
    "tables": {"mounts": "the broker can't write its table", "volumes": "ok"},
    "supervisor": {"pid": 9, "rss_bytes": 2**20 * 20},
    "front": {"pid": 10, "rss_bytes": 2**20 * 30, "open_descriptors": 20},
    "mounter": {"pid": 11, "rss_bytes": 2**20 * 9, "restarts": 0},
}
MOUNT = {
    "request_id": "1a2b3c4d",
    "device": 51,
    "mountpoint": "/mnt/a b",
    "type": "fuse.sshfs",
    "source": "host:",
    "uid": 1000,
    "pid": 77,
    "command": "fusermount3",
    "program_pid": 4711,
    "program_command": "sshfs",
    "container": "libpod-" + "f" * 64 + ".scope",
    "account": "container /machine.slice/libpod-" + "f" * 64 + ".scope",
    "mount_namespace": 4026531840,
    "mounted_at": 1700000000.0,
    "state": "live",
    "waiting": 0,
}


def test_status_is_told_in_words(fake_control: FakeControlSocket) -> None:
    fake_control.answer(STATUS)
    result = run("status", "--config", fake_control.config)
    assert result.exit_code == 0
    assert fake_control.questions == [b"status\n"]
    lines = result.output.splitlines()
    assert lines == [
        "version        0.1.0",
        "configuration  /etc/broker.toml",
        "kernel         6.1.0-40-amd64",
        "lacks          SO_PEERPIDFD (Linux 6.5): callers are identified by their pid",
        "up             00:00:12",
        "mounts         2 live, 0 dead, 1 hung",
        "socket         /run/broker.sock, for callers",
        "socket         127.0.0.1:9467, for metrics",
        "table          the broker can't write its table",
        "supervisor     pid 9, 20.0 MiB",
        "front          pid 10, 30.0 MiB",
        "mounter        pid 11, 9.0 MiB",
        "descriptors    20 of the front",
        "restarts       0 of the mounter",
        "children       2 working, 1 stuck",
        "mount mounted:           3",
        "mount refused:           1",
        "mount takes:             p50 3.00 ms, p99 3.98 ms",
        "mount_max hit:           1",
    ]


def test_status_tells_of_volumes_where_there_are_any(fake_control: FakeControlSocket) -> None:
    plugin = {"pid": 12, "rss_bytes": 40 * 2**20, "restarts": 1}
    fake_control.answer(STATUS | {"volumes": 3, "plugin": plugin})
    lines = run("status", "--config", fake_control.config).output.splitlines()
    assert lines[6] == "volumes        3 published"
    assert lines[13:18] == [
        "plugin         pid 12, 40.0 MiB",
        "descriptors    20 of the front",
        "restarts       0 of the mounter",
        "               1 of the plugin",
        "children       2 working, 1 stuck",
    ]


def test_status_tells_of_mount_pods_where_they_serve_any(fake_control: FakeControlSocket) -> None:
    plugin = {"pid": 12, "rss_bytes": 40 * 2**20, "restarts": 1}
    fake_control.answer(STATUS | {"volumes": 4, "sources": 1, "borrowers": 2, "plugin": plugin})
    lines = run("status", "--config", fake_control.config).output.splitlines()
    assert lines[6] == "volumes        4 published, 1 of mount pods, 2 by mount pods"


def test_a_mount_without_a_mountpoint_is_shown_by_its_volume(fake_control: FakeControlSocket) -> None:
    fake_control.answer([MOUNT | {"mountpoint": "", "volume": "pods/1/volumes/v/mount"}])
    assert "pods/1/volumes/v/mount" in run("mounts", "--config", fake_control.config).output


def test_status_as_json_is_what_the_broker_answered(fake_control: FakeControlSocket) -> None:
    fake_control.answer(STATUS)
    assert json.loads(run("status", "--config", fake_control.config, "--json").output) == STATUS


def test_a_broker_that_can_serve_is_healthy(fake_control: FakeControlSocket) -> None:
    fake_control.answer({"problem": ""})
    result = run("health", "--config", fake_control.config)
    assert fake_control.questions == [b"health\n"]
    assert (result.exit_code, result.output) == (0, "ok\n")


def test_a_broker_that_can_not_serve_is_not_healthy_and_says_why(fake_control: FakeControlSocket) -> None:
    fake_control.answer({"problem": "the broker is ending"})
    result = run("health", "--config", fake_control.config)
    assert (result.exit_code, result.output) == (1, "Error: the broker is ending\n")


def test_mounts_are_a_table_of_one_line_each(fake_control: FakeControlSocket) -> None:
    fake_control.answer([MOUNT, MOUNT | {"request_id": "ffff", "mountpoint": "/" + "long/" * 100}])
    result = run("mounts", "--config", fake_control.config)
    assert fake_control.questions == [b"mounts\n"]
    headings, first, second = result.output.splitlines()
    assert headings.split() == [
        "REQUEST",
        "STATE",
        "AGE",
        "MOUNTPOINT",
        "TYPE",
        "SOURCE",
        "UID",
        "PID",
        "COMMAND",
        "CONTAINER",
    ]
    for each in ("1a2b3c4d", "live", "/mnt/a b", "fuse.sshfs", "host:", "1000", "4711", "sshfs", "f" * 12):
        assert each in first
    assert "/" + "long/" * 100 in second


def test_very_many_mounts_are_a_table_of_one_line_each(fake_control: FakeControlSocket) -> None:
    fake_control.answer([MOUNT | {"mountpoint": f"/mnt/{number}"} for number in range(1000)])
    output = run("mounts", "--config", fake_control.config).output.splitlines()
    assert len(output) == 1001
    place = output[0].index("MOUNTPOINT")
    assert [line[place:].split()[0] for line in output[1:]] == [f"/mnt/{number}" for number in range(1000)]


def test_no_mounts_are_a_table_without_lines(fake_control: FakeControlSocket) -> None:
    fake_control.answer([])
    assert len(run("mounts", "--config", fake_control.config).output.splitlines()) == 1


def test_a_mount_that_is_aborted_is_named(fake_control: FakeControlSocket) -> None:
    fake_control.answer([MOUNT], MOUNT)
    result = run("abort", "--config", fake_control.config, "1a2b")
    assert (result.exit_code, result.output) == (0, "aborted 1a2b3c4d: /mnt/a b, fuse.sshfs\n")
    assert fake_control.questions == [b"mounts\n", b"abort 1a2b3c4d\n"]


def test_what_cannot_be_aborted_is_told_in_one_line(fake_control: FakeControlSocket) -> None:
    fake_control.answer([MOUNT], {"error": "no live mount has the id '1a2b3c4d'"})
    result = run("abort", "--config", fake_control.config, "1a2b")
    assert (result.exit_code, result.output) == (1, "Error: no live mount has the id '1a2b3c4d'\n")


def test_mounts_as_json_are_what_the_broker_answered_with_their_containers(fake_control: FakeControlSocket) -> None:
    fake_control.answer([MOUNT])
    told = json.loads(run("mounts", "--config", fake_control.config, "--json").output)
    assert told == [MOUNT | {"container_id": "f" * 64, "container_name": ""}]


@pytest.mark.parametrize("field", ["mountpoint", "type", "source", "program_command", "container"])
@pytest.mark.parametrize(
    "text", ["\x1b[2Jgone", "a\rb", "a\nb", "\x9b2J", "a\x07\x08", "[red]x[/red]", "\udcff", "\u202etxt"]
)
def test_what_a_caller_chose_cannot_move_the_terminals_cursor(
    fake_control: FakeControlSocket, field: str, text: str
) -> None:
    fake_control.answer([MOUNT | {field: text}])
    output = run("mounts", "--config", fake_control.config).output
    assert len(output.splitlines()) == 2
    assert output.replace("\n", "").isprintable()
    if text == "[red]x[/red]":
        assert text in output


def test_a_broker_that_does_not_run_is_told(fake_control: FakeControlSocket) -> None:
    for command in ("status", "health", "mounts", "top"):
        result = run(command, "--config", fake_control.config)
        assert result.exit_code == 1
        assert result.output.startswith(f"Error: no broker answers at {fake_control.path}: ")
        assert result.output.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b"garbage\n", b'{"version": ', b"\xff\xfe\n"])
def test_what_is_no_answer_is_told(fake_control: FakeControlSocket, content: bytes) -> None:
    fake_control.answer(content)
    result = run("status", "--config", fake_control.config)
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: no broker answers at {fake_control.path}: ")


def test_a_bad_configuration_is_told_by_every_command(tmp_path: Path) -> None:
    file = tmp_path / "broker.toml"
    file.write_text("x = 1")
    commands: list[Callable[[], Result]] = [
        lambda: run("status", "--config", file),
        lambda: run("mounts", "--config", file),
        lambda: run("top", "--config", file),
    ]
    for command in commands:
        result = command()
        assert (result.exit_code, result.output.partition(", ")[0]) == (1, f"Error: {file}:1: unknown key 'x'")


ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202e"


def poisoned(value: Any) -> Any:
    """Return the answer with escape sequences in every string, keys too, as from an attacker who owns the front."""
    if isinstance(value, dict):
        return {key: poisoned(each) for key, each in value.items()} | {f"{key}{ESCAPES}": 1 for key in value}
    if isinstance(value, list):
        return [poisoned(each) for each in value]
    return f"{value}{ESCAPES}" if isinstance(value, str) else value


COUNTED = {name: {f"mount {ESCAPES}": 1} for name in ("requests", "limits_hit")}
POISONED = [
    ("status", poisoned(STATUS) | {"mount_states": {ESCAPES: 1}} | COUNTED),
    ("status", STATUS | COUNTED | {"latency": {ESCAPES: {"buckets": [(0.001, 0), (None, 1)]}}}),
    ("health", {"problem": ESCAPES}),
    ("mounts", [poisoned(MOUNT)]),
    ("abort", poisoned(MOUNT)),
    ("abort", {"error": ESCAPES}),
]


@pytest.mark.parametrize(("command", "answer"), POISONED, ids=range(len(POISONED)))
def test_who_owns_the_front_cannot_move_the_terminals_cursor(
    fake_control: FakeControlSocket, command: str, answer: Any
) -> None:
    fake_control.answer(answer)
    output = run(command, "--config", fake_control.config, *(["1a2b"] if command == "abort" else [])).output
    assert output
    assert output.replace("\n", "").isprintable()
    assert output.isascii()


STRANGE: list[Any] = [
    *([], {}, None, 5, "text", [5], [[]], {"problem": []}),
    STATUS | {"uptime_seconds": "long"},
    STATUS | {"uptime_seconds": 1e999},
    STATUS | {"latency": {"mount": {"buckets": [["a", "b"]]}}},
    STATUS | {"front": {"pid": 1, "rss_bytes": 10**400}},
    STATUS | {"requests": {"mount": {}}, "mount_states": []},
    [MOUNT | {"mounted_at": 1e300}],
    [MOUNT | {"mounted_at": "now"}],
    [MOUNT | {"state": ["live"], "mountpoint": 5}],
    b"[" * 100_000,
    b"[" * 400 + b"]" * 400,
    b'{"a":' * 100_000,
    b"1" * 5000,
    b'{"problem": NaN, "uptime_seconds": Infinity}',
]


@pytest.mark.parametrize("answer", STRANGE, ids=range(len(STRANGE)))
@pytest.mark.parametrize("command", [["status"], ["health"], ["mounts"], ["abort", "1a2b"], ["mounts", "--json"]])
def test_what_no_broker_answers_ends_with_one_line(
    fake_control: FakeControlSocket, command: list[str], answer: Any
) -> None:
    fake_control.answer(answer)
    name, *rest = command
    result = run(name, "--config", fake_control.config, *rest)
    assert isinstance(result.exception, SystemExit | None)
    if result.exit_code:
        assert result.output.splitlines()[-1].startswith("Error: ")


@pytest.mark.parametrize("answer", [each for each in STRANGE if not isinstance(each, bytes)], ids=str)
def test_what_no_broker_answers_ends_top_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    monkeypatch.setattr("fusermount3_broker.cli.control_client.ask", lambda *_: answer)
    (tmp_path / "broker.toml").touch()
    result = run("top", "--config", tmp_path / "broker.toml")
    assert result.output == "Error: the broker's answer is malformed\n"


def test_an_answer_without_an_end_is_not_waited_for(
    fake_control: FakeControlSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusermount3_broker.cli.control_client.LONGEST_ANSWER", 1000)
    fake_control.answer(b" " * 1001)
    result = run("mounts", "--config", fake_control.config)
    assert result.output.endswith(": an answer of more than 1000 bytes\n")


def test_an_answer_that_comes_slowly_is_not_waited_for(
    fake_control: FakeControlSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if bytes keep arriving."""
    monkeypatch.setattr("fusermount3_broker.cli.control_client.PATIENCE", 0.2)
    given_up = threading.Event()

    def drip(listener: socket.socket, _: bytes) -> None:
        connection, _address = listener.accept()
        with connection:
            while not given_up.wait(0.01):
                with contextlib.suppress(OSError):
                    connection.send(b" ", socket.MSG_NOSIGNAL)

    monkeypatch.setattr(fake_control, "_serve", drip)
    fake_control.answer(b"")
    try:
        assert "timed out" in run("health", "--config", fake_control.config).output
    finally:
        given_up.set()


def test_a_mistake_in_the_configuration_cannot_move_the_terminals_cursor(tmp_path: Path) -> None:
    file = tmp_path / "broker.toml"
    file.write_text(f'"a{ESCAPES!r}"=1'.replace("'", "").replace("\\x", "\\u00"))
    output = run("check-config", file).output
    assert "unknown key" in output
    assert output.replace("\n", "").isprintable()
