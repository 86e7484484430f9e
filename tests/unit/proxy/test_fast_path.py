"""The fast path and Python carry out every call alike, as far as broker and caller can see.

The static executable makes each call twice: as it is, and with a superfluous ``--options=`` in front, which
packaging/static/fast_path.c does not understand and leaves to Python. The broker is a fake: it answers what a test
wants, and records what it gets.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import select
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import pytest

from fusermount3_proxy import approach, comm, wire
from fusermount3_proxy.wire import Reply

PROXY = Path(__file__).parents[3] / "build/static/fusermount3-proxy"
FAST, PYTHON = (), (b"--options=",)

#: The comm socket's number in the proxy, and for a moment in the process of the tests, which has no use for it.
COMM_FD = 900
GOOD = Reply(b"0123456789ab")
OPTIONS = b"rw,nosuid,nodev,fsname=x,subtype=y"
NOBODY = 65534


@dataclass(frozen=True)
class Answer:
    """What the fake broker does with one connection."""

    record: bytes | None = wire.encode_reply(GOOD)
    """The reply; with None it hangs up without one."""
    descriptors: int = 1
    reads_request: bool = True
    """Else it answers and hangs up, and leaves the request in the socket."""
    comes_first: bool = False
    """Then it does so before the request is there."""
    hears_commit: bool = True
    """Else the proxy can send nothing after its request."""
    delay: float = 0
    """Seconds before the reply, and before it hangs up."""


@dataclass(frozen=True)
class Call:
    arguments: tuple[bytes, ...] = (b"-o", OPTIONS, b"--", b"%D/mnt")
    """With ``%D`` for the test's directory."""
    program: bytes = b"fusermount3"
    comm_variable: bytes | None = b"%d" % COMM_FD
    broker_variable: bytes = b"%D/broker.sock"
    in_parent: bool = False
    """Whether the parent's environment has that variable, and the proxy's nothing but the comm socket's number."""
    comm_type: socket.SocketKind = socket.SOCK_STREAM
    comm_state: str = "open"
    """Or ``closed`` (the FUSE program is gone), or ``full`` (sending fails)."""
    answers: tuple[Answer, ...] = (Answer(),)
    descriptor_limit: int = 0
    """The RLIMIT_NOFILE, 0 for that of the tests."""
    as_nobody: bool = False


@dataclass
class Seen:
    """What broker and caller saw of one call."""

    connections: list[list[tuple[bytes, list[tuple[bytes, int]]]]] = field(default_factory=list)
    """The records of each connection, with path and open flags of each descriptor."""
    comm: list[tuple[bytes, list[bool]]] = field(default_factory=list)
    """The messages on the comm socket, and whether each of their descriptors is the broker's."""
    waited: bool = True
    """Whether the proxy waited until the broker hung up after the commit."""
    status: int = -1
    output: bytes = b""
    errors: bytes = b""


class Stage:
    """A directory with mountpoints of all kinds, the fake broker's sockets, and the calls that are made there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.proxy = directory / "proxy"
        shutil.copy(PROXY, self.proxy)
        for name in ("mnt", "a/mnt", "locked/mnt", "odd\udcff\udcfe", "new\nline", "=", "-mnt", "x" * 255):
            (directory / name).mkdir(parents=True)
        (directory / "file").touch()
        (directory / "device").touch()
        (directory / "link").symlink_to("mnt")
        (directory / "directory-link").symlink_to("a")
        (directory / "deep").symlink_to(os.fsdecode(self._make_deep_directory()))
        (directory / "dangling").symlink_to("nowhere")
        (directory / "loop").symlink_to("loop")
        (directory / "file-link").symlink_to("file")
        os.mkfifo(directory / "fifo")
        (directory / "locked").chmod(0)
        self._broker = self._listener(socket.SOCK_SEQPACKET, "broker.sock")
        self._beside = self._listener(socket.SOCK_SEQPACKET, "stream.seqpacket")
        self._stream = self._listener(socket.SOCK_STREAM, "stream")

    def _listener(self, kind: socket.SocketKind, name: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, kind)
        listener.bind(bytes(self.directory / name))
        listener.listen(8)
        (self.directory / name).chmod(0o777)
        return listener

    def _make_deep_directory(self) -> bytes:
        """Make a directory whose path has 4000 bytes, and some in it; return the path."""
        before = os.open(".", os.O_PATH)
        path = bytes(self.directory)
        os.chdir(path)
        while (missing := 4000 - len(path)) > 0:
            name = b"d" * (min(missing - 1, 200) if missing != 202 else 100)
            Path(os.fsdecode(name)).mkdir()
            os.chdir(name)
            path += b"/" + name
        for length in range(93, 98):
            Path("y" * length).mkdir()
        os.fchdir(before)
        os.close(before)
        return path

    def close(self) -> None:
        for listener in (self._broker, self._beside, self._stream):
            listener.close()
        (self.directory / "locked").chmod(0o700)

    def _expand(self, text: bytes) -> bytes:
        """Replace ``%D`` and ``%DEEP`` with directories, ``%PATH12`` with the broker's path, stretched to 12 bytes."""
        directory, name = bytes(self.directory), b"broker.sock"
        if text.startswith(b"%PATH"):
            return directory + name.rjust(int(text[5:]) - len(directory), b"/")
        if text.startswith(b"%DEEP"):
            return bytes((self.directory / "deep").readlink()) + text.removeprefix(b"%DEEP")
        return text.replace(b"%D", directory)

    def command(
        self, call: Call, additional: Sequence[bytes], tracer: Sequence[bytes]
    ) -> tuple[list[bytes], dict[bytes, bytes]]:
        """Return command line and environment of the call; it runs as a child of a shell if it has to."""
        name = self.directory / "names" / (Path(os.fsdecode(call.program)).name or "fusermount3")
        arguments = [*additional, *map(self._expand, call.arguments)]
        environment = {approach.VARIABLE: self._expand(call.broker_variable)}
        own = {} if call.comm_variable is None else {comm.VARIABLE: call.comm_variable}
        if not (call.in_parent or call.descriptor_limit or call.as_nobody or tracer):
            return [call.program, *arguments], {**own, **environment}
        name.parent.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):
            name.symlink_to(self.proxy)
        words = [bytes(name), *arguments]
        if call.as_nobody:
            words = [b"setpriv", b"--reuid=%d" % NOBODY, b"--regid=%d" % NOBODY, b"--clear-groups", *words]
        if call.in_parent:
            words = [b"env", b"-i", *(b"=".join(each) for each in own.items()), *words]
            own = {}
        words = [*tracer, *words]
        limit = b"ulimit -n %d; " % call.descriptor_limit if call.descriptor_limit else b""
        return [b"sh", b"-c", limit + b'"$@"; exit $?', b"sh", *words], {
            **own,
            **environment,
            b"PATH": b"/usr/bin:/bin",
        }

    def run(self, call: Call, additional: Sequence[bytes], tracer: Sequence[bytes] = ()) -> Seen:
        """Make the call, with additional arguments in front, and under `tracer`; return what was seen of it."""
        seen = Seen()
        ours, theirs = socket.socketpair(socket.AF_UNIX, call.comm_type)
        ours.setblocking(False)
        words, environment = self.command(call, additional, tracer)
        with ours, file_in_memory() as output, file_in_memory() as errors:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(COMM_FD)
            os.dup2(theirs.fileno(), COMM_FD)
            theirs.close()
            if call.comm_state == "closed":
                ours.close()
            if call.comm_state == "full":
                fill(COMM_FD)
            process = subprocess.Popen(
                words,
                executable=None if words[0] == b"sh" else self.proxy,
                cwd=self.directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                pass_fds=[COMM_FD],
            )
            os.close(COMM_FD)
            self._serve(process, call.answers, seen, ours)
            seen.status = process.wait(10)
            seen.comm += self._messages(ours)
            seen.output, seen.errors = (without_pid(os.pread(file.fileno(), 10**6, 0)) for file in (output, errors))
        return seen

    def _serve(
        self, process: subprocess.Popen[bytes], answers: Sequence[Answer], seen: Seen, ours: socket.socket
    ) -> None:
        """Answer the connections until the process has ended; the last answer also answers all others."""
        waiting = list(answers)
        ended = os.pidfd_open(process.pid)
        listeners = [self._broker, self._beside]
        try:
            while True:
                ready = select.select([*(each.fileno() for each in listeners), ended], [], [], 20)[0]
                assert ready, f"neither a call nor an end: {seen}"
                for listener in listeners:
                    if listener.fileno() in ready:
                        self._answer(listener.accept()[0], waiting[0], process, seen, ours)
                        waiting = waiting[1:] or waiting
                if ready == [ended]:
                    return
        finally:
            os.close(ended)

    def _answer(
        self,
        connection: socket.socket,
        answer: Answer,
        process: subprocess.Popen[bytes],
        seen: Seen,
        ours: socket.socket,
    ) -> None:
        connection.settimeout(10)
        records: list[tuple[bytes, list[tuple[bytes, int]]]] = []
        seen.connections.append(records)
        with connection:
            if not answer.reads_request:
                select.select([connection], [], [], 0 if answer.comes_first else 10)
            elif not self._receive(connection, records):
                return
            if not answer.hears_commit:
                connection.shutdown(socket.SHUT_RD)
            time.sleep(answer.delay)
            if answer.record is not None:
                self._reply(connection, answer)
            if not answer.reads_request or answer.record is None or not self._receive(connection, records):
                return
            time.sleep(answer.delay)
            seen.waited &= process.poll() is None
            if b"auto-unmount=1" in answer.record:
                seen.comm += self._messages(ours)
                ours.close()  # the FUSE program ends, and the watcher with it

    def _receive(self, connection: socket.socket, records: list[tuple[bytes, list[tuple[bytes, int]]]]) -> bool:
        """Receive a record, and append it to the others; return whether there was one."""
        try:
            data, descriptors, _, _ = socket.recv_fds(connection, wire.MAX_MESSAGE, 8)
        except ConnectionResetError:
            records.append((b"hung up with the reply unread", []))
            return False
        described = []
        for descriptor in descriptors:
            info = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
            flags = int(info.partition("flags:")[2].split()[0], 8) & ~os.O_CLOEXEC
            described.append((without_pid(bytes(Path(f"/proc/self/fd/{descriptor}").readlink())), flags))
            os.close(descriptor)
        if data:
            records.append((without_pid(data), described))
        return bool(data)

    def _reply(self, connection: socket.socket, answer: Answer) -> None:
        assert answer.record is not None
        device = os.open(self.directory / "device", os.O_RDWR)
        with contextlib.suppress(BrokenPipeError):
            if answer.descriptors:
                socket.send_fds(connection, [answer.record], [device] * answer.descriptors)
            else:
                connection.send(answer.record)
        os.close(device)

    def _messages(self, ours: socket.socket) -> list[tuple[bytes, list[bool]]]:
        """Return what came over the comm socket."""
        messages = []
        device = (self.directory / "device").stat()
        with contextlib.suppress(BlockingIOError, ConnectionResetError, OSError):
            while True:
                data, descriptors, _, _ = socket.recv_fds(ours, 100, 8)
                if not data:
                    break
                messages.append((data, [os.path.samestat(os.fstat(each), device) for each in descriptors]))
                for each in descriptors:
                    os.close(each)
        return messages

    def compare(self, call: Call) -> Seen:
        """Make the call on both ways; return what was seen of it, which is the same."""
        fast, python = (self.run(call, additional) for additional in (FAST, PYTHON))
        if call.descriptor_limit and call.answers == (Answer(),) and fast.status == 0 and python.status == 1:
            assert b"Too many open files" in python.errors
            return fast  # it has fewer descriptors open at once
        assert fast == python, call
        return fast


def without_pid(text: bytes) -> bytes:
    return re.sub(rb"/proc/\d+", b"/proc/PID", text)


def file_in_memory() -> BinaryIO:
    """Return a file whose name is the same each time: that of a temporary one tells its inode."""
    return os.fdopen(os.memfd_create("output"), "w+b")


def fill(descriptor: int) -> None:
    """Make sending on the socket fail at once."""
    with socket.socket(fileno=os.dup(descriptor)) as end:
        end.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                end.send(bytes(4000))
        with contextlib.suppress(BlockingIOError):
            while True:
                end.send(bytes(1))


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    if not PROXY.exists():
        pytest.fail(f"{PROXY} is missing: run 'make static'")
    with tempfile.TemporaryDirectory(prefix="fast-path-") as directory:
        Path(directory).chmod(0o755)
        stage = Stage(Path(directory).resolve())
        yield stage
        stage.close()


# What varies ---------------------------------------------------------------------------------------------------

MOUNTPOINTS = [
    *(b"%D/mnt", b"%D/mnt/", b"%D/mnt//", b"%D//mnt", b"/%D/mnt", b"%D/./mnt", b"%D/a/../mnt", b"%D/a/mnt"),
    *(
        b"%D/mnt/.",
        b"%D/mnt/..",
        b"%D/mnt/./",
        b"/",
        b"//",
        b"/.",
        b"/..",
        b"/mnt",
        b"/tmp",
        b"//tmp",
        b".",
        b"..",
        b"",
    ),
    *(b"mnt", b"./mnt", b"a/mnt", b"a/../mnt", b"mnt/", b"absent", b"-mnt", b"./-mnt", b"-", b"--"),
    *(b"%D/link", b"%D/link/", b"%D/link/.", b"%D/directory-link/mnt", b"%D/directory-link", b"%D/dangling"),
    *(b"%D/dangling/mnt", b"%D/loop", b"%D/loop/mnt", b"%D/file-link", b"%D/file-link/mnt"),
    *(b"%D/file", b"%D/file/", b"%D/file/mnt", b"%D/fifo", b"%D/fifo/mnt", b"%D/broker.sock"),
    *(b"%D/absent", b"%D/absent/", b"%D/absent/mnt", b"%D/locked", b"%D/locked/mnt", b"%D/locked/a/b"),
    *(b"%D/odd\xff\xfe", b"%D/new\nline", b"%D/=", b"%D/-mnt", b"%D/...", b"%D/.mnt", b"%D/..mnt", "%D/ä".encode()),
    *(b"%D/" + b"x" * 255, b"%D/" + b"x" * 256, b"%D/" + b"x" * 255 + b"/", b"%D/mnt" + b"/" * 3000, b"/" * 5000),
    *(place + b"y" * length for length in (1, 93, 94, 95, 96, 97, 200) for place in (b"%DEEP/", b"%D/deep/")),
    *(b"%DEEP/" + name for name in (b"y" * 94 + b"/", b"y" * 94 + b"//", b"../y", b".", b"..")),
    *(b"/proc/self/fd", b"/proc/self/fd/1", b"/proc/self/task", b"/proc/1/fd", b"/proc", b"/proc/", b"/proc/sys/fs"),
    *(b"/dev/fd/1", b"/dev/fd", b"/dev/null", b"/sys/fs"),
]

#: Arguments, with ``%M`` for the mountpoint.
COMMAND_LINES: list[tuple[bytes, ...]] = [
    (b"-o", OPTIONS, b"--", b"%M"),
    (b"-o", OPTIONS, b"%M"),
    (b"%M", b"-o", OPTIONS),
    (b"--", b"%M"),
    (b"%M",),
    (b"-o" + OPTIONS, b"--", b"%M"),
    (b"-o", b"first", b"-o", b"second", b"--", b"%M"),
    (b"-o", b"", b"--", b"%M"),
    (b"-o", b"--", b"--", b"%M"),
    (b"-o", b"-u", b"--", b"%M"),
    (b"-o", b"odd\xff=,,\\,\n", b"--", b"%M"),
    *((b"-o", b"x" * length, b"--", b"%M") for length in (4095, 60000, 65400, 65480, 65500, 65536, 70000)),
    (b"-q", b"--", b"%M"),
    (b"-u", b"--", b"%M"),
    (b"-u", b"-q", b"-z", b"--", b"%M"),
    (b"-u", b"-q", b"--", b"%M"),
    (b"-uz", b"%M"),
    (b"-zuq", b"%M"),
    (b"-uuzz", b"%M"),
    (b"-u", b"-o", OPTIONS, b"--", b"%M"),
    (b"-uo", OPTIONS, b"--", b"%M"),
    (b"%M", b"-u"),
    (b"-z", b"%M"),
    (b"-zq", b"%M"),
    (b"--unmount", b"%M"),
    (b"-u", b"--lazy", b"%M"),
    (b"-ux", b"%M"),
    (b"-u",),
    (),
    (b"-o",),
    (b"-o", OPTIONS),
    (b"-o", OPTIONS, b"--"),
    (b"-o", OPTIONS, b"--", b"-o", b"%M"),
    (b"--", b"%M", b"%M"),
    (b"%M", b"%M"),
    (b"--", b"--", b"%M"),
    (b"-", b"%M"),
    (b"", b"%M"),
    (b"-x", b"%M"),
    (b"--nothing", b"%M"),
    (b"-V",),
    (b"-uV", b"%M"),
    (b"-h",),
    (b"--comm-fd", b"%d" % COMM_FD, b"%M"),
    (b"--comm-fd=99", b"%M"),
]

COMM_VARIABLES = [
    *(
        form % COMM_FD
        for form in (b"%d", b"0%d", b"000000%d", b"0000000%d", b" %d", b"+%d", b"-%d", b"%d ", b"%dx", b"%#x")
    ),
    *(b"", b"x", b"99", b"0", b"1", b"2", b"3", b"4", b"5", b"-1", b"%d" % (2**32 + COMM_FD), b"9" * 30, b"\xff", None),
]
BROKER_VARIABLES = [
    *(b"%D/broker.sock", b"broker.sock", b"%D//broker.sock", b"%D/stream", b"%D/file/sock"),
    *(b"%D/" + b"./" * 40 + b"broker.sock", b"%D/" + b"x" * 200, *(b"%%PATH%d" % length for length in range(105, 111))),
]
PROGRAMS = [
    *(b"fusermount3", b"fusermount", b"/usr/bin/fusermount3", b"mergerfs-fusermount", b"", b"/", b"odd\xff", b"%s%n"),
    *(b"fusermount3-proxy", b"/bin/fusermount3-proxy", b"fuse-starter", b"x/fuse-starter", b"fuse-starter/"),
]
RECORDS: list[bytes | None] = [
    *(wire.encode_reply(GOOD), wire.encode_reply(Reply(b"")), wire.encode_reply(Reply(b"a=b=c\xff"))),
    *(wire.encode_reply(Reply(b"i" * length)) for length in (400, 480, 490, 500, 600, 5000)),
    # It seems plain if one looks only at the 512 bytes for which fast_path.c has room.
    wire.encode_reply(Reply(b"i" * (512 - len(wire.encode_reply(Reply(b"")))))) + b"warnings=one\0",
    wire.encode_reply(Reply(b"id", errno.EPERM, b"no")),
    wire.encode_reply(Reply(b"id", errno.EBUSY, b"no\xff", (b"careful",))),
    wire.encode_reply(Reply(b"id", warnings=(b"one", b"two"))),
    wire.encode_reply(Reply(b"id", text=b"text without an errno")),
    wire.encode_reply(Reply(b"id", auto_unmount=True)),
    wire.encode_reply(Reply(b"id", warnings=(b"one",), auto_unmount=True)),
    *(wire.encode_reply(GOOD) + addition for addition in (b"auto-unmount=0\0", b"auto-unmount=2\0", b"warnings=\0")),
    *(wire.encode_reply(GOOD) + addition for addition in (b"\0", b"x", b"x=", b"x=\0", b"id=\0", b"=\0", b"X=\0")),
    *(wire.encode_reply(GOOD) + b"".join(b"f%d=\0" % each for each in range(count)) for count in (1, 29, 30)),
    *(wire.encode_reply(GOOD) + b"x=%b\0" % bytes(b"y" * length) for length in (1000, 65000, 66000)),
    b"id=1a\0protocol=1\0errno=0\0",
    b"x=y\0protocol=1\0id=1a\0errno=0\0",
    *(b"protocol=%b\0id=1a\0errno=0\0" % versions for versions in (b"1-1", b"0-5", b"2", b"0", b"", b"x", b"01")),
    *(b"protocol=1\0id=1a\0errno=%b\0" % number for number in (b"00", b"", b"-0", b"0000000000", b"x", b"1")),
    *(b"protocol=1\0id=1a\0", b"protocol=1\0errno=0\0", b"id=1a\0errno=0\0", b"protocol=1\0id\0errno=0\0"),
    *(b"protocol=1\0id=\0errno=0\0", b"protocol=1\0id=1a\0\0errno=0\0", b"protocol=1\0id=x\0y=z\0errno=0\0"),
    *(wire.encode_reply(GOOD)[:length] for length in (1, 10, 13, 14, 20, -1)),
    *(b"\0", b"garbage", bytes(50), None),
]
#: Not SOCK_DGRAM, by which a watcher does not see that the FUSE program has ended, and which reports that once with one
#: error (to the fast path) and then with another one (to Python, which tries again).
COMM_TYPES = (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)
COMM_STATES = ("open", "closed", "full")
DESCRIPTOR_LIMITS = range(4, 13)


def with_mountpoint(arguments: Sequence[bytes], mountpoint: bytes) -> tuple[bytes, ...]:
    return tuple(each.replace(b"%M", mountpoint) for each in arguments)


def sequence_of(answer: Answer) -> tuple[Answer, ...]:
    """Return the answers of a broker that begins with `answer`: if it hangs up, the proxy calls again."""
    return (answer, Answer()) if not answer.record else (answer,)


PLAIN = Call()
UNMOUNT = (b"-u", b"-q", b"-z", b"--", b"%M")


def one_difference() -> Iterator[Call]:
    """Yield calls of which each differs from the plain one in one respect."""
    for place in MOUNTPOINTS:
        yield replace(PLAIN, arguments=with_mountpoint(COMMAND_LINES[0], place))
        yield replace(PLAIN, arguments=with_mountpoint(UNMOUNT, place))
    for line in COMMAND_LINES:
        yield replace(PLAIN, arguments=with_mountpoint(line, b"%D/mnt"))
    for variable in COMM_VARIABLES:
        yield replace(PLAIN, comm_variable=variable)
    for variable in BROKER_VARIABLES:
        yield replace(PLAIN, broker_variable=variable)
        yield replace(PLAIN, broker_variable=variable, in_parent=True)
    for program in PROGRAMS:
        yield replace(PLAIN, program=program)
    for record in RECORDS:
        yield replace(PLAIN, answers=sequence_of(Answer(record)))
        unmount = with_mountpoint(UNMOUNT, b"%D/mnt")
        yield replace(PLAIN, arguments=unmount, answers=sequence_of(Answer(record, descriptors=0)))
    for count in range(7):
        yield replace(PLAIN, answers=(Answer(descriptors=count),))
    for refusal in (wire.encode_reply(Reply(b"id", errno.EAGAIN, b"too many")), None):
        yield replace(PLAIN, answers=sequence_of(Answer(refusal, descriptors=0, reads_request=False)))
    yield replace(PLAIN, answers=(Answer(hears_commit=False),))
    for kind in COMM_TYPES:
        for state in COMM_STATES:
            yield replace(PLAIN, comm_type=kind, comm_state=state)
    yield replace(PLAIN, comm_type=socket.SOCK_DGRAM)
    for limit in DESCRIPTOR_LIMITS:
        for count in (0, 1, 2):
            yield replace(PLAIN, descriptor_limit=limit, answers=(Answer(descriptors=count),))


def mutated(record: bytes, chance: random.Random) -> bytes:
    """Return the record with a byte changed, left out or added."""
    at = chance.randrange(len(record))
    return (record[:at] + chance.choice((b"", b"\0", b"=", b"0", b"1")) + record[at + chance.randrange(2) :]) or b"\0"


def any_answer(chance: random.Random) -> Answer:
    record = chance.choice(RECORDS)
    if record and chance.random() < 0.5:
        record = mutated(record, chance)
    return Answer(record, chance.choice((0, 1, 1, 1, 1, 2, 5)), hears_commit=chance.random() < 0.9)


def any_call(chance: random.Random) -> Call:
    """Return a call that differs from the plain one in some respects, or in none."""

    def plain_or(text: bytes | None, others: Sequence[bytes | None]) -> bytes | None:
        return chance.choice(others) if chance.random() < 0.2 else text

    line = chance.choice(COMMAND_LINES[:20] if chance.random() < 0.9 else COMMAND_LINES)
    answers = tuple(any_answer(chance) for _ in range(chance.randrange(3)))
    has_watcher = any(b"auto-unmount=1" in (answer.record or b"") for answer in answers)
    in_parent = not has_watcher and chance.random() < 0.1  # the watcher would look for the broker at the default path
    return Call(
        arguments=with_mountpoint(line, plain_or(b"%D/mnt", MOUNTPOINTS) or b""),
        program=plain_or(b"fusermount3", PROGRAMS[:8]) or b"",
        comm_variable=plain_or(b"%d" % COMM_FD, COMM_VARIABLES),
        broker_variable=b"%D/stream" if chance.random() < 0.05 else b"%D/broker.sock",
        in_parent=in_parent,
        comm_type=chance.choice(COMM_TYPES),
        comm_state=chance.choice(COMM_STATES) if chance.random() < 0.2 else "open",
        answers=(*answers, Answer()),
        as_nobody=os.geteuid() == 0 and not in_parent and chance.random() < 0.1,  # it may not read the parent's
    )


def test_calls_that_differ_from_the_plain_one_in_one_respect_are_alike(stage: Stage) -> None:
    for call in one_difference():
        stage.compare(call)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_calls_of_users_are_alike_wherever_they_mount(stage: Stage) -> None:
    for place in MOUNTPOINTS:
        stage.compare(replace(PLAIN, arguments=with_mountpoint(COMMAND_LINES[0], place), as_nobody=True))


@pytest.mark.parametrize("calls", [100, pytest.param(4000, marks=pytest.mark.long)])
def test_calls_that_differ_in_any_respect_are_alike(stage: Stage, calls: int) -> None:
    chance = random.Random(calls)
    for _ in range(calls):
        stage.compare(any_call(chance))


def test_a_broker_that_takes_its_time_is_asked_once(stage: Stage) -> None:
    seen = stage.compare(replace(PLAIN, answers=(Answer(delay=approach.AT_ONCE + 0.3),)))
    assert len(seen.connections) == 1
    assert (seen.status, seen.waited, seen.comm, seen.errors) == (0, True, [(b"\0", [True])], b"")


def test_a_refusal_without_a_look_at_the_request_is_told_and_not_repeated(stage: Stage) -> None:
    refusal = wire.encode_reply(Reply(b"id", errno.EAGAIN, b"too many"))
    seen = stage.compare(replace(PLAIN, answers=(Answer(refusal, descriptors=0, reads_request=False),)))
    assert (seen.connections, seen.status) == ([[]], 1)
    assert seen.errors == b"fusermount3: too many\nfusermount3: broker request id\n"


def test_a_refusal_that_comes_before_the_request_is_told_and_not_repeated(stage: Stage) -> None:
    refusal = wire.encode_reply(Reply(b"id", errno.EAGAIN, b"too many"))
    call = replace(PLAIN, answers=(Answer(refusal, descriptors=0, reads_request=False, comes_first=True),))
    too_late = (b"strace", b"-f", b"-o", b"/dev/null", b"-e", b"inject=sendmsg:error=EPIPE:when=1")
    for additional in (FAST, PYTHON):
        seen = stage.run(call, additional, too_late)
        assert (seen.connections, seen.status) == ([[]], 1)
        assert b"too many\n" in seen.errors


def test_a_broker_that_is_gone_before_the_commit_is_told(stage: Stage) -> None:
    seen = stage.compare(replace(PLAIN, answers=(Answer(hears_commit=False),)))
    assert (seen.status, seen.comm) == (1, [(b"\0", [True])])
    assert seen.errors == b"fusermount3: broker: Broken pipe\n"


# That it is taken ------------------------------------------------------------------------------------------------


#: Arguments of libfuse and fuser, go-fuse, other Rust crates, libfuse 2 without options.
PLAIN_MOUNTS = [
    (b"-o", OPTIONS, b"--", b"%D/mnt"),
    (b"%D/mnt", b"-o", OPTIONS),
    (b"-o", OPTIONS, b"%D/mnt"),
    (b"--", b"%D/mnt"),
]
#: Arguments of libfuse; fuser and JuiceFS; go-fuse; people.
PLAIN_UNMOUNTS = [
    (b"-u", b"-q", b"-z", b"--", b"%D/mnt"),
    (b"-u", b"-q", b"-z", b"%D/mnt"),
    (b"-u", b"%D/mnt"),
    (b"-uz", b"%D/mnt/"),
]


def needs_python(stage: Stage, call: Call, additional: Sequence[bytes], log: Path) -> bool:
    """Make the call, and return whether it needed Python, before which the launcher calls madvise(2)."""
    seen = stage.run(call, additional, (b"strace", b"-f", b"-o", bytes(log)))
    assert (seen.status, seen.errors) == (0, b"")
    calls = log.read_text()
    assert "connect(" in calls
    return "madvise(" in calls


@pytest.mark.parametrize("in_parent", [False, True], ids=["environment", "environment-of-parent"])
@pytest.mark.parametrize("arguments", [*PLAIN_MOUNTS, *PLAIN_UNMOUNTS], ids=lambda each: b" ".join(each).decode())
def test_the_calls_of_usual_callers_need_no_python(
    stage: Stage, tmp_path: Path, arguments: tuple[bytes, ...], in_parent: bool
) -> None:
    answer = Answer(descriptors=arguments in PLAIN_MOUNTS)
    call = Call(arguments, in_parent=in_parent, answers=(answer,))
    assert not needs_python(stage, call, FAST, tmp_path / "log")
    assert needs_python(stage, call, PYTHON, tmp_path / "log")
