"""What is concluded from surveys: live, dead or hung."""

from __future__ import annotations

import pytest

from broker.health import Health

ONE, OTHER = 101, 102
SECONDS = 10


@pytest.fixture
def health() -> Health:
    return Health()


def test_of_what_nobody_has_looked_at_nothing_bad_is_said(health: Health) -> None:
    assert health.state(ONE, SECONDS, 1000.0) == "live"
    assert health.waiting(ONE) == 0
    assert health.is_served(ONE)


def test_requests_that_do_not_move_for_long_enough_are_a_hung_mount(health: Health) -> None:
    for now in (100.0, 105.0, 110.0):
        health.note(ONE, 3, True, now)
    assert health.state(ONE, SECONDS, 109.9) == "live"
    assert health.state(ONE, SECONDS, 110.0) == "hung"
    assert health.waiting(ONE) == 3


def test_a_number_that_moves_is_no_hung_mount(health: Health) -> None:
    for now, waiting in ((100.0, 3), (105.0, 4), (110.0, 3), (114.0, 3)):
        health.note(ONE, waiting, True, now)
    assert health.state(ONE, SECONDS, 119.9) == "live"
    assert health.state(ONE, SECONDS, 120.0) == "hung"


def test_a_program_that_has_nothing_to_do_does_not_hang(health: Health) -> None:
    health.note(ONE, 0, True, 100.0)
    assert health.state(ONE, SECONDS, 1000.0) == "live"


def test_where_it_is_switched_off_nothing_hangs(health: Health) -> None:
    health.note(ONE, 3, True, 100.0)
    assert health.state(ONE, 0, 1000.0) == "live"


def test_what_nobody_serves_is_dead_whatever_waits(health: Health) -> None:
    health.note(ONE, 3, False, 100.0)
    health.note(OTHER, 3, True, 100.0)
    assert (health.state(ONE, SECONDS, 1000.0), health.state(OTHER, SECONDS, 1000.0)) == ("dead", "hung")
    health.note(ONE, 0, True, 101.0)
    assert health.state(ONE, SECONDS, 1000.0) == "live", "the descriptor was on its way between two processes"


def test_what_was_aborted_is_dead_whoever_has_its_descriptor(health: Health) -> None:
    health.note_aborted(ONE)
    health.note(ONE, 1, True, 100.0)
    assert health.state(ONE, SECONDS, 1000.0) == "dead"
    assert health.is_aborted(ONE)
    assert not health.is_served(ONE)


def test_what_is_gone_is_forgotten(health: Health) -> None:
    for each in (ONE, OTHER):
        health.note(each, 3, True, 100.0)
        health.note_aborted(each)
    health.forget_all_but({OTHER})
    assert health.state(ONE, SECONDS, 1000.0) == "live"
    assert health.state(OTHER, SECONDS, 1000.0) == "dead"
