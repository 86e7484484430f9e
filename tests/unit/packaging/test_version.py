"""The version is defined in fusermount3_proxy/__init__.py; all files that repeat it have the same."""

from __future__ import annotations

import re
from email.utils import parsedate_to_datetime
from pathlib import Path

import pytest

from fusermount3_proxy import __version__
from release.version import NUMBER, STATED

ROOT = Path(__file__).parents[3]
#: By file: the text around the version, and its number of occurrences.
ALL = {**STATED, "debian/changelog": (rf"\Afusermount3-proxy \({NUMBER}\) ", 1)}


@pytest.mark.parametrize(("file", "pattern", "times"), [(file, *stated) for file, stated in ALL.items()])
def test_the_same_version_is_in(file: str, pattern: str, times: int) -> None:
    assert re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE) == [__version__] * times


def test_the_latest_release_in_the_change_log_is_debians() -> None:
    released = re.findall(rf"^## \[{NUMBER}\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    date = re.findall(r"^ -- .*>  (.*)$", (ROOT / "debian/changelog").read_text(), re.MULTILINE)[0]
    assert released[0] == (__version__, parsedate_to_datetime(date).date().isoformat())
