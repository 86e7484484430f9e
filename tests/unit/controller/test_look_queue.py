"""Which node is looked at next: the one that is due first, by one at a time, and not again at once."""

from __future__ import annotations

import asyncio
import time

import pytest

from fusermount3_controller import look_queue
from fusermount3_controller.look_queue import LookQueue


class Clock:
    """A clock that goes only when it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(look_queue, "time", clock)
    return clock


def due(queue: LookQueue) -> list[str]:
    """Take all that are due."""

    async def run() -> list[str]:
        taken = []
        while (wait := queue._next()) is not None and wait <= 0:
            taken.append(await queue.take())
        return taken

    return asyncio.run(run())


def test_each_is_due_once_at_the_earliest_time(clock: Clock) -> None:
    queue = LookQueue(1)
    for node, seconds in (("b", 5), ("a", 3), ("b", 2), ("a", 9)):
        queue.add(node, seconds)
    assert due(queue) == []
    clock.now += 5
    assert due(queue) == ["b", "a"]
    clock.now += 100
    assert due(queue) == []


def test_who_is_looked_at_waits_for_that_and_then_rests(clock: Clock) -> None:
    queue = LookQueue(1)
    queue.add("a")
    assert due(queue) == ["a"]
    queue.add("a")
    assert due(queue) == []
    queue.done("a", 60)
    assert due(queue) == []
    clock.now += 1
    assert due(queue) == ["a"]
    queue.done("a", 60)
    queue.add("a")
    assert due(queue) == []
    clock.now += 1
    assert due(queue) == ["a"]
    queue.done("a", 60)
    clock.now += 59
    assert due(queue) == []
    clock.now += 1
    assert due(queue) == ["a"]


def test_who_is_not_to_be_looked_at_again_is_forgotten_unless_it_was_added_meanwhile(clock: Clock) -> None:
    queue = LookQueue(1)
    queue.add("a")
    assert due(queue) == ["a"]
    queue.add("a")
    queue.done("a", None)
    clock.now += 1
    assert due(queue) == ["a"]
    queue.done("a", None)
    clock.now += 1000
    assert due(queue) == []
    assert not (queue._due or queue._rested or queue._taken)


def test_who_waits_is_woken_by_what_is_added_and_by_time() -> None:
    async def run() -> None:
        queue = LookQueue(0)
        taking = [asyncio.create_task(queue.take()) for _ in range(3)]
        await asyncio.sleep(0)
        begin = time.monotonic()
        queue.add("later", 0.05)
        queue.add("now")
        async with asyncio.timeout(10):
            while sum(task.done() for task in taking) < 2:
                await asyncio.sleep(0.001)
        assert time.monotonic() - begin >= 0.05
        assert sorted(task.result() for task in taking if task.done()) == ["later", "now"]
        for task in taking:
            task.cancel()

    asyncio.run(run())
