"""The states that the front derives from surveys: live, dead or hung."""

from __future__ import annotations

import pytest

from fusermount3_broker.front.model import MountNamespace
from fusermount3_broker.front.mount_states import LATE, MOST_LATE, States
from tests.unit.front.tables.test_mount_table import mount

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


def test_a_late_unmount_of_what_was_unmounted_as_dead_is_known_once_and_for_its_owner_only(states: States) -> None:
    here, there = MountNamespace(7), MountNamespace(8)
    mounted = mount(1, 1, namespace=here, uid=1000, mountpoint=b"/mnt")
    states.note_unmounting(mounted, 100.0)
    assert not states.was_unmounted(there, 1000, b"/mnt", 101.0)
    assert not states.was_unmounted(here, 0, b"/mnt", 101.0)
    assert not states.was_unmounted(here, 1000, b"/mnt2", 101.0)
    assert states.was_unmounted(here, 1000, b"/mnt", 101.0)
    assert not states.was_unmounted(here, 1000, b"/mnt", 101.0)
    states.note_unmounting(mounted, 100.0)
    assert not states.was_unmounted(here, 1000, b"/mnt", 100.1 + LATE)


def test_what_was_not_dead_was_not_unmounted(states: States) -> None:
    mounted = mount(1, 1)
    states.note_unmounting(mounted, 100.0)
    states.note_not_unmounted(mounted)
    assert not states.was_unmounted(mounted.namespace, mounted.uid, mounted.mountpoint, 100.0)


def test_only_so_many_late_unmounts_are_remembered(states: States) -> None:
    for number in range(MOST_LATE + 1):
        states.note_unmounting(mount(number, number, namespace=MountNamespace(number)), 100.0)
    oldest, next_oldest = mount(0, 0, namespace=MountNamespace(0)), mount(1, 1, namespace=MountNamespace(1))
    assert not states.was_unmounted(oldest.namespace, oldest.uid, oldest.mountpoint, 100.0)
    assert states.was_unmounted(next_oldest.namespace, next_oldest.uid, next_oldest.mountpoint, 100.0)
