"""A client that sends arbitrary messages to the broker, and the private mount namespace in which it runs.

`in_private_namespace` runs a function in its own process and mount namespace, so that nothing that a broken broker
mounts ever appears on the host.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from fusermount3_broker.kernel import syscalls
from fusermount3_proxy import wire
from fusermount3_proxy.wire import CommitRequest, MountRequest, Reply, UnmountRequest
from tests.e2e.conftest import settle, wait_until
from tests.lab.commands import run
from tests.lab.kernel import kernel_has
from tests.lab.pace import SLOWNESS
from tests.lab.podman import Mount, mountinfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.lab.broker import Broker

PATIENCE = round(20 * SLOWNESS)
#: Seconds in which strace usually ends.
STRACE_ENDS = 5 * SLOWNESS
O_PATH = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def in_private_namespace(body: Callable[[], object]) -> None:
    """Run `body` in a forked process with its own mount namespace. An exception in `body` fails the test.

    `body` must leave no FUSE mount behind.
    """

    def in_namespace() -> None:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        run(["mount", "--make-rprivate", "/"])
        before = fuse_mounts()
        body()
        wait_for_mounts(before)

    in_process(in_namespace)


def in_process(body: Callable[[], object]) -> None:
    """Run `body` in a forked process, which may change its credentials. An exception in `body` fails the test."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        status = 1
        try:
            body()
            status = 0
        except BaseException:
            os.write(writer, traceback.format_exc().encode()[-60_000:])
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as report:
        said = report.read().decode()
    _, status = os.waitpid(child, 0)
    assert status == 0, said


def fuse_mounts() -> list[Mount]:
    return [mount for mount in mountinfo() if mount.is_fuse]


def wait_for_mounts(expected: list[Mount], seconds: float = 10) -> None:
    """Wait until this namespace has exactly these FUSE mounts: a rollback follows its cause after a moment."""
    give_up = time.monotonic() + SLOWNESS * seconds
    while fuse_mounts() != expected:
        assert time.monotonic() < give_up, fuse_mounts()
        time.sleep(0.02)


#: Capabilities stay in force when the effective uid changes (capabilities(7)).
_PR_SET_SECUREBITS, _SECBIT_NO_SETUID_FIXUP = 28, 4


class Client:
    """A socket connection to the broker, made as user `uid`.

    SO_PEERCRED reports the credentials at connect(2). Before Linux 6.5, the broker compares them with those of the
    process, which so remains that user until the first reply.
    """

    #: Whether the effective uid is still that of the user.
    _is_user = False

    def __init__(self, broker: Broker, uid: int = 0) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", PATIENCE, 0))
        self.devices: list[int] = []
        self._is_user = uid != 0
        if self._is_user and not kernel_has("SO_PEERPIDFD"):
            syscalls.prctl(_PR_SET_SECUREBITS, _SECBIT_NO_SETUID_FIXUP)
        os.setegid(uid)
        os.seteuid(uid)
        try:
            self.socket.connect(str(broker.socket))
        finally:
            if kernel_has("SO_PEERPIDFD"):
                self._be_root()
        self.socket.settimeout(PATIENCE)

    def _be_root(self) -> None:
        if self._is_user:
            os.seteuid(0)
            os.setegid(0)
            self._is_user = False

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self._be_root()
        self.socket.close()
        for device in self.devices:
            os.close(device)

    def send(self, record: bytes, *descriptors: int) -> None:
        """Send a message with descriptors and close them: an open descriptor may keep a mount busy."""
        try:
            socket.send_fds(self.socket, [record], list(descriptors))
        finally:
            for descriptor in set(descriptors):
                os.close(descriptor)

    def reply(self) -> Reply | None:
        """Return the next reply, or None when the broker has closed the connection. Keep the received descriptors."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.socket, wire.MAX_MESSAGE, 4)
        except ConnectionResetError:  # the broker has closed it with data of ours unread
            return None
        finally:
            self._be_root()
        self.devices += descriptors
        if not data:
            return None
        reply = wire.decode_reply(data)
        assert bool(descriptors) <= (reply.errno == 0), "a refusal brings no descriptor"
        return reply

    def refused(self) -> tuple[int, str]:
        """Receive a refusal; return its errno and text."""
        reply = self.reply()
        assert reply is not None, "the broker has closed the connection without a word"
        assert reply.errno, "the broker has not refused"
        return reply.errno, reply.text.decode()


COMMIT = wire.encode_request(CommitRequest())


def mount_request(place: Path, options: bytes = b"", *, sync_init: bool = False) -> bytes:
    return wire.encode_request(MountRequest(bytes(place), options, sync_init))


def unmount_request(place: Path, *, lazy: bool = False, only_dead: bool = False) -> bytes:
    return wire.encode_request(UnmountRequest(bytes(place), os.fsencode(place.name), lazy, only_dead))


def mount(broker: Broker, place: Path, *, uid: int = 0, options: bytes = b"") -> int:
    """Mount as a well-behaved caller does; return the /dev/fuse descriptor."""
    with Client(broker, uid) as client:
        client.send(mount_request(place, options), os.open(place, O_PATH))
        reply = client.reply()
        assert reply is not None
        assert reply.errno == 0, reply.text
        client.send(COMMIT)
        assert client.reply() is None  # the broker closes the connection when it has released the mount
        return client.devices.pop()


def unmount(broker: Broker, place: Path, *, uid: int = 0, lazy: bool = False) -> None:
    """Unmount as a well-behaved caller does."""
    with Client(broker, uid) as client:
        client.send(unmount_request(place, lazy=lazy), os.open(place.parent, O_PATH))
        reply = client.reply()
        assert reply is not None
        assert reply.errno == 0, reply.text


def check_service(broker: Broker, place: Path) -> None:
    """Check that the broker carries out a valid request."""
    before = fuse_mounts()
    device = mount(broker, place)
    assert [mount.mountpoint for mount in fuse_mounts() if mount not in before] == [str(place)]
    os.close(device)
    unmount(broker, place)
    assert fuse_mounts() == before


def is_traced(pid: int, by: int) -> bool:
    """Test whether process `by` traces process `pid`, or `pid` has ended: a spare child may just have answered."""
    try:
        return f"TracerPid:\t{by}\n" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


@contextlib.contextmanager
def slow(broker: Broker, system_call: str, seconds: float, log: Path) -> Iterator[None]:
    """Delay the beginning of each such system call of the mounter and its children by `seconds`."""
    mounter = broker.mounter
    while True:
        settle(broker)
        family = [mounter.pid, *(child.pid for child in mounter.children(recursive=True))]
        with slow_processes(family, system_call, seconds, log) as tracer:
            # A child forked after they were listed, and before the mounter was traced, is not.
            if all(is_traced(child.pid, tracer) for child in mounter.children(recursive=True)):
                yield
                return


@contextlib.contextmanager
def slow_processes(traced: list[int], system_call: str, seconds: float, log: Path) -> Iterator[int]:
    """Delay system calls like `slow`, in these processes and those that they fork meanwhile; yield the tracer's pid."""
    delay = f"inject={system_call}:delay_enter={round(1_000_000 * seconds)}"
    pids = [f"--attach={pid}" for pid in traced]
    tracer = subprocess.Popen(
        ["strace", "-f", "-o", log, "-e", f"trace={system_call}", "-e", delay, *pids], stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: all(is_traced(pid, tracer.pid) for pid in traced))
        yield tracer.pid
    finally:
        tracer.send_signal(signal.SIGINT)
        try:
            tracer.wait(timeout=STRACE_ENDS)
        except subprocess.TimeoutExpired:
            # It waits for a process that waits for its vforked child, which it has stopped. The kernel lets go of both.
            tracer.kill()
            tracer.wait(timeout=PATIENCE)
