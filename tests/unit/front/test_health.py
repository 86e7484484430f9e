"""Health: the front's report on a mounter that answers, fails, ends or stays silent."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from fusermount3_broker.front import health
from fusermount3_broker.front.context import Front
from fusermount3_broker.front.health import Health
from fusermount3_broker.front.mounter_client import MounterFailed, Operation
from fusermount3_broker.messages import mounter as messages
from fusermount3_broker.messages.mounter import Checked, Failed, StartCheck

NO_ANSWER = "the mounter gave no answer within 1 s"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take answers that come late on a busy machine."""
    monkeypatch.setattr(health, "PATIENCE", 60.0)


class FakeMounter:
    """Begins conversations, and keeps the child's ends of them."""

    def __init__(self, *answers: messages.Record | Exception | None) -> None:
        self._answers = list(answers)
        self.children: list[socket.socket] = []

    async def begin(self, start: messages.Record, descriptors: list[int]) -> Operation:
        assert (start, descriptors) == (StartCheck(1), [])
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.children.append(theirs)
        if answer is not None:
            theirs.send(messages.dump(answer))
        return Operation(ours, 1)

    def close(self) -> None:
        for child in self.children:
            child.close()


class FakeTable:
    problem = ""


class FakeFront:
    """As much of the front as health uses."""

    def __init__(self, mounter: FakeMounter) -> None:
        self.mounter = mounter
        self.tables = [FakeTable(), FakeTable()]


def judge(
    mounter: FakeMounter, body: Callable[[Health, asyncio.Event], Awaitable[None]], front: FakeFront | None = None
) -> None:
    async def run() -> None:
        stopping = asyncio.Event()
        health = Health(cast(Front, front or FakeFront(mounter)), stopping)
        try:
            await body(health, stopping)
        finally:
            health.close()
            mounter.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (Checked(), ""),
        (Failed(errno.ENODEV, b"open /dev/fuse"), "the mounter can't open /dev/fuse: No such device"),
        (MounterFailed("the mounter can't be started: x"), "the mounter can't be started: x"),
        (messages.Unmounted(), "the mounter gave an unexpected answer"),
    ],
)
def test_the_answer_of_the_mounter_is_told(answer: messages.Record | Exception, problem: str) -> None:
    async def body(health: Health, _: asyncio.Event) -> None:
        assert await health.problem() == problem

    judge(FakeMounter(answer), body)


def test_a_mounter_that_ends_is_told() -> None:
    mounter = FakeMounter(None)

    async def body(health: Health, _: asyncio.Event) -> None:
        asking = asyncio.ensure_future(health.problem())
        while not mounter.children:
            await asyncio.sleep(0)
        mounter.children[0].close()
        assert await asking == "the mounter ended without an answer"

    judge(mounter, body)


def test_one_answer_is_good_for_many_who_ask_and_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "FRESH", 1000.0)
    mounter = FakeMounter(Checked())

    async def body(health: Health, _: asyncio.Event) -> None:
        assert await asyncio.gather(*(health.problem() for _ in range(50))) == [""] * 50
        assert await health.problem() == ""
        assert len(mounter.children) == 1

    judge(mounter, body)


def test_an_answer_is_asked_for_again_when_it_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "FRESH", -1.0)

    async def body(health: Health, _: asyncio.Event) -> None:
        assert await health.problem() == ""
        assert await health.problem() == "the mounter can't open /dev/fuse: Permission denied"

    judge(FakeMounter(Checked(), Failed(errno.EACCES, b"open /dev/fuse")), body)


def test_a_mounter_that_is_stuck_finds_one_question_when_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "FRESH", -1.0)
    monkeypatch.setattr(health, "PATIENCE", 0.6)  # reported as whole seconds
    mounter = FakeMounter(None, Checked())

    async def body(health: Health, _: asyncio.Event) -> None:
        for _attempt in range(3):
            assert await health.problem() == NO_ANSWER
        assert len(mounter.children) == 1
        monkeypatch.setattr("fusermount3_broker.front.health.PATIENCE", 60.0)
        mounter.children[0].send(messages.dump(Checked()))
        assert await health.problem() == ""
        assert await health.problem() == ""
        assert len(mounter.children) == 2

    judge(mounter, body)


def test_a_broker_that_ends_is_not_healthy() -> None:
    async def body(health: Health, stopping: asyncio.Event) -> None:
        stopping.set()
        assert await health.problem() == "the broker is ending"

    judge(FakeMounter(), body)


def test_a_table_that_cannot_be_written_is_told_but_no_reason_to_start_the_broker_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "FRESH", 1000.0)
    mounter = FakeMounter(Checked())
    front = FakeFront(mounter)

    async def body(health: Health, _: asyncio.Event) -> None:
        front.tables[1].problem = "no room for mounts"
        assert await health.problem() == "no room for mounts"
        assert await health.process_problem() == ""
        front.tables[0].problem = "nor for volumes"
        assert await health.problem() == "nor for volumes; no room for mounts"
        front.tables[0].problem = front.tables[1].problem = ""
        assert await health.problem() == ""

    judge(mounter, body, front)
