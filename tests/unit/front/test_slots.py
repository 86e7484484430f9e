"""Slots for operations, shared among accounts."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusermount3_broker.front.decisions.limits import AccountName
from fusermount3_broker.front.slots import Slots

A, B, C = (AccountName(each) for each in "ABC")
LONG = 60.0


def run(act: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await act()

    asyncio.run(bounded())


async def turns() -> None:
    """Let all other tasks run as far as they can."""
    for _ in range(20):
        await asyncio.sleep(0)


def taking(slots: Slots, account: AccountName, seconds: float = LONG) -> asyncio.Task[None]:
    return asyncio.create_task(slots.take(account, seconds))


def test_an_account_waits_for_its_own_places_and_another_does_not() -> None:
    async def act() -> None:
        slots = Slots(total=16, share=2)
        for _ in range(2):
            await slots.take(A, 0)
        waiting = taking(slots, A)
        await turns()
        assert not waiting.done()
        await slots.take(B, 0)
        slots.give_back(A)
        await waiting
        assert (slots.taken(A), slots.taken(B), slots.taken(C)) == (2, 1, 0)

    run(act)


async def take_all(slots: Slots, account: AccountName) -> int:
    """Take all slots that the account gets at once; return their number."""
    with contextlib.suppress(TimeoutError):
        while True:
            await slots.take(account, 0)
    return slots.taken(account)


def test_who_takes_all_it_can_leaves_three_times_as_many_to_others() -> None:
    async def act() -> None:
        slots = Slots(total=64, share=64)
        free = 64
        for number in range(14):
            taken = await take_all(slots, AccountName(f"uid {number}"))
            free -= taken
            assert taken == 1 or free >= 3 * (taken - 1)
        assert slots.in_use == 64 - free

    run(act)


@pytest.mark.parametrize(("total", "share", "greedy"), [(64, 16, 13), (32, 8, 11), (16, 16, 8), (256, 64, 18)])
def test_after_that_many_who_take_all_they_can_the_next_finds_a_slot(total: int, share: int, greedy: int) -> None:
    async def act() -> None:
        slots = Slots(total, share)
        for number in range(greedy):
            assert 1 <= await take_all(slots, AccountName(f"uid {number}")) <= share
        await slots.take(A, 0)

    run(act)


@given(st.integers(1, 300), st.integers(1, 300))
def test_one_account_never_has_the_last_place(total: int, share: int) -> None:
    async def act() -> None:
        slots = Slots(total, share)
        await take_all(slots, A)
        if total > 1:
            await slots.take(B, 0)

    run(act)


def test_a_child_that_has_not_ended_is_told_of_after_a_while() -> None:
    async def act() -> None:
        slots = Slots(total=4, share=2)
        over = asyncio.Event()

        async def ended() -> None:
            await over.wait()

        slots.take_until(A, ended())
        assert (slots.in_use, slots.stuck(60), slots.stuck(-1)) == (1, 0, 1)
        over.set()
        await turns()
        assert (slots.in_use, slots.stuck(-1)) == (0, 0)

    run(act)


@pytest.mark.parametrize("total", [1, 2, 3, 4, 64])
def test_however_few_places_there_are_everybody_gets_one_in_the_end(total: int) -> None:
    async def act() -> None:
        slots = Slots(total, share=max(1, total // 4))
        for account in (A, B, C) * 5:
            await slots.take(account, 0)
            slots.give_back(account)

    run(act)


def test_the_next_place_is_for_the_account_with_the_fewest() -> None:
    async def act() -> None:
        slots = Slots(total=4, share=3)
        others = [AccountName(f"uid {number}") for number in range(4)]
        for account in others:
            await slots.take(account, 0)
        order: list[str] = []
        waiting = [(name, taking(slots, name)) for name in (A, A, B)]
        for name, task in waiting:
            task.add_done_callback(partial(lambda name, _: order.append(name), name))
        await turns()
        for account in others[:2]:
            slots.give_back(account)
            await turns()
        assert order == [A, B], "A has waited for longer, but has one"
        for _, task in waiting:
            task.cancel()

    run(act)


def test_who_has_waited_longest_is_the_first_of_an_account() -> None:
    async def act() -> None:
        slots = Slots(total=4, share=1)
        await slots.take(A, 0)
        first, second = taking(slots, A), taking(slots, A)
        await turns()
        slots.give_back(A)
        await turns()
        assert (first.done(), second.done()) == (True, False)
        slots.give_back(A)
        await second

    run(act)


def test_who_gives_up_waiting_leaves_nothing_behind() -> None:
    async def act() -> None:
        slots = Slots(total=4, share=1)
        await slots.take(A, 0)
        gone = taking(slots, A)
        late = taking(slots, A, 0.01)
        await turns()
        gone.cancel()
        with pytest.raises(TimeoutError):
            await late
        slots.give_back(A)
        await slots.take(A, 0)
        assert slots.taken(A) == 1

    run(act)


def test_a_turn_that_comes_when_it_is_given_up_is_the_next_ones() -> None:
    async def act() -> None:
        slots = Slots(total=4, share=1)
        await slots.take(A, 0)
        first, second = taking(slots, A), taking(slots, A)
        await turns()
        slots.give_back(A)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await second
        assert slots.taken(A) == 1

    run(act)


@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 6))
def test_places_are_never_lost_nor_given_twice(seed: int, total: int, share: int) -> None:
    chance = random.Random(seed)
    held: Counter[AccountName] = Counter()

    async def act() -> None:
        slots = Slots(total, share)

        async def use(account: AccountName) -> None:
            with contextlib.suppress(TimeoutError):
                await slots.take(account, chance.choice([0, 0.0005, LONG]))
                held[account] += 1
                assert held.total() <= total
                assert held[account] <= share
                try:
                    for _ in range(chance.randrange(5)):
                        await asyncio.sleep(0)
                finally:
                    held[account] -= 1
                    slots.give_back(account)

        tasks = []
        for _ in range(40):
            tasks.append(asyncio.create_task(use(chance.choice([A, B, C]))))
            if chance.random() < 0.3:
                chance.choice(tasks).cancel()
            if chance.random() < 0.5:
                await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:
            assert task.cancelled() or task.exception() is None
        assert [slots.taken(each) for each in (A, B, C)] == [0, 0, 0]
        for account in (A, B, C):
            await slots.take(account, 0)
            slots.give_back(account)

    run(act)
