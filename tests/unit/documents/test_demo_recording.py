"""The animated terminal of the first page (tests/demo_recording.py)."""

from __future__ import annotations

import re
import sys
from subprocess import CalledProcessError
from xml.etree import ElementTree

import pytest

from tests import demo_recording
from tests.demo_recording import Line, draw, record, rows

TOLD = [
    Line(0, ""),
    Line(0, "A remark."),
    Line(0.1, ""),
    Line(0.1, "1. A step."),
    Line(0.2, "   $ command <1>"),
    Line(60, "   | " + "x" * 120),
    Line(60, ""),
    Line(60, "2. Another one"),
    Line(60, "   with two lines."),
]


def test_each_line_becomes_rows_at_a_pace_for_readers() -> None:
    found = [(row.seconds, row.text[:14], row.kind) for row in rows(TOLD)]
    assert found == [
        (0, "", ""),
        (0, "A remark.", "remark"),
        (1.5, "", ""),
        (1.5, "1. A step.", "step"),
        (1.5, "   $ command <", "command"),
        (1.5, "   | xxxxxxxxx", "output"),
        (1.5, "x" * 14, "output"),
        (4.5, "", ""),
        (4.5, "2. Another one", "step"),
        (4.5, "   with two li", "step"),
    ]


def test_the_picture_has_all_of_it_and_scrolls_to_its_end() -> None:
    many = [*TOLD, *(Line(61, f"{number}. more") for number in range(40))]
    picture = draw(many)
    texts = [each.text for each in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert "   $ command <1>" in texts
    assert texts[-1] == "39. more"
    (last,) = re.findall(r"step-end; transform: translateY\((-\d+)px\)", picture)
    assert int(last) == -16 * (len(list(rows(many))) - 30)


def test_the_picture_in_the_page_loads_nothing_and_stops_for_who_wants_no_motion() -> None:
    picture = demo_recording.FILE.read_text()
    assert not re.search(r"url\(|href|@import|<script", picture)
    assert "prefers-reduced-motion" in picture


def test_what_fails_is_not_drawn() -> None:
    with pytest.raises(CalledProcessError):
        record([sys.executable, "-c", "print('told'); raise SystemExit(3)"])
