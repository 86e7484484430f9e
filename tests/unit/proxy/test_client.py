"""The connection to the broker: where the client looks for it, how long it waits, and which answers it believes."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
from _socket import SocketType
from pathlib import Path
from typing import Any

import pytest

from fusermount3_proxy import approach, client, wire
from fusermount3_proxy.failure import Failure
from fusermount3_proxy.wire import MountRequest, Reply, VolumeRequest
from tests.unit.fakes import FakeBroker, FakeClock, hang_up, nothing_until, raw, reply, reply_and_hear

REQUEST = MountRequest(b"/mnt", b"ro")
GOOD = Reply(b"1a2b")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "broker.sock"


@pytest.fixture
def fake_clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return FakeClock(monkeypatch)


def ask(path: Path | bytes) -> client.Answer:
    """Send the request with a descriptor of /, close the connection, and return the answer."""
    descriptor = os.open("/", os.O_PATH)
    try:
        answer = client.ask(bytes(path), REQUEST, descriptor)
        answer.connection.close()
        return answer
    finally:
        os.close(descriptor)


def failure(path: Path | bytes) -> str:
    with pytest.raises(Failure) as caught:
        ask(path)
    return caught.value.text.decode()


# Discovery


@pytest.fixture
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "socket"
    monkeypatch.setattr(approach, "CONFIGURATION", bytes(file))
    return file


def test_the_environment_names_the_socket_first(configuration: Path) -> None:
    configuration.write_text("/from/file\n")
    assert approach.socket_path({approach.VARIABLE: b"/from/env"}) == b"/from/env"


@pytest.mark.parametrize("text", ["/from/file", "/from/file\n", "/from/file\n/second\n", "  /from/file \t\n"])
def test_else_the_first_line_of_the_file_in_etc_does(configuration: Path, text: str) -> None:
    configuration.write_text(text)
    assert approach.socket_path({}) == b"/from/file"
    assert approach.socket_path({approach.VARIABLE: b""}) == b"/from/file"


@pytest.mark.parametrize("text", ["", "\n", "  \n/second\n"])
def test_without_a_line_in_the_file_it_is_the_default(configuration: Path, text: str) -> None:
    configuration.write_text(text)
    assert approach.socket_path({}) == b"/run/fusermount3-proxy/broker.sock"


def test_without_a_file_it_is_the_default(configuration: Path) -> None:
    assert not configuration.exists()
    assert approach.socket_path({}) == approach.DEFAULT_PATH


def test_a_file_that_cannot_be_read_is_as_none(configuration: Path) -> None:
    configuration.mkdir()
    assert approach.socket_path({}) == approach.DEFAULT_PATH


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        ({b"_FUSE_COMMFD": b"3"}, "/of/program"),
        ({b"_FUSE_COMMFD": b"3", b"PATH": b"/bin"}, "/from/file"),
        ({b"_FUSE_COMMFD": b"3", approach.VARIABLE: b"/of/helper"}, "/of/helper"),
        ({}, "/from/file"),
    ],
)
def test_a_helper_that_go_fuse_runs_asks_the_environment_of_the_program(
    configuration: Path, left: dict[bytes, bytes], expected: str
) -> None:
    configuration.write_text("/from/file\n")
    helper = (
        f"from fusermount3_proxy import approach; approach.CONFIGURATION = {bytes(configuration)!r}; "
        f"print(approach.socket_path({left!r}).decode())"
    )
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {helper!r}], env={{}}, check=True)"
    environment = {"FILL": "x" * 100_000, approach.VARIABLE.decode(): "/of/program"}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == f"{expected}\n"


def test_the_variable_and_the_file_are_the_documented_ones() -> None:
    assert approach.VARIABLE == b"FUSERMOUNT3PROXY_FDPASSING_SOCKPATH"
    assert approach.CONFIGURATION == b"/etc/fusermount3-proxy/socket"


# The exchange


def test_the_broker_gets_request_and_descriptor_and_its_reply_comes_back(path: Path) -> None:
    sent = Reply(b"1a2b", errno.EPERM, b"no", (b"one", b"two"))
    with FakeBroker(path, reply(sent)) as fake_broker:
        answer = ask(path)
    assert [(type(each), each.fields()) for each in fake_broker.requests] == [(MountRequest, REQUEST.fields())]
    assert [each.st_ino for each in fake_broker.pinned] == [Path("/").stat().st_ino]
    received = answer.reply
    assert (received.id, received.errno, received.text, received.warnings) == (b"1a2b", 1, b"no", (b"one", b"two"))
    assert answer.descriptor == -1


def test_a_request_without_a_descriptor_attaches_none(path: Path) -> None:
    with FakeBroker(path, reply(GOOD)) as fake_broker:
        client.ask(bytes(path), VolumeRequest(b"ro"), -1).connection.close()
    assert [(type(each), each.fields()) for each in fake_broker.requests] == [(VolumeRequest, {"options": b"ro"})]


def test_a_descriptor_of_the_reply_arrives(path: Path, tmp_path: Path) -> None:
    (tmp_path / "device").touch()
    device = os.open(tmp_path / "device", os.O_RDWR)
    with FakeBroker(path, reply(GOOD, device)):
        answer = ask(path)
    try:
        assert os.path.sameopenfile(answer.descriptor, device)
        assert not os.get_inheritable(answer.descriptor)
    finally:
        os.close(answer.descriptor)
        os.close(device)


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        (b"garbage", "message does not end with a NUL byte"),
        (b"garbage\0", "message holds a malformed field"),
        (b"protocol=1\0id=a\0", "field 'errno' is missing"),
        (b"protocol=1\0id=a\0errno=many\0", "a number is malformed"),
        (b"protocol=2\0id=a\0errno=0\0", "protocol versions 1 to 1 are supported, the peer speaks 2"),
        (b"x" * (wire.MAX_MESSAGE + 1), "message of more than 65536 bytes"),
    ],
)
def test_a_malformed_reply_is_told_and_not_asked_for_again(path: Path, record: bytes, complaint: str) -> None:
    with FakeBroker(path, raw(record)):
        assert failure(path) == f"broker at {path}: {complaint}"


@pytest.mark.parametrize(
    ("count", "complaint"),
    [(2, "reply with surplus file descriptors"), (5, "message with more file descriptors than there is room for")],
)
def test_surplus_descriptors_are_told(path: Path, count: int, complaint: str) -> None:
    with FakeBroker(path, reply(GOOD, *[0] * count)):
        assert failure(path) == f"broker at {path}: {complaint}"


def test_a_broker_that_says_nothing_is_given_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "REPLY_TIMEOUT", 0.05)
    given_up = threading.Event()
    with FakeBroker(path, nothing_until(given_up)):
        assert failure(path) == "mount failed: Connection timed out"
        given_up.set()


def test_a_request_that_no_broker_would_take_is_not_sent(path: Path) -> None:
    with pytest.raises(Failure, match="more than 65536 bytes"):
        client.ask(bytes(path), MountRequest(b"/mnt", b"x" * wire.MAX_MESSAGE), 0)


# Waiting


def test_a_refusal_that_comes_before_the_request_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with too many requests: the broker answers and hangs up without reading the request."""
    refusal = Reply(b"1a2b", errno.EAGAIN, b"too many requests")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    class RefusedSocket(socket.socket):
        def connect(self, address: Any) -> None:
            super().connect(address)
            connection, _ = listener.accept()
            with connection:
                connection.send(wire.encode_reply(refusal))

    monkeypatch.setattr(client, "socket", RefusedSocket)
    with listener:
        listener.bind(bytes(path))
        listener.listen()
        answer = ask(path)
    assert (answer.reply.errno, answer.reply.text) == (errno.EAGAIN, b"too many requests")


def test_a_refusal_is_read_although_the_request_was_not(path: Path) -> None:
    """As before, but the request is in the socket when the broker closes it: the kernel reports that first."""
    refusal = Reply(b"1a2b", errno.EAGAIN, b"too many requests")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        ours.send(wire.encode_request(REQUEST))
        theirs.send(wire.encode_reply(refusal))
    answer = client.ask(bytes(path), REQUEST, 0, connection=ours, is_sent=True)
    assert (answer.reply.errno, answer.reply.text) == (errno.EAGAIN, b"too many requests")
    ours.close()


def test_a_broker_that_hangs_up_without_an_answer_is_asked_again(path: Path, fake_clock: FakeClock) -> None:
    with FakeBroker(path, hang_up, hang_up, reply(GOOD)) as fake_broker:
        assert ask(path).reply.id == b"1a2b"
    assert len(fake_broker.requests) == 3
    assert len(fake_clock.pauses) == 2


def test_too_many_descriptors_on_their_way_are_waited_for(
    path: Path, fake_clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange, attempts = client._exchange, iter((errno.ETOOMANYREFS, errno.ETOOMANYREFS, 0))

    def try_to(*arguments: Any) -> client.Answer:
        if number := next(attempts):
            raise OSError(number, "others of this uid")
        return exchange(*arguments)

    monkeypatch.setattr(client, "_exchange", try_to)
    with FakeBroker(path, reply(GOOD)):
        assert ask(path).reply.id == b"1a2b"
    assert len(fake_clock.pauses) == 2


@pytest.mark.parametrize("before", ["nothing there", "nobody listens"])
def test_a_broker_that_appears_later_is_waited_for(
    path: Path, fake_clock: FakeClock, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    if before == "nobody listens":
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
            stale.bind(bytes(path))
    appeared: list[FakeBroker] = []

    def sleep(seconds: float) -> None:
        fake_clock.sleep(seconds)
        if len(fake_clock.pauses) == 4:
            path.unlink(missing_ok=True)
            appeared.append(FakeBroker(path, reply(GOOD)))

    monkeypatch.setattr(client, "sleep", sleep)
    assert ask(path).reply.id == b"1a2b"
    assert len(fake_clock.pauses) == 4
    with appeared[0]:
        pass


def test_a_broker_that_never_appears_is_given_up_after_ten_seconds(path: Path, fake_clock: FakeClock) -> None:
    assert failure(path) == f"no broker at {path}: No such file or directory, waited 10 seconds for it"
    assert 9 < sum(fake_clock.pauses) <= 10


def test_the_pauses_become_longer_up_to_half_a_second(path: Path, fake_clock: FakeClock) -> None:
    failure(path)
    assert fake_clock.pauses[0] <= 0.01
    assert fake_clock.pauses == sorted(fake_clock.pauses)
    assert max(fake_clock.pauses) == 0.5


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_what_does_not_pass_is_not_waited_for(
    path: Path, fake_clock: FakeClock, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> client.Answer:
        raise OSError(number, "message of this error")

    monkeypatch.setattr(client, "_exchange", refuse)
    assert failure(path) == f"broker at {path}: {os.strerror(number)}"
    assert fake_clock.pauses == []


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS])
def test_what_the_caller_has_no_room_for_is_not_said_of_the_broker(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> client.Answer:
        raise OSError(number, "message of this error")

    monkeypatch.setattr(client, "_exchange", refuse)
    assert failure(path) == f"mount failed: {os.strerror(number)}"


def test_a_connection_that_is_there_is_used(path: Path) -> None:
    with FakeBroker(path, reply(GOOD)) as fake_broker:
        connection = approach.connect(bytes(path))
        assert connection
        answer = client.ask(bytes(path), REQUEST, 0, connection=connection)
    assert (answer.reply.id, answer.connection) == (b"1a2b", connection)
    assert len(fake_broker.requests) == 1


def test_a_broker_that_restarts_after_the_first_connection_is_asked_again(path: Path, fake_clock: FakeClock) -> None:
    with FakeBroker(path, hang_up, reply(GOOD)):
        answer = client.ask(bytes(path), REQUEST, 0, connection=approach.connect(bytes(path)))
    assert answer.reply.id == b"1a2b"
    assert len(fake_clock.pauses) == 1


def sent(path: Path, monkeypatch: pytest.MonkeyPatch) -> SocketType:
    """Send the request as fast_path.c does; return the connection that Python gets from it."""
    connection = approach.connect(bytes(path))
    assert connection
    socket.send_fds(socket.socket(fileno=os.dup(connection.fileno())), [wire.encode_request(REQUEST)], [0])
    monkeypatch.setattr(sys, "asked", connection.detach(), raising=False)
    asked = approach.asked()
    assert asked
    return asked


def test_a_request_that_is_sent_already_is_not_sent_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[bytes] = []
    with FakeBroker(path, reply_and_hear(GOOD, 0, heard)) as fake_broker:
        connection = sent(path, monkeypatch)
        answer = client.ask(bytes(path), REQUEST, 0, connection=connection, is_sent=True)
        client.commit(answer)
        os.close(answer.descriptor)
    assert answer.reply.id == b"1a2b"
    assert len(fake_broker.requests) == 1
    assert isinstance(wire.decode_request(heard[0]), wire.CommitRequest)


def test_a_request_that_is_sent_already_is_sent_again_if_it_gets_no_reply(
    path: Path, monkeypatch: pytest.MonkeyPatch, fake_clock: FakeClock
) -> None:
    with FakeBroker(path, hang_up, reply(GOOD)) as fake_broker:
        connection = sent(path, monkeypatch)
        answer = client.ask(bytes(path), REQUEST, 0, connection=connection, is_sent=True)
    assert answer.reply.id == b"1a2b"
    assert len(fake_broker.requests) == 2
    assert len(fake_clock.pauses) == 1


def test_without_the_fast_path_nothing_is_sent_already() -> None:
    assert approach.asked() is None


def test_where_nobody_listens_there_is_no_first_connection(path: Path) -> None:
    assert approach.connect(bytes(path)) is None
    with stream_listener(path):
        assert approach.connect(bytes(path)) is None


def test_a_path_below_a_file_is_not_waited_for(tmp_path: Path, fake_clock: FakeClock) -> None:
    (tmp_path / "file").touch()
    assert failure(tmp_path / "file" / "sock") == f"broker at {tmp_path}/file/sock: Not a directory"
    assert fake_clock.pauses == []


def stream_listener(path: Path) -> socket.socket:
    """Return a stream socket at the path, as where clients of another protocol are served, too."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(bytes(path))
    listener.listen()
    return listener


def test_where_a_stream_socket_has_the_name_the_broker_is_beside_it(path: Path, fake_clock: FakeClock) -> None:
    beside = path.with_name("broker.sock.seqpacket")
    with stream_listener(path), FakeBroker(beside, hang_up, reply(GOOD)) as fake_broker:
        assert ask(path).reply.id == b"1a2b"
    assert len(fake_broker.requests) == 2
    assert len(fake_clock.pauses) == 1


def test_a_broker_beside_a_stream_socket_is_waited_for(path: Path, fake_clock: FakeClock) -> None:
    with stream_listener(path):
        told = failure(path)
    assert told == f"no broker at {path}.seqpacket: No such file or directory, waited 10 seconds for it"
    assert 9 < sum(fake_clock.pauses) <= 10


def test_two_stream_sockets_are_no_broker(path: Path, fake_clock: FakeClock) -> None:
    with stream_listener(path), stream_listener(path.with_name("broker.sock.seqpacket")):
        assert failure(path) == f"broker at {path}.seqpacket: Protocol wrong type for socket"
    assert fake_clock.pauses == []


def test_a_path_too_long_for_a_socket_is_told_as_that(fake_clock: FakeClock) -> None:
    told = failure(b"/" + b"x" * 200)
    assert "too long" in told
    assert "Success" not in told
    assert fake_clock.pauses == []


# Committing


def test_a_commit_reaches_the_broker(path: Path) -> None:
    heard: list[bytes] = []
    with FakeBroker(path, reply_and_hear(GOOD, 0, heard)):
        answer = client.ask(bytes(path), REQUEST, 0)
        client.commit(answer)
        answer.connection.close()
        os.close(answer.descriptor)
    assert [type(wire.decode_request(record)) for record in heard] == [wire.CommitRequest]


def test_a_commit_to_a_broker_that_is_gone_fails(path: Path) -> None:
    with FakeBroker(path, reply(GOOD)):
        answer = client.ask(bytes(path), REQUEST, 0)
    with pytest.raises(Failure, match="broker: Broken pipe"):
        client.commit(answer)
    answer.connection.close()


def test_a_broker_that_takes_long_to_undo_a_mount_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "WITHDRAW_TIMEOUT", 0.05)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        client.withdraw(ours)
        assert theirs.recv(1) == b"", "the broker was told"


# --sync-init


def proceed(path: Path, *second: bytes) -> wire.Reply:
    """Request a mount, proceed, and return the second reply; without one, the fake broker hangs up."""

    def answer(connection: socket.socket) -> None:
        connection.send(wire.encode_reply(GOOD))
        assert isinstance(wire.decode_request(connection.recv(1000)), wire.ProceedRequest)
        for record in second:
            connection.send(record)

    with FakeBroker(path, answer):
        answered = client.ask(bytes(path), REQUEST, 0)
        try:
            return client.proceed(answered, lambda: True)
        finally:
            answered.connection.close()


def test_the_second_reply_says_whether_it_is_mounted(path: Path) -> None:
    assert proceed(path, wire.encode_reply(Reply(b"1a2b"))).errno == 0
    path.unlink()
    assert proceed(path, wire.encode_reply(Reply(b"1a2b", errno.EPERM, b"no"))).text == b"no"


def test_a_malformed_second_reply_is_told(path: Path) -> None:
    with pytest.raises(Failure, match="broker: message does not end with a NUL byte"):
        proceed(path, b"garbage")


def test_a_broker_that_hangs_up_before_the_second_reply_is_not_blamed_for_its_grammar(path: Path) -> None:
    with pytest.raises(Failure, match="broker") as caught:
        proceed(path)
    assert b"NUL" not in caught.value.text


def test_a_program_that_is_gone_is_not_waited_with(path: Path) -> None:
    given_up = threading.Event()

    def answer(connection: socket.socket) -> None:
        connection.send(wire.encode_reply(GOOD))
        given_up.wait(10)

    with FakeBroker(path, answer):
        answered = client.ask(bytes(path), REQUEST, 0)
        with pytest.raises(Failure, match="the FUSE program is gone"):
            client.proceed(answered, lambda: False)
        given_up.set()
        answered.connection.close()
