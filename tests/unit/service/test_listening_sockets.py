"""The listening sockets: made with their modes, in place of stale ones only, and removed with all that was made."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import socket
import stat
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from fusermount3_broker.kernel import socket_probe
from fusermount3_broker.service import listening_sockets
from fusermount3_broker.service.configuration import Loopback, Socket
from fusermount3_broker.service.listening_sockets import (
    Listeners,
    Listening,
    SocketError,
    listening_for_metrics,
    make_directory,
    remove_directory,
)

OWNER = pwd.getpwuid(os.geteuid()).pw_name
GROUP = grp.getgrgid(os.getegid()).gr_name

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 and os.environ.get("CI") != "true",
    reason="not run: only root may set attributes of the trusted namespace",
)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait less for a listener that does not go away."""
    monkeypatch.setattr(listening_sockets, "_GONE_IN", 0.0)


def wanted(path: Path, mode: int = 0o666) -> Socket:
    return Socket(path, mode, OWNER, GROUP)


def connect(path: Path, kind: socket.SocketKind = socket.SOCK_SEQPACKET) -> None:
    with socket.socket(socket.AF_UNIX, kind) as caller:
        caller.connect(bytes(path))


def leave_stale(path: Path, kind: socket.SocketKind = socket.SOCK_SEQPACKET) -> None:
    with socket.socket(socket.AF_UNIX, kind) as dead:
        dead.bind(bytes(path))


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_a_socket_has_the_mode_that_is_wanted(tmp_path: Path, mode: int, umask: int) -> None:
    before = os.umask(umask)
    try:
        listeners = Listeners([wanted(tmp_path / "sock", mode)])
        assert os.umask(umask) == umask, "the umask is as it was"
    finally:
        os.umask(before)
    status = (tmp_path / "sock").stat()
    assert stat.S_ISSOCK(status.st_mode)
    assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (mode, os.geteuid(), os.getegid())
    connect(tmp_path / "sock")
    listeners.close()
    assert not (tmp_path / "sock").exists()


def test_nobody_connects_before_mode_and_owner_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, *_: str) -> None:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("fusermount3_broker.service.listening_sockets.shutil.chown", fail)
    with pytest.raises(SocketError, match="sock: Operation not permitted"):
        Listeners([wanted(tmp_path / "sock", 0o666)])
    assert list(tmp_path.iterdir()) == []


def test_several_sockets_listen_at_once(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    listeners = Listeners([wanted(path) for path in paths])
    assert [each.getsockname() for each in listeners.sockets] == [str(path) for path in paths]
    for path in paths:
        connect(path)
    listeners.close()
    assert list(tmp_path.iterdir()) == []


def test_a_socket_on_which_nobody_listens_is_replaced(tmp_path: Path) -> None:
    leave_stale(tmp_path / "sock")
    listeners = Listeners([wanted(tmp_path / "sock")])
    connect(tmp_path / "sock")
    listeners.close()


def test_a_socket_on_which_somebody_listens_is_left_alone(tmp_path: Path) -> None:
    first = Listeners([wanted(tmp_path / "sock")])
    with pytest.raises(SocketError, match=f"{tmp_path}/sock: another broker listens there"):
        Listeners([wanted(tmp_path / "sock")])
    connect(tmp_path / "sock")
    first.close()


def test_sockets_are_removed_before_a_later_broker_can_take_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits as long as somebody listens: what is removed then is not its own."""
    removed, unlink = [], Path.unlink

    def checked(path: Path, missing_ok: bool = False) -> None:
        removed.append((path.name, socket_probe.has_listener(bytes(path))))
        unlink(path, missing_ok)

    listeners = Listeners([wanted(tmp_path / "callers")])
    with listening_for_metrics(tmp_path / "metrics"):
        monkeypatch.setattr(Path, "unlink", checked)
    listeners.close()
    assert removed == [("metrics", True), ("callers", True)]


def test_who_listens_is_left_alone_however_many_wait_there(tmp_path: Path) -> None:
    """One more connection would block."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other, ExitStack() as waiting:
        other.bind(bytes(tmp_path / "sock"))
        other.listen(0)
        connection = waiting.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        connection.connect(bytes(tmp_path / "sock"))
        with pytest.raises(SocketError, match="another broker listens there"):
            Listeners([wanted(tmp_path / "sock")])


@pytest.mark.parametrize("removes", [False, True])
def test_a_broker_that_is_just_ending_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removes: bool
) -> None:
    monkeypatch.setattr(listening_sockets, "_GONE_IN", 30.0)
    path = tmp_path / "sock"
    other = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    other.bind(bytes(path))
    other.listen()

    def end(_: float) -> None:
        other.close()
        if removes:
            path.unlink()

    monkeypatch.setattr(time, "sleep", end)
    listeners = Listeners([wanted(path)])
    connect(path)
    listeners.close()


def test_a_stream_socket_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(bytes(tmp_path / "sock"))
        other.listen()
        with pytest.raises(SocketError, match=f"^{tmp_path}/sock: "):
            Listeners([wanted(tmp_path / "sock")])
        connect(tmp_path / "sock", socket.SOCK_STREAM)


@pytest.mark.parametrize("kind", ["file", "directory", "dangling link"])
def test_what_is_no_socket_is_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "sock"
    match kind:
        case "file":
            path.write_text("mine")
        case "directory":
            path.mkdir()
        case "dangling link":
            path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(SocketError, match="Address already in use"):
        Listeners([wanted(path)])
    assert list(tmp_path.iterdir()) == [path]
    assert not path.is_socket()


def test_a_mistake_in_the_second_socket_takes_the_first_away(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SocketError, match=f"^{tmp_path}/file/sock: "):
        Listeners([wanted(tmp_path / "first"), wanted(tmp_path / "file" / "sock")])
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_path_too_long_for_a_socket_is_told(tmp_path: Path) -> None:
    with pytest.raises(SocketError, match="too long"):
        Listeners([wanted(tmp_path / ("x" * 120))])
    assert list(tmp_path.iterdir()) == []


def test_missing_directories_are_made(tmp_path: Path) -> None:
    listeners = Listeners([wanted(tmp_path / "a" / "b" / "sock")])
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o755
    connect(tmp_path / "a" / "b" / "sock")
    listeners.close()
    assert not (tmp_path / "a" / "b" / "sock").exists()


def test_directories_that_were_there_stay(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    listeners = Listeners([wanted(tmp_path / "a" / "sock")])
    listeners.close()
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_directories_of_sockets_stay_because_containers_have_them(tmp_path: Path) -> None:
    listeners = Listeners([wanted(tmp_path / "a" / "b" / "one"), wanted(tmp_path / "a" / "two")])
    listeners.close()
    assert list((tmp_path / "a").iterdir()) == [tmp_path / "a" / "b"]
    assert list((tmp_path / "a" / "b").iterdir()) == []


@needs_root
def test_other_directories_that_were_made_are_removed_again(tmp_path: Path) -> None:
    made = make_directory(tmp_path / "a" / "b")
    for directory in reversed(made):
        remove_directory(directory)
    assert list(tmp_path.iterdir()) == []


@needs_root
def test_a_directory_in_which_somebody_put_something_stays(tmp_path: Path) -> None:
    make_directory(tmp_path / "a")
    (tmp_path / "a" / "mine").touch()
    remove_directory(tmp_path / "a")
    assert (tmp_path / "a" / "mine").exists()


@needs_root
def test_a_directory_that_somebody_made_in_its_place_stays(tmp_path: Path) -> None:
    make_directory(tmp_path / "a")
    (tmp_path / "a").rmdir()
    (tmp_path / "a").mkdir()
    remove_directory(tmp_path / "a")
    assert (tmp_path / "a").is_dir()


@needs_root
def test_a_socket_has_the_selinux_label_that_was_asked_for(tmp_path: Path) -> None:
    label = "system_u:object_r:container_file_t:s0"
    listeners = Listeners([replace(wanted(tmp_path / "sock"), selinux_label=label)])
    assert os.getxattr(tmp_path / "sock", "security.selinux").decode() == label
    listeners.close()


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_a_stale_socket_of_either_kind_can_be_removed(tmp_path: Path, kind: socket.SocketKind) -> None:
    leave_stale(tmp_path / "sock", kind)
    listening_sockets.remove_stale(tmp_path / "sock", kind)
    assert not (tmp_path / "sock").exists()
    listening_sockets.remove_stale(tmp_path / "sock", kind)


def test_without_systemd_nothing_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LISTEN_FDS", raising=False)
    monkeypatch.delenv("LISTEN_PID", raising=False)
    assert listening_sockets.inherited() == Listening([], None)


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET])
def test_a_listening_seqpacket_socket_is_inherited_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: socket.SocketKind
) -> None:
    passed = socket.socket(socket.AF_UNIX, kind)
    passed.bind(bytes(tmp_path / "sock"))
    if kind != socket.SOCK_DGRAM:
        passed.listen()
    monkeypatch.setattr(
        "fusermount3_broker.service.listening_sockets.daemon.listen_fds_with_names",
        lambda: {passed.fileno(): "callers"},
    )
    if kind == socket.SOCK_SEQPACKET:
        (found,) = listening_sockets.inherited().callers
        assert found.fileno() == passed.detach()
        connect(tmp_path / "sock")
        found.close()
    else:
        with passed, pytest.raises(SocketError, match="ListenSequentialPacket="):
            listening_sockets.inherited()


# Metrics


def passed_by_systemd(monkeypatch: pytest.MonkeyPatch, passed: dict[str, socket.socket]) -> None:
    found = {each.fileno(): name for name, each in passed.items()}
    monkeypatch.setattr("fusermount3_broker.service.listening_sockets.daemon.listen_fds_with_names", lambda: found)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1"])
def test_the_socket_for_metrics_is_told_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    callers = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    callers.bind(bytes(tmp_path / "sock"))
    metrics = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    metrics.bind((host, 0))
    for each in (callers, metrics):
        each.listen()
    passed_by_systemd(monkeypatch, {"metrics": metrics, "fusermount3-broker.socket": callers})
    found = listening_sockets.inherited()
    assert [each.fileno() for each in found.callers] == [callers.detach()]
    assert found.metrics and found.metrics.fileno() == metrics.detach()
    for each in (*found.callers, found.metrics):
        each.close()


def test_a_unix_socket_for_metrics_may_be_passed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = socket.socket(socket.AF_UNIX)
    metrics.bind(bytes(tmp_path / "sock"))
    metrics.listen()
    passed_by_systemd(monkeypatch, {"metrics": metrics})
    found = listening_sockets.inherited()
    assert found.callers == []
    assert found.metrics and found.metrics.fileno() == metrics.detach()
    found.metrics.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_passed_socket_that_others_reach_is_refused(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    metrics = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    metrics.bind((host, 0))
    metrics.listen()
    passed_by_systemd(monkeypatch, {"metrics": metrics})
    with pytest.raises(SocketError, match=f"for metrics on {host}, which others than this machine may reach"):
        listening_sockets.inherited()
    metrics.detach()


@pytest.mark.parametrize("kind", [socket.SOCK_DGRAM, socket.SOCK_SEQPACKET])
def test_a_passed_socket_for_metrics_is_a_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: socket.SocketKind
) -> None:
    with socket.socket(socket.AF_UNIX, kind) as metrics:
        metrics.bind(bytes(tmp_path / "sock"))
        passed_by_systemd(monkeypatch, {"metrics": metrics})
        with pytest.raises(SocketError, match="for metrics that is not ListenStream="):
            listening_sockets.inherited()


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_the_unix_socket_for_metrics_is_roots_and_its_groups(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with listening_for_metrics(tmp_path / "sock"):
            assert os.umask(umask) == umask
            status = (tmp_path / "sock").stat()
            assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o660, os.geteuid())
            connect(tmp_path / "sock", socket.SOCK_STREAM)
    finally:
        os.umask(before)
    assert list(tmp_path.iterdir()) == []


@needs_root
def test_a_directory_with_the_setgid_bit_lets_its_group_in(tmp_path: Path) -> None:
    group = grp.getgrnam("daemon").gr_gid
    os.chown(tmp_path, 0, group)
    tmp_path.chmod(0o2750)
    with listening_for_metrics(tmp_path / "sock"):
        assert (tmp_path / "sock").stat().st_gid == group


@needs_root
def test_directories_made_for_metrics_are_removed_again(tmp_path: Path) -> None:
    with listening_for_metrics(tmp_path / "a" / "b" / "sock"):
        connect(tmp_path / "a" / "b" / "sock", socket.SOCK_STREAM)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_is_listened_on_on_loopback_only_and_is_free_again(host: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    for _ in range(2):
        with listening_for_metrics(Loopback(host, port)) as listener:
            assert listener.getsockname()[:2] == (host, port)
            socket.create_connection((host, port)).close()
            with (
                pytest.raises(SocketError, match="Address already in use"),
                listening_for_metrics(Loopback(host, port)),
            ):
                pass


def test_a_socket_for_metrics_on_which_somebody_listens_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    with listening_for_metrics(path):
        with pytest.raises(SocketError, match=f"{path}: another broker listens there"), listening_for_metrics(path):
            pass
        connect(path, socket.SOCK_STREAM)


def test_a_stale_socket_for_metrics_is_replaced(tmp_path: Path) -> None:
    leave_stale(tmp_path / "sock", socket.SOCK_STREAM)
    with listening_for_metrics(tmp_path / "sock"):
        connect(tmp_path / "sock", socket.SOCK_STREAM)


def test_where_there_is_no_network_the_socket_unit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> socket.socket:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr("fusermount3_broker.service.listening_sockets.socket.socket", refuse)
    unit = r"not supported by protocol.*; see fusermount3-broker-metrics\.socket"
    with pytest.raises(SocketError, match=unit), listening_for_metrics(Loopback("127.0.0.1", 9000)):
        pass


@pytest.mark.parametrize(
    ("environment", "keeps"),
    [
        ({"NOTIFY_SOCKET": "/run/notify", "SYSTEMD_EXEC_PID": str(os.getpid())}, True),
        ({"NOTIFY_SOCKET": "/run/notify"}, False),
        ({"NOTIFY_SOCKET": "/run/notify", "SYSTEMD_EXEC_PID": "1"}, False),
        ({"SYSTEMD_EXEC_PID": str(os.getpid())}, False),
    ],
    ids=["a service", "a container", "started by a service", "not notified"],
)
def test_systemd_keeps_descriptors_of_what_it_has_started_itself(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], keeps: bool
) -> None:
    for name in ("NOTIFY_SOCKET", "SYSTEMD_EXEC_PID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert listening_sockets.systemd_keeps_descriptors() is keeps
