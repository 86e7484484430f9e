"""The mounter's children as their parent counts them: real processes, which end when the test says so."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

from fusermount3_broker.mounter.worker_pool import Parent, Pool, tell_parent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Seconds to wait for an event that must happen, and for one that must not.
PATIENCE = 10.0
MOMENT = 0.2


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def is_ready(each: socket.socket | int, seconds: float) -> bool:
    poll = select.poll()  # select(2) takes no descriptor above 1023
    poll.register(each, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def serve(pool: Pool, line: socket.socket) -> None:
    """Take an operation, report that, close its conversation, and go on until the gate is closed."""
    _, (conversation, gate), _, _ = socket.recv_fds(pool.control, 16, 2)
    tell_parent(line, conversation)
    os.write(conversation, str(os.getpid()).encode())
    os.close(conversation)
    os.read(gate, 1)


class Operation:
    """The front's side of an operation, which a child takes from `control` as soon as there is one for it."""

    def __init__(self, control: socket.socket) -> None:
        self.conversation, theirs = pair()
        read, self._gate = os.pipe()
        with theirs:
            socket.send_fds(control, [b"operation"], [theirs.fileno(), read])
        os.close(read)

    def begun(self, seconds: float = PATIENCE) -> bool:
        return is_ready(self.conversation, seconds)

    def pid(self) -> int:
        return int(self.conversation.recv(16))

    def ended(self, seconds: float = PATIENCE) -> bool:
        """Return whether the conversation has no other end any more, and nothing more to read."""
        return is_ready(self.conversation, seconds) and not self.conversation.recv(16)

    def finish(self) -> None:
        os.close(self._gate)


class Run(Protocol):
    """Runs a parent with a pool for each (ready, most) in a process; returns the sockets to the pools, and its pid."""

    def __call__(self, *sizes: tuple[int, int], left: Sequence[int] = ()) -> tuple[list[socket.socket], int]: ...


@pytest.fixture
def run() -> Iterator[Run]:
    started: list[tuple[list[socket.socket], int]] = []

    def run(*sizes: tuple[int, int], left: Sequence[int] = ()) -> tuple[list[socket.socket], int]:
        ours, theirs = zip(*(pair() for _ in sizes), strict=True)
        pid = os.fork()
        if pid == 0:
            try:
                for each in ours:
                    each.close()
                pools = [Pool(control, *size) for control, size in zip(theirs, sizes, strict=True)]
                Parent(pools, left, serve).run()
            finally:
                os._exit(0)
        for each in theirs:
            each.close()
        started.append((list(ours), pid))
        return started[-1]

    yield run
    for controls, pid in started:
        for each in controls:
            each.close()
        os.waitpid(pid, 0)


def test_an_operation_has_a_child_of_its_own(run: Run) -> None:
    (control,), parent = run((1, 4))
    first, second = Operation(control), Operation(control)
    assert first.begun() and second.begun()
    assert len({first.pid(), second.pid(), parent}) == 3
    first.finish()
    second.finish()
    assert first.ended() and second.ended()


def test_a_conversation_stays_open_until_its_child_has_ended(run: Run) -> None:
    (control,), _ = run((1, 4))
    operation = Operation(control)
    assert operation.begun()
    operation.pid()
    assert not operation.ended(MOMENT), "the child has closed it, and is still there"
    operation.finish()
    assert operation.ended()


def test_a_conversation_ends_when_its_child_is_killed(run: Run) -> None:
    (control,), _ = run((1, 4))
    operation, other = Operation(control), Operation(control)
    assert operation.begun() and other.begun()
    os.kill(operation.pid(), signal.SIGKILL)
    assert operation.ended()
    other.pid()
    assert not other.ended(MOMENT), "each has its own"
    other.finish()


def test_there_are_no_more_children_than_there_may_be(run: Run) -> None:
    (control,), _ = run((2, 3))
    operations = [Operation(control) for _ in range(5)]
    first, last = operations[:3], operations[3:]
    assert all(each.begun() for each in first)
    assert not any(each.begun(MOMENT) for each in last)
    for each in first:
        each.finish()
    assert all(each.begun() for each in last)
    for each in last:
        each.finish()


def test_a_full_pool_takes_nothing_from_another(run: Run) -> None:
    (callers, own), _ = run((1, 2), (1, 2))
    held = [Operation(callers) for _ in range(3)]
    assert held[0].begun() and held[1].begun() and not held[2].begun(MOMENT)
    operation = Operation(own)
    assert operation.begun()
    for each in (*held, operation):
        each.finish()


def test_what_an_earlier_mounter_has_left_counts_for_the_first_pool_until_it_ends(run: Run) -> None:
    read, gate = os.pipe()
    left = os.fork()
    if left == 0:
        os.close(gate)
        os.read(read, 1)
        os._exit(0)
    pidfd = os.pidfd_open(left)
    (callers, own), _ = run((1, 1), (1, 1), left=[pidfd])
    os.close(pidfd)
    waiting, operation = Operation(callers), Operation(own)
    assert operation.begun()
    assert not waiting.begun(MOMENT)
    os.close(read)
    os.kill(left, signal.SIGKILL)  # the parent still has its copies of the gate open
    os.waitpid(left, 0)
    os.close(gate)
    assert waiting.begun()
    waiting.finish()
    operation.finish()


def test_a_child_that_is_killed_while_it_waits_is_replaced(run: Run) -> None:
    (control,), parent = run((1, 1))
    with contextlib.ExitStack() as ending:
        spare = _child_of(parent)
        os.kill(spare, signal.SIGKILL)
        while _child_of(parent) == spare:  # until it has ended, it could still take the operation
            os.sched_yield()
        operation = Operation(control)
        ending.callback(operation.finish)
        assert operation.begun()
        assert operation.pid() != spare


def test_it_returns_when_nobody_has_the_other_end(run: Run) -> None:
    controls, parent = run((1, 1), (1, 1))
    controls[1].close()
    pidfd = os.pidfd_open(parent)
    try:
        assert is_ready(pidfd, PATIENCE)
    finally:
        os.close(pidfd)


def _child_of(parent: int) -> int:
    """Return the pid of the only child of a process, once there is one."""
    children = Path(f"/proc/{parent}/task/{parent}/children")
    while not (said := children.read_text().split()):
        os.sched_yield()
    (child,) = said
    return int(child)
