"""A process that plays the front, and tells the real mounter whatever a test likes, and a caller for it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from typing import TYPE_CHECKING

from broker import plan, syscalls
from broker.supervisor import Mounter
from tests.e2e.hostile import O_PATH, mount_request

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATIENCE = 20


class Conversation:
    """What the front says to one child of the mounter, and hears."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.settimeout(PATIENCE)

    def say(self, record: plan.Record) -> None:
        self._socket.send(plan.dump(record))

    def hear(self) -> plan.Record | None:
        """Return what the child says next; None when it has ended without a word."""
        with contextlib.suppress(ConnectionResetError):
            data = self._socket.recv(1 << 16)
            return plan.load(data) if data else None
        return None

    def hear_with_descriptors(self) -> tuple[plan.Record, list[int]]:
        """Return what the child says next, and what comes with that."""
        data, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 16, 4)
        return plan.load(data), descriptors

    def close(self) -> None:
        self._socket.close()


class OwnedFront:
    """A mounter, and the way to it that a front has."""

    def __init__(self, held: contextlib.ExitStack, kubelet: int | None = None) -> None:
        self._held = held
        self._mounter = Mounter(kubelet)
        self.pid = self._mounter.pid
        held.callback(self._mounter.close)
        self.control = held.enter_context(socket.socket(fileno=os.dup(self._mounter.for_front[0])))

    def begin(self, start: plan.Record, *descriptors: int) -> Conversation:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self.control, [plan.dump(start)], [theirs.fileno(), *descriptors])
        conversation = Conversation(ours)
        self._held.callback(conversation.close)
        return conversation

    def check(self) -> None:
        """Check that the mounter still serves."""
        assert self.begin(plan.StartCheck(PATIENCE)).hear() == plan.Checked()


@contextlib.contextmanager
def playing_the_front(kubelet: Path | None = None) -> Iterator[OwnedFront]:
    """Give a front; with a mounter that serves volumes, if there is a directory of kubelet's."""
    with contextlib.ExitStack() as held:
        if kubelet is None:
            yield OwnedFront(held)
            return
        directory = os.open(kubelet, os.O_PATH | os.O_DIRECTORY)
        held.callback(os.close, directory)
        yield OwnedFront(held, directory)


@contextlib.contextmanager
def caller(pinned: Path, uid: int, *, namespace: bool = False) -> Iterator[tuple[int, int]]:
    """Have a process of the user's that has connected and sent what it pins; gives the connection and its pidfd.

    With `namespace` it has a mount namespace of its own.
    """
    address = f"\0fusermount3-broker-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        if (child := os.fork()) == 0:
            with contextlib.suppress(BaseException):
                _call(address, pinned, uid, namespace)
            os._exit(1)
        try:
            listener.settimeout(PATIENCE)
            connection, _ = listener.accept()
            pidfd = os.pidfd_open(child)
            with connection:
                connection.settimeout(PATIENCE)
                connection.recv(1, socket.MSG_PEEK)  # it has sent
                yield connection.fileno(), pidfd
            os.close(pidfd)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _call(address: str, pinned: Path, uid: int, namespace: bool) -> None:
    if namespace:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.mount(None, b"/", None, syscalls.MS_REC | syscalls.MS_PRIVATE, None)
    descriptor = os.open(pinned, O_PATH)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    socket.send_fds(connection, [mount_request(pinned)], [descriptor])
    signal.pause()


def a_plan(facts: plan.MountFacts, **wanted: object) -> plan.MountPlan:
    """Return the plan of a front that allows everything, on these facts."""
    fields = facts._asdict()
    del fields["mount_namespace"]
    nothing = {name: kind() for name, kind in plan.MountPlan.__annotations__.items() if kind in (bool, bytes)}
    return plan.MountPlan(**{**nothing, "source": b"owned", **fields, **wanted})


def facts_of(conversation: Conversation) -> plan.MountFacts:
    conversation.say(plan.Ask())
    facts = conversation.hear()
    assert isinstance(facts, plan.MountFacts), facts
    return facts
