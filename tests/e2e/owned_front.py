"""A process that plays the front and sends arbitrary records to the real mounter, and a caller for it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.messages import mounter
from fusermount3_broker.supervisor.processes import Mounter
from tests.e2e.conftest import is_alive, let_users_in, wait_until
from tests.e2e.hostile import O_PATH, mount_request
from tests.lab.forked import ending_afterwards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PATIENCE = 20
USER = 1000


def make_users_place(directory: Path) -> Path:
    """Make a mountpoint that belongs to the user; every user may search the directories above it."""
    let_users_in(directory)
    place = directory / "mountpoint"
    place.mkdir()
    os.chown(place, USER, USER)
    return place


class Conversation:
    """The front's conversation with one child of the mounter."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.settimeout(PATIENCE)

    def say(self, record: mounter.Record) -> None:
        self._socket.send(mounter.dump(record))

    def say_bytes(self, data: bytes) -> None:
        """Say what may be no record."""
        self._socket.send(data)

    def hear(self) -> mounter.Record | None:
        """Return the next record from the child, or None when it has ended without one."""
        with contextlib.suppress(ConnectionResetError):
            data = self._socket.recv(1 << 16)
            return mounter.load(data) if data else None
        return None

    def attached(self) -> mounter.Record | None:
        """Let the child attach the mount it has made, as if the mount were recorded; return the child's next record."""
        made = self.hear()
        assert isinstance(made, mounter.Made), made
        self.say(mounter.Attach())
        return self.hear()

    def hear_with_descriptors(self) -> tuple[mounter.Record, list[int]]:
        """Return the next record from the child and the descriptors received with it."""
        data, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 16, 4)
        return mounter.load(data), descriptors

    def shut(self) -> None:
        """Say nothing more."""
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()


class OwnedFront:
    """A mounter, and the front's socket to it."""

    def __init__(self, held: contextlib.ExitStack, kubelet: int | None = None) -> None:
        self._held = held
        self._mounter = Mounter(kubelet)
        held.callback(self._mounter.close)
        self._mounter.start()
        self.pid = self._mounter.pid
        self.locks_flags = self._mounter.locks_flags
        self.control, _, self._plain = (
            held.enter_context(socket.socket(fileno=os.dup(each))) for each in self._mounter.for_front[:3]
        )

    @property
    def maker(self) -> psutil.Process:
        """The child of the mounter that has its own user namespace and makes mount namespaces."""
        wait_until(lambda: len(self._makers()) == 1)  # a killed one may be about to end
        return self._makers()[0]

    def _makers(self) -> list[psutil.Process]:
        own = Path("/proc/self/ns/user").stat().st_ino
        makers = []
        for each in psutil.Process(self.pid).children():
            with contextlib.suppress(OSError):  # it has just ended
                if is_alive(each.pid) and Path(f"/proc/{each.pid}/ns/user").stat().st_ino != own:
                    makers.append(each)
        return makers

    def begin(self, start: mounter.Record, *descriptors: int) -> Conversation:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.send(start, theirs.fileno(), *descriptors)
        conversation = Conversation(ours)
        self._held.callback(conversation.close)
        return conversation

    def send(self, start: mounter.Record, *descriptors: int) -> None:
        is_plain = isinstance(start, mounter.StartPlainMount | mounter.StartPlainUnmount)
        control = self._plain if is_plain else self.control
        socket.send_fds(control, [mounter.dump(start)], descriptors)

    def send_to_plain(self, data: bytes, descriptors: list[int]) -> None:
        """Send anything to the children that serve plain calls."""
        socket.send_fds(self._plain, [data], descriptors)

    def check(self) -> None:
        """Check that the mounter still serves."""
        assert self.begin(mounter.StartCheck(PATIENCE)).hear() == mounter.Checked()


@contextlib.contextmanager
def playing_the_front(kubelet: Path | None = None) -> Iterator[OwnedFront]:
    """Yield a front; its mounter serves volumes if `kubelet`, the directory of kubelet, is given."""
    with contextlib.ExitStack() as held:
        if kubelet is None:
            yield OwnedFront(held)
            return
        directory = os.open(kubelet, os.O_PATH | os.O_DIRECTORY)
        held.callback(os.close, directory)
        yield OwnedFront(held, directory)


@contextlib.contextmanager
def caller(pinned: Path, uid: int, *, namespace: bool = False, groups: Sequence[int] = ()) -> Iterator[tuple[int, int]]:
    """Run a process of user `uid` that has connected and sent a descriptor of `pinned`; yield the connection and
    the pidfd of the process.

    With `namespace` it has its own mount namespace. `groups` are its supplementary groups.
    """
    with process_that(lambda address: _call(address, pinned, uid, namespace, groups)) as connected:
        yield connected


@contextlib.contextmanager
def process_that(calls: Callable[[str], None]) -> Iterator[tuple[int, int]]:
    """Run a process that connects to an address, sends something and pauses; yield the connection and its pidfd."""
    address = f"\0fusermount3-broker-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        if (child := os.fork()) == 0:
            with ending_afterwards():
                calls(address)
        try:
            listener.settimeout(PATIENCE)
            connection, _ = listener.accept()
            pidfd = os.pidfd_open(child)
            with connection:
                connection.settimeout(PATIENCE)
                connection.recv(1, socket.MSG_PEEK)  # wait until it has sent
                yield connection.fileno(), pidfd
            os.close(pidfd)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _call(address: str, pinned: Path, uid: int, namespace: bool, groups: Sequence[int]) -> None:
    if namespace:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.mount(None, b"/", None, syscalls.MS_REC | syscalls.MS_PRIVATE, None)
    descriptor = os.open(pinned, O_PATH)
    os.setgroups(groups)
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    socket.send_fds(connection, [mount_request(pinned)], [descriptor])
    signal.pause()


def a_plan(facts: mounter.MountFacts, **wanted: object) -> mounter.MountPlan:
    """Return the plan that a front that allows everything makes from these facts."""
    fields = facts._asdict()
    del fields["mount_namespace"]
    nothing = {name: kind() for name, kind in mounter.MountPlan.__annotations__.items() if kind in (bool, bytes)}
    return mounter.MountPlan(**{**nothing, "source": b"owned", **fields, **wanted})


def facts_of(conversation: Conversation) -> mounter.MountFacts:
    conversation.say(mounter.Ask())
    facts = conversation.hear()
    assert isinstance(facts, mounter.MountFacts), facts
    return facts
