"""The page 'Where you run it' names, for each place, the test that has tried it, or says that nobody has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.journeys.journey import ROUTES, listed

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/where-it-runs.md").read_text()
(TABLE,) = re.findall(r"^\| place \| tried \|.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
ROWS = [line.strip("| ").split(" | ") for line in TABLE.splitlines()[2:] if line]


@pytest.mark.parametrize(("place", "tried"), [(place, tried) for place, tried, _ in ROWS])
def test_a_place_was_tried_by_a_test_or_not_at_all(place: str, tried: str) -> None:
    tests = re.findall(r"`(tests/[^`]+)`", tried)
    assert [name for name in tests if not (ROOT / name).exists()] == []
    assert tests or tried == "not tried", place


@pytest.mark.parametrize(
    "word", ["Podman", "Compose", "GitHub", "docker build", "Nomad", "k3s", "GKE", "EKS", "OpenShift"]
)
def test_the_table_has(word: str) -> None:
    assert [place for place, *_ in ROWS if word in place]


def test_the_table_of_journeys_has_each_journey() -> None:
    assert list(listed()) == list(ROUTES)


@pytest.mark.parametrize("test", [route.test for route in ROUTES.values()])
def test_a_journey_is_walked_by_a_test(test: str) -> None:
    file, _, name = test.partition("::")
    assert f"\ndef {name}(" in (ROOT / file).read_text()


def test_no_page_reads_as_if_something_were_published() -> None:
    pages = {path: path.read_text() for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))}
    published = re.compile(r"github\.com/OWNER|pip install '?fusermount3-proxy")
    found = {path.name for path, text in pages.items() if published.search(text)}
    assert found - {"CHANGELOG.md"} == {"releases.md"}
