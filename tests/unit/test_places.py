"""Places for operations, shared out among accounts."""

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

from broker.limits import AccountName
from broker.places import Places

A, B, C = (AccountName(each) for each in "ABC")
LONG = 60.0


def run(act: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await act()

    asyncio.run(bounded())


async def turns() -> None:
    """Let everybody else go on as far as they can."""
    for _ in range(20):
        await asyncio.sleep(0)


def taking(places: Places, account: AccountName, seconds: float = LONG) -> asyncio.Task[None]:
    return asyncio.create_task(places.take(account, seconds))


def test_an_account_waits_for_its_own_places_and_another_does_not() -> None:
    async def act() -> None:
        places = Places(total=16, share=2)
        for _ in range(2):
            await places.take(A, 0)
        waiting = taking(places, A)
        await turns()
        assert not waiting.done()
        await places.take(B, 0)
        places.give_back(A)
        await waiting
        assert (places.taken(A), places.taken(B), places.taken(C)) == (2, 1, 0)

    run(act)


def test_no_account_takes_more_than_it_leaves_to_others() -> None:
    async def act() -> None:
        places = Places(total=10, share=10)
        for account, most in ((A, 5), (B, 3), (C, 1)):
            for _ in range(most):
                await places.take(account, 0)
            with pytest.raises(TimeoutError):
                await places.take(account, 0)
        await places.take(AccountName("D"), 0)

    run(act)


@pytest.mark.parametrize("total", [1, 2, 3, 4, 64])
def test_however_few_places_there_are_everybody_gets_one_in_the_end(total: int) -> None:
    async def act() -> None:
        places = Places(total, share=max(1, total // 4))
        for account in (A, B, C) * 5:
            await places.take(account, 0)
            places.give_back(account)

    run(act)


def test_the_next_place_is_for_the_account_with_the_fewest() -> None:
    async def act() -> None:
        places = Places(total=4, share=3)
        for account in (A, A, B):
            await places.take(account, 0)
        await places.take(C, 0)
        order: list[str] = []
        waiting = {name: taking(places, name) for name in (A, B)}
        for name, task in waiting.items():
            task.add_done_callback(partial(lambda name, _: order.append(name), name))
        places.give_back(C)
        await turns()
        assert order == [], "one is left to others"
        places.give_back(B)
        await turns()
        assert order[0] == B
        for task in waiting.values():
            task.cancel()

    run(act)


def test_who_has_waited_longest_is_the_first_of_an_account() -> None:
    async def act() -> None:
        places = Places(total=4, share=1)
        await places.take(A, 0)
        first, second = taking(places, A), taking(places, A)
        await turns()
        places.give_back(A)
        await turns()
        assert (first.done(), second.done()) == (True, False)
        places.give_back(A)
        await second

    run(act)


def test_who_gives_up_waiting_leaves_nothing_behind() -> None:
    async def act() -> None:
        places = Places(total=4, share=1)
        await places.take(A, 0)
        gone = taking(places, A)
        late = taking(places, A, 0.01)
        await turns()
        gone.cancel()
        with pytest.raises(TimeoutError):
            await late
        places.give_back(A)
        await places.take(A, 0)
        assert places.taken(A) == 1

    run(act)


def test_a_turn_that_comes_when_it_is_given_up_is_the_next_ones() -> None:
    async def act() -> None:
        places = Places(total=4, share=1)
        await places.take(A, 0)
        first, second = taking(places, A), taking(places, A)
        await turns()
        places.give_back(A)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await second
        assert places.taken(A) == 1

    run(act)


@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 6))
def test_places_are_never_lost_nor_given_twice(seed: int, total: int, share: int) -> None:
    chance = random.Random(seed)
    held: Counter[AccountName] = Counter()

    async def act() -> None:
        places = Places(total, share)

        async def use(account: AccountName) -> None:
            with contextlib.suppress(TimeoutError):
                await places.take(account, chance.choice([0, 0.0005, LONG]))
                held[account] += 1
                assert held.total() <= total
                assert held[account] <= share
                try:
                    for _ in range(chance.randrange(5)):
                        await asyncio.sleep(0)
                finally:
                    held[account] -= 1
                    places.give_back(account)

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
        assert [places.taken(each) for each in (A, B, C)] == [0, 0, 0]
        for account in (A, B, C):
            await places.take(account, 0)
            places.give_back(account)

    run(act)
