"""The states that the front derives from surveys: live, dead or hung."""

from __future__ import annotations

import pytest

from fusermount3_broker.front.mount_states import States

ONE, OTHER = 101, 102
SECONDS = 10


@pytest.fixture
def states() -> States:
    return States()


def test_of_what_nobody_has_looked_at_nothing_bad_is_said(states: States) -> None:
    assert states.of(ONE, SECONDS, 1000.0) == "live"
    assert states.waiting(ONE) == 0
    assert not states.is_dead(ONE)


def test_requests_that_do_not_move_for_long_enough_are_a_hung_mount(states: States) -> None:
    for now in (100.0, 105.0, 110.0):
        states.note(ONE, 3, now)
    assert states.of(ONE, SECONDS, 109.9) == "live"
    assert states.of(ONE, SECONDS, 110.0) == "hung"
    assert states.waiting(ONE) == 3


def test_a_number_that_moves_is_no_hung_mount(states: States) -> None:
    for now, waiting in ((100.0, 3), (105.0, 4), (110.0, 3), (114.0, 3)):
        states.note(ONE, waiting, now)
    assert states.of(ONE, SECONDS, 119.9) == "live"
    assert states.of(ONE, SECONDS, 120.0) == "hung"


def test_a_program_that_has_nothing_to_do_does_not_hang(states: States) -> None:
    states.note(ONE, 0, 100.0)
    assert states.of(ONE, SECONDS, 1000.0) == "live"


def test_where_it_is_switched_off_nothing_hangs(states: States) -> None:
    states.note(ONE, 3, 100.0)
    assert states.of(ONE, 0, 1000.0) == "live"


def test_what_has_ended_is_dead_whatever_waits(states: States) -> None:
    states.note_dead(ONE)
    for each in (ONE, OTHER):
        states.note(each, 3, 100.0)
    assert (states.of(ONE, SECONDS, 1000.0), states.of(OTHER, SECONDS, 1000.0)) == ("dead", "hung")
    assert states.is_dead(ONE)


def test_what_is_gone_is_forgotten(states: States) -> None:
    for each in (ONE, OTHER):
        states.note(each, 3, 100.0)
        states.note_dead(each)
    states.forget_all_but({OTHER})
    assert states.of(ONE, SECONDS, 1000.0) == "live"
    assert states.of(OTHER, SECONDS, 1000.0) == "dead"
