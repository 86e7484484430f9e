"""Data chosen by others is bounded in the log, put aside if invalid on disk, and harmless at a terminal.

All tests use a real broker, or the real command at a real terminal.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from errno import EAGAIN
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest

from fusermount3_broker.kernel import syscalls
from tests.e2e.caller import call
from tests.e2e.conftest import USER, let_users_in, make_mountpoint, wait_until
from tests.e2e.hostile import (
    O_PATH,
    PATIENCE,
    Client,
    check_service,
    fuse_mounts,
    in_private_namespace,
    in_process,
    mount,
    mount_request,
    unmount,
    unmount_request,
)
from tests.lab.broker import PROGRAM, PROXY, Broker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.e2e, pytest.mark.long]

# The log -------------------------------------------------------------------------------------------------------

#: The longest record in bytes, as stated in docs/security.md.
LONGEST_RECORD = 8192


@pytest.mark.parametrize("byte", [b"\x01", b"\xff", b'"', "é".encode()], ids=repr)
def test_no_request_makes_a_record_longer_than_eight_kibibytes(broker: Broker, users: Path, byte: bytes) -> None:
    """The requests are within all limits: a request holds 64 KiB, and JSON turns one byte into six."""
    long = byte * (30_000 // len(byte))

    def body() -> None:
        for record in (
            mount_request(Path(os.fsdecode(b"/" + long)), long),
            mount_request(Path(os.fsdecode(b"/" + long)), b"fsname=" + long[:4000]),
            unmount_request(Path(os.fsdecode(b"/" + long) + "/user")),
        ):
            with Client(broker, USER) as client:
                client.send(record, os.open(users, O_PATH))
                client.reply()

    before = broker.log.stat().st_size

    def written() -> list[bytes]:
        with broker.log.open("rb") as log:
            log.seek(before)
            return log.read().splitlines(keepends=True)

    def calls() -> list[dict[str, Any]]:
        told = [json.loads(each.decode()) for each in written() if each.endswith(b"\n")]  # each is JSON in UTF-8
        return [each for each in told if "mountpoint" in each]

    in_private_namespace(body)
    wait_until(lambda: len(calls()) == 3)  # a caller gets its reply before the log has the record
    assert max(map(len, written())) <= LONGEST_RECORD
    assert all(each["request_id"] for each in calls())


def test_what_callers_have_called_their_mounts_does_not_keep_an_administrator_from_seeing_them(
    broker: Broker, users: Path
) -> None:
    """The path of a mountpoint may be as long as a message; it is only for people to read."""
    long = b"\x01" * 40_000

    def body() -> None:
        with Client(broker, USER) as client:
            options = b"fsname=" + long[:3000] + b",subtype=" + long[:3000]
            client.send(mount_request(Path(os.fsdecode(b"/" + long)), options), os.open(users, O_PATH))
            reply = client.reply()
            assert reply is not None
            assert reply.errno == 0, reply.text
            client.send(b"protocol=1-1\0operation=commit\0")
            client.reply()
            (listed,) = broker.mounts()
            assert len(json.dumps(listed)) < 100_000
            assert len(listed["mountpoint"]) == 4096
        unmount(broker, users, uid=USER, lazy=True)

    in_private_namespace(body)


# The terminal --------------------------------------------------------------------------------------------------

#: Escapes that change the title of a terminal, clear it, set colours and overwrite a line.
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\rE"
STATUS = {
    "version": ESCAPES,
    "configuration": ESCAPES,
    "uptime_seconds": 1,
    "mounts": 1,
    "mount_states": {ESCAPES: 1},
    "requests": {f"{ESCAPES} {ESCAPES}": 1},
    "latency": {ESCAPES: {"buckets": [[0.001, 0], [None, 0]], "seconds": 0}},
    "limits_hit": {ESCAPES: 1},
    "sockets": {ESCAPES: [ESCAPES]},
    "volumes": 0,
    **{name: {"pid": 1, "rss_bytes": 1, "open_descriptors": 1, "restarts": 0} for name in ("front", "mounter")},
    "supervisor": {"pid": 1, "rss_bytes": 1},
}
NAMES = (
    *("request_id", "mountpoint", "type", "source", "command", "program_command", "container", "account", "volume"),
)
MOUNT: dict[str, Any] = dict.fromkeys(NAMES, ESCAPES) | {"uid": 0, "pid": 0, "mounted_at": 1.0, "state": "live"}


@contextlib.contextmanager
def owned_front(directory: Path, answers: dict[str, Any]) -> Iterator[Path]:
    """Answer on the control socket as an attacker who owns the front; yield the configuration that names the socket."""
    (directory / "broker.toml").write_text(f'control_socket = "{directory}/control.sock"\n')
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "control.sock"))
        listener.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, connection.makefile("rb") as asked:
                        connection.sendall(json.dumps(answers[asked.readline().split()[0].decode()]).encode())

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield directory / "broker.toml"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def at_a_terminal(command: list[str | Path], keys: bytes = b"") -> bytes:
    """Run the command at a terminal; return its output there. `keys` are pressed at the first output."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    shown = b""
    try:
        while select.select([ours], [], [], PATIENCE)[0]:
            part = os.read(ours, 65536)
            shown += part
            if keys:
                os.write(ours, keys)
                keys = b""
    except OSError:  # EIO: no process has the terminal open any more
        pass
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return shown


@pytest.mark.parametrize(
    ("command", "answers"),
    [
        (["status"], {"status": STATUS}),
        (["health"], {"health": {"problem": ESCAPES}}),
        (["mounts"], {"mounts": [MOUNT]}),
        (["mounts", "--json"], {"mounts": [MOUNT]}),
        (["mounts", "--watch"], {"mounts": [MOUNT]}),
        (["status", "--json"], {"status": STATUS}),
        (["abort", "f00f"], {"mounts": [{"request_id": "f00f0000"}], "abort": {"error": ESCAPES}}),
        (["abort", "f00f"], {"mounts": [{"request_id": "f00f0000"}], "abort": MOUNT}),
        (["top"], {"status": STATUS, "mounts": [MOUNT]}),
        (["top", "--once"], {"status": STATUS, "mounts": [MOUNT]}),
    ],
    ids=lambda value: "-".join(value),
)
def test_who_owns_the_front_sends_nothing_to_an_administrators_terminal(
    tmp_path: Path, command: list[str], answers: dict[str, Any]
) -> None:
    with owned_front(tmp_path, answers) as config:
        name, *rest = command
        shown = at_a_terminal([PROGRAM, name, "--config", config, *rest], b"q")
    assert b"owned" in shown, shown
    assert b"\x1b]0;" not in shown
    assert b"\x1b[2J" not in shown
    assert b"\x07" not in shown
    assert b"\rE" not in shown
    assert "\x9b".encode() not in shown


# The state directory -------------------------------------------------------------------------------------------


def make_directory(path: Path) -> None:
    path.mkdir()
    (path / "something").touch()


def make_dangling_link(path: Path) -> None:
    path.symlink_to("/nowhere")


@pytest.mark.parametrize("make", [make_directory, os.mkfifo, make_dangling_link])
@pytest.mark.parametrize("name", ["mounts.sqlite", "mounts.sqlite-wal", "mounts.sqlite-shm"])
def test_a_broker_starts_whatever_is_in_the_place_of_its_table(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    kept, other = tmp_path / "kept", tmp_path / "other"
    kept.mkdir()
    other.mkdir()

    def body() -> None:
        with Broker() as broker:
            device = mount(broker, kept)
            broker.stop()
            (broker.directory / "state" / name).unlink(missing_ok=True)
            make(broker.directory / "state" / name)
            broker.start()
            assert [each.mountpoint for each in fuse_mounts()] == [str(kept)], "what lives goes on living"
            known = [] if name == "mounts.sqlite" else [str(kept)]
            assert [each["mountpoint"] for each in broker.mounts()] == known
            check_service(broker, other)
            assert broker.records("a file in place of a table was moved aside: ")
            os.close(device)
            syscalls.umount2(bytes(kept), syscalls.MNT_DETACH)

    with fusectl():
        in_private_namespace(body)


@contextlib.contextmanager
def fusectl() -> Iterator[None]:
    """Keep fusectl mounted all the time, as systemd does on every host."""
    context = syscalls.fsopen(b"fusectl", syscalls.FSOPEN_CLOEXEC)
    syscalls.fsconfig(context, syscalls.FSCONFIG_CMD_CREATE, None, None, 0)
    mounted = syscalls.fsmount(context, syscalls.FSMOUNT_CLOEXEC, 0)
    os.close(context)
    try:
        yield
    finally:
        os.close(mounted)


ROWS = {
    "uid": "'root'",
    "device": "NULL",
    "mounted_at": "'yesterday'",
    "mountpoint": "5",
    "namespace": "1099511627776",
}


@pytest.mark.parametrize("column", ROWS)
def test_a_row_that_cannot_be_costs_no_other_mount(tmp_path: Path, column: str) -> None:
    """And a row whose text is not valid UTF-8 is not even lost itself."""
    places = [tmp_path / name for name in ("first", "second", "third")]
    for place in places:
        place.mkdir()

    def body() -> None:
        with Broker() as broker:
            devices = [mount(broker, place) for place in places]
            broker.stop()
            with contextlib.closing(sqlite3.connect(broker.directory / "state/mounts.sqlite")) as table, table:
                table.execute(
                    "UPDATE mounts SET command = CAST(x'ff' AS TEXT) WHERE mountpoint = ?", [bytes(places[0])]
                )
                table.execute(f"UPDATE mounts SET {column} = {ROWS[column]} WHERE mountpoint = ?", [bytes(places[1])])
            broker.start()
            assert [each["mountpoint"] for each in broker.mounts()] == [str(places[0]), str(places[2])]
            (said,) = broker.records("the table of mounts was damaged")
            assert "1 rows with invalid values" in said["message"]
            assert len(fuse_mounts()) == 3
            for device in devices:
                os.close(device)
            unmount(broker, places[0])
            unmount(broker, places[2])
            syscalls.umount2(bytes(places[1]), syscalls.MNT_DETACH)

    with fusectl():
        in_private_namespace(body)


# The configuration ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["mount_max = " + "[" * 3000, "[" + "a." * 2000 + "b]", "a = {" * 2000], ids=["list", "key", "table"]
)
def test_a_file_that_nests_deeply_ends_nobody_when_it_is_loaded(tmp_path: Path, text: str) -> None:
    place = tmp_path / "place"
    place.mkdir()

    def body() -> None:
        with Broker() as broker:
            broker.config.write_text(text)
            broker.process.send_signal(signal.SIGHUP)
            broker.wait_for("configuration not loaded, the old one stays in force: ")
            check_service(broker, place)
            said = subprocess.run([PROGRAM, "check-config", broker.config], capture_output=True, text=True)
            assert (said.returncode, said.stdout, said.stderr.count("\n")) == (1, "", 1)
            assert said.stderr.startswith(f"Error: {broker.config}: ")
            broker.configure("")

    in_private_namespace(body)


def test_a_relative_path_of_the_configuration_is_absolute_for_callers(tmp_path: Path) -> None:
    """Callers have another working directory."""
    let_users_in(tmp_path)
    place = make_mountpoint(tmp_path, "place")
    relative = ("sh", "-c", 'cd "${3%/*}" && exec "$0" "$1" "$2" "${3##*/}"', PROGRAM)

    def body() -> None:
        with Broker(command=relative) as broker, Client(broker, USER) as client:
            client.send(mount_request(place, b"allow_other"), os.open(place, O_PATH))
            _, text = client.refused()
            assert text == f"option allow_other only allowed if 'user_allow_other' is set in {broker.config}"

    in_private_namespace(body)


# Subordinate uids ----------------------------------------------------------------------------------------------

FIRST, COUNT = 1_410_065_408, 65536
#: Runs a command with a file of the test as its /etc/subuid.
WITH_SUBUID = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/subuid && exec "$@"')


def test_a_user_with_many_subordinate_uids_is_one_account(tmp_path: Path) -> None:
    """Outside user.slice, only the uid shows the account of a process. A process can have such a uid from a set-user-ID
    file, or because it has stayed in a user namespace; this broker does not ask for the reason."""
    subuid = tmp_path / "subuid"
    subuid.write_text(f"{USER}:{FIRST}:{COUNT}\n")
    limits = "[deadlines]\nrequest = 60\n[limits]\nrequests_per_second = 0\nconcurrent = 4"

    def body() -> None:
        with Broker(limits, command=(*WITH_SUBUID, subuid, PROGRAM)) as broker, contextlib.ExitStack() as held:
            for number in range(4):
                held.enter_context(Client(broker, FIRST + 1000 * number))
            for uid in (USER, FIRST + 7, FIRST + COUNT - 1):
                text = f"too many requests at once from this user; limits.concurrent=N can be set in {broker.config}"
                with Client(broker, uid) as client:
                    assert client.refused() == (EAGAIN, text)
            with Client(broker, FIRST + COUNT) as client:
                client.socket.send(b"garbage")
                assert client.refused()[0] != EAGAIN, "another's uid is another account"

    in_process(body)


def test_a_user_namespace_with_subordinate_uids_is_no_account_of_its_own(tmp_path: Path) -> None:
    subuid = tmp_path / "subuid"
    subuid.write_text(f"{USER}:{FIRST}:{COUNT}\n")
    limits = "[deadlines]\nrequest = 60\n[limits]\nrequests_per_second = 0\nconcurrent = 2"

    def body() -> None:
        with Broker(limits, command=(*WITH_SUBUID, subuid, PROGRAM)) as broker, contextlib.ExitStack() as held:
            for number in range(2):
                held.enter_context(caller_in_user_namespace(FIRST + 5 * number, broker.socket))
            said = held.enter_context(caller_in_user_namespace(FIRST + 50, broker.socket))
            assert said.readline() == f"{EAGAIN}\n"

    in_process(body)


#: Enters a new user namespace, becomes its root, connects, reports that, and prints the errno of the reply.
CONNECT = """
import ctypes, os, socket, sys
assert ctypes.CDLL(None).unshare(0x10000000) == 0
print("unshared", flush=True)
sys.stdin.readline()
os.setgid(0)
os.setuid(0)
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(sys.argv[1])
print("connected", flush=True)
print(connection.recv(65536).split(b"errno=")[1].split(bytes(1))[0].decode(), flush=True)
"""


@contextlib.contextmanager
def caller_in_user_namespace(uid: int, path: Path) -> Iterator[IO[str]]:
    """Start a caller that is root in its user namespace and has that uid outside; yield its standard output."""
    process = subprocess.Popen(
        [sys.executable, "-c", CONNECT, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "unshared\n"
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{process.pid}/{name}").write_text(f"0 {uid} 1\n")
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.stdout.readline() == "connected\n"
        yield process.stdout
    finally:
        process.kill()
        process.communicate()


# The limits of a caller ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("-o", "rw"), ("-u",)], ids="-".join)
def test_a_caller_with_few_descriptors_is_told_so(
    broker: Broker, users: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """This holds for whichever step of the proxy lacks a descriptor."""
    monkeypatch.setenv("FUSERMOUNT3PROXY_FDPASSING_SOCKPATH", str(broker.socket))
    said: dict[int, str] = {}

    def body() -> None:
        for limit in range(3, 13):
            device = mount(broker, users) if arguments == ("-u",) else None
            # prlimit sets the limit for the proxy alone, not for the process that starts it.
            outcome = call(["prlimit", f"--nofile={limit}:{limit}", PROXY, *arguments, "--", users])
            said[limit] = outcome.stderr
            print(f"{limit} {outcome.status}: {outcome.stderr}")
            if outcome.status == 0:
                assert outcome.stderr == ""
            else:
                assert outcome.descriptor is None
                assert len(fuse_mounts()) == (device is not None), "the broker was still undoing the mount"
                assert outcome.stderr.endswith(": Too many open files\n")
                assert "internal error" not in outcome.stderr
                assert str(broker.socket) not in outcome.stderr, "it is not the broker that has too many"
            outcome.close()
            if device is not None:
                os.close(device)
            if (outcome.status == 0 and device is None) or (outcome.status and device is not None):
                unmount(broker, users, lazy=True)
        assert said[3] != ""
        assert said[12] == ""

    in_private_namespace(body)
