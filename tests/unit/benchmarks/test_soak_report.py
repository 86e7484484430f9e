"""The verdict of a soak: which failures are excused, which are shown, and which mounts the broker does not know."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.soak.census import Census
from benchmarks.soak.report import ANYTHING, KILLED_ALONG, NO_SPACE, REFUSED, Ordeal, Report, excuse
from fusermount3_broker.cli import control_client
from tests.lab.callers import Trouble
from tests.lab.load import Holding
from tests.lab.podman import Mount
from tests.unit.fakes import FakeClock

if TYPE_CHECKING:
    from pathlib import Path

KILL = Ordeal(KILLED_ALONG, ANYTHING, 10.0, 10.5)
FULL = Ordeal(REFUSED, NO_SPACE, 20.0, 25.0)
NO_SPACE_TEXT = (
    "fusermount3: mount failed: the broker can't write its table of mounts in /state: No space left on device\n"
    "fusermount3: broker request 0123abcd"
)


@pytest.mark.parametrize(
    ("trouble", "row"),
    [
        (Trouble("broker: Broken pipe", 9.9, 10.1), KILLED_ALONG),
        (Trouble("broker: Broken pipe", 9.0, 11.0), KILLED_ALONG),
        (Trouble("broker: Broken pipe", 9.0, 9.9), None),
        (Trouble("broker: Broken pipe", 10.6, 10.7), None),
        (Trouble(NO_SPACE_TEXT, 24.0, 26.0), REFUSED),
        (Trouble("fusermount3: mount failed: No space left on device", 21.0, 22.0), None),
        (Trouble("fusermount3: failed to unmount /mnt: Operation not permitted", 21.0, 22.0), None),
        (Trouble(NO_SPACE_TEXT, 25.1, 26.0), None),
    ],
)
def test_only_calls_that_an_ordeal_met_are_excused(trouble: Trouble, row: str | None) -> None:
    remaining, excused = excuse([trouble], [KILL, FULL])
    assert remaining == ([trouble] if row is None else [])
    assert excused == ({} if row is None else {row: 1})


def a_report() -> Report:
    holding = Holding(1, 1, 1, 1)
    return Report(seed=1, minutes=1, at_once=10, started=100.0, begin=holding, end=holding)


def test_what_is_alike_is_shown_once_and_in_the_order_in_which_it_was_seen() -> None:
    report = a_report()
    report.seen.errors += [Trouble(f"no {each}\nrequest 0123abc{each}", 103.0 + each, 104.0) for each in range(3)]
    report.seen.lost.append(Trouble("gone", 101.0, 101.5))
    report.unknown.append(Trouble("device 0:1", 102.0, 102.5))
    assert report.problems() == [
        "1.0 to 1.5 s: lost: gone",
        "2.0 to 2.5 s: unknown: device 0:1",
        "3.0 to 4.0 s: failed (and 2 like it): no 0 request 0123abc0",
    ]
    assert not report.good()
    page = report.markdown()
    assert "| calls that failed | 3 |\n" in page
    assert "| mounts unknown to the broker | 1 |\n" in page
    assert "    1.0 to 1.5 s: lost: gone\n" in page


def test_what_is_excused_is_no_problem_and_counted() -> None:
    report = a_report()
    report.ordeals.append(FULL)
    report.seen.errors.append(Trouble(NO_SPACE_TEXT, 21.0, 22.0))
    report.excuse()
    assert report.good()
    assert f"| {REFUSED} | 1 |\n" in report.markdown()


def a_mount(number: int, minor: int) -> Mount:
    return Mount(number, 1, f"0:{minor}", "/", f"/{number}", frozenset(), "fuse", "source", frozenset())


def test_a_mount_is_unknown_if_the_broker_never_lists_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Broker:
        directory = tmp_path

    new, known, never, left = a_mount(1, 41), a_mount(2, 42), a_mount(3, 43), a_mount(4, 44)
    looks = iter([[new, known, never, left]] * 3)
    listed: list[list[dict[str, Any]]] = [[{"device": 42}], [{"device": 41}, {"device": 42}]]

    def ask(_socket: Path, command: str) -> list[dict[str, Any]]:
        assert command == "mounts"
        return listed.pop(0) if len(listed) > 1 else listed[0]

    monkeypatch.setattr(control_client, "ask", ask)
    FakeClock(monkeypatch, time)
    taken = Census(Broker(), lambda: {"somebody": next(looks, [known, never])})  # type: ignore[arg-type]
    assert [found.number for found in taken.unknown()] == [43]
    assert taken.unknown() == [], "it has been told"
