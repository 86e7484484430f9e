"""Closing connections that are over: at once if nothing is unread in them, otherwise by a child, several together."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from fusermount3_broker.front.connection_closing import ConnectionCloser
from fusermount3_broker.front.decisions.limits import AccountName
from fusermount3_broker.front.mounter_client import Mounter, MounterFailed, Operation
from fusermount3_broker.front.slots import Slots
from fusermount3_broker.messages import mounter
from fusermount3_broker.service import log

A, B = AccountName("A"), AccountName("B")


class FakeChild:
    """The mounter's end of a dismissal: the conversation, and the connections that came with it."""

    def __init__(self, control: socket.socket) -> None:
        data, descriptors, _, _ = socket.recv_fds(control, 1000, 253)
        assert isinstance(mounter.load(data), mounter.StartDismissal)
        self.conversation, *self.connections = [socket.socket(fileno=each) for each in descriptors]

    def end(self) -> None:
        assert self.conversation.recv(1) == b"", "the front has hung up"
        for each in (self.conversation, *self.connections):
            each.close()


class Scene:
    def __init__(self) -> None:
        ours, self.control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setblocking(False)
        self.ours = ours
        self.logged: list[str] = []
        self.slots = Slots(total=16, share=4)
        self.mounter = Mounter(ours)
        self.closer = ConnectionCloser(self.mounter, self.slots, self.log)
        self.closed = 0
        self.callers: list[socket.socket] = []

    def log(self, priority: int, message: str, **_: Any) -> None:
        assert priority == log.ERROR
        self.logged.append(message)

    def over(self, account: AccountName, *records: tuple[bytes, int], gone: bool = False) -> socket.socket:
        """Dismiss a connection with these records, each with its number of descriptors; return the front's end."""
        front, caller = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for data, descriptors in records:
            socket.send_fds(caller, [data], [0] * descriptors)
        if gone:
            front.send(b"answer that is not read")
            caller.close()
        else:
            self.callers.append(caller)
        try:
            front.shutdown(socket.SHUT_RDWR)
        except ConnectionResetError:
            assert gone
        self.closer.add(account, front, self.note_closed)
        return front

    def note_closed(self) -> None:
        self.closed += 1

    def child(self) -> FakeChild | None:
        try:
            return FakeChild(self.control)
        except BlockingIOError:
            return None

    def the_child(self) -> FakeChild:
        child = self.child()
        assert child is not None
        return child


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr("fusermount3_broker.front.connection_closing._PAUSE", 0)
    scene = Scene()
    yield scene
    for each in (scene.ours, scene.control, *scene.callers):
        each.close()


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("records", [0, 1, 6])
@pytest.mark.parametrize("gone", [False, True])
def test_a_connection_without_descriptors_in_it_is_closed_at_once(scene: Scene, records: int, gone: bool) -> None:
    front = scene.over(A, *[(b"record", 0)] * records, gone=gone)
    assert front.fileno() == -1
    assert scene.child() is None


@pytest.mark.parametrize(
    "records",
    [[(b"", 0)], [(b"", 1)], [(b"x", 3)], [(b"", 0), (b"x", 1)], [(b"x", 0)] * 9],
    ids=["an empty record", "a descriptor alone", "descriptors", "descriptors behind an empty record", "many records"],
)
@pytest.mark.parametrize("gone", [False, True])
def test_what_may_have_descriptors_in_it_is_a_childs(
    scene: Scene, records: list[tuple[bytes, int]], gone: bool
) -> None:
    async def act() -> None:
        front = scene.over(A, *records, gone=gone)
        await turns()
        assert front.fileno() == -1, "the child is the last who has it"
        child = scene.the_child()
        (connection,) = child.connections
        taken = 8 if len(records) > 8 else 0
        for data, descriptors in records[taken:]:
            if gone:
                break
            said, came, _, _ = socket.recv_fds(connection, 1000, 10)
            assert (said, len(came)) == (data, descriptors)
            for each in came:
                os.close(each)
        child.end()
        await turns()

    asyncio.run(act())


def test_the_front_takes_what_is_before_a_record_with_descriptors(scene: Scene) -> None:
    async def act() -> None:
        scene.over(A, (b"x", 0), (b"y", 2))
        await turns()
        child = scene.the_child()
        (connection,) = child.connections
        said, came, _, _ = socket.recv_fds(connection, 1000, 10)
        assert (said, len(came)) == (b"y", 2)
        for each in came:
            os.close(each)
        child.end()
        await turns()

    asyncio.run(act())


def test_what_comes_while_a_child_is_busy_is_the_next_ones_together(scene: Scene) -> None:
    async def act() -> None:
        scene.over(A, (b"x", 1))
        await turns()
        first = scene.the_child()
        for _ in range(5):
            scene.over(A, (b"x", 1))
        await turns()
        assert scene.child() is None
        scene.over(B, (b"x", 1))
        await turns()
        other = scene.the_child()
        assert len(other.connections) == 1, "another account does not wait"
        first.end()
        await turns()
        second = scene.the_child()
        assert len(second.connections) == 5
        for child in (second, other):
            child.end()
        await turns()
        assert scene.child() is None
        scene.over(A, (b"x", 1))
        await turns()
        scene.the_child().end()
        await turns()

    asyncio.run(act())


def test_while_a_child_does_not_end_the_others_stay_open_and_their_accounts(scene: Scene) -> None:
    async def act() -> None:
        scene.over(A, (b"x", 1))
        await turns()
        stuck = scene.the_child()
        fronts = [scene.over(A, (b"x", 1)) for _ in range(300)]
        await turns()
        assert all(front.fileno() != -1 for front in fronts)
        assert scene.closed == 0
        assert scene.slots.taken(A) == 1
        assert scene.child() is None, "one is enough to hang"
        stuck.end()
        await turns()
        assert scene.closed == 1
        another = scene.the_child()
        assert len(another.connections) == 252
        another.end()
        await turns()
        scene.the_child().end()
        await turns()
        assert scene.child() is None
        assert (scene.closed, scene.slots.in_use) == (301, 0)

    asyncio.run(act())


def test_who_has_all_its_places_waits_for_one(scene: Scene) -> None:
    async def act() -> None:
        while scene.slots.taken(A) < 4:
            await scene.slots.take(A, 0)
        front = scene.over(A, (b"x", 1))
        await turns()
        assert scene.child() is None
        assert front.fileno() != -1
        scene.slots.give_back(A)
        await turns()
        scene.the_child().end()
        await turns()
        assert scene.closed == 1

    asyncio.run(act())


def test_without_a_mounter_connections_stay_until_there_is_one(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusermount3_broker.front.connection_closing._TRY_AGAIN", 0.01)

    async def act() -> None:
        failures = 2

        async def dismiss(connections: list[socket.socket], seconds: int) -> Operation:
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise MounterFailed("it ended")
            return await begin(connections, seconds)

        begin = scene.mounter.dismiss
        monkeypatch.setattr(scene.mounter, "dismiss", dismiss)
        front = scene.over(A, (b"x", 1))
        while front.fileno() != -1:
            await asyncio.sleep(0.005)
        scene.the_child().end()
        await turns()
        assert (scene.closed, scene.slots.in_use) == (1, 0)

    asyncio.run(act())
    assert scene.logged == ["it ended"] * 2
