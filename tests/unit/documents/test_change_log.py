"""CHANGELOG.md has the form of Keep a Changelog 1.1.0."""

from __future__ import annotations

import re
from pathlib import Path

RELEASES = re.split(r"^## ", (Path(__file__).parents[3] / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def test_what_is_unreleased_comes_first_then_the_releases_from_the_newest_on() -> None:
    first, *released = [release.splitlines()[0] for release in RELEASES]
    assert first == "[Unreleased]"
    found = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d\d-\d\d)", heading) for heading in released]
    assert all(found)
    versions = [tuple(map(int, each.groups()[:3])) for each in found if each]
    dates = [each[4] for each in found if each]
    assert versions == sorted(versions, reverse=True)
    assert dates == sorted(dates, reverse=True)


def test_changes_are_listed_by_kind() -> None:
    for release in RELEASES:
        kinds = re.findall(r"^### (.+)$", release, re.MULTILINE)
        assert kinds == [kind for kind in KINDS if kind in kinds]
        for section in re.split(r"^### .+$", release, flags=re.MULTILINE)[1:]:
            assert re.match(r"\n\n- ", section)
            assert all(re.match(r"- |  \S", line) for line in section.splitlines() if line)
