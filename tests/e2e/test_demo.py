"""The demonstration, started as docs/index.md says."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from tests.e2e.documented import ROOT, block
from tests.lab.commands import run_with_teardown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.lab.commands import Argument

pytestmark = pytest.mark.e2e


def steps(lines: Iterable[str]) -> list[str]:
    """Return what was said and typed, and no result: results have names of temporary files."""
    return [line for line in lines if re.match(r"\d+\. |   \$ ", line)]


def test_it_tells_of_a_mount_and_leaves_nothing_and_the_recording_shows_it() -> None:
    (command,) = block("index.md", "make demo").commands
    outside_of_make: list[Argument] = [
        "env",
        "--chdir",
        ROOT,
        "--unset=MAKEFLAGS",
        "--unset=MFLAGS",
        "--unset=MAKELEVEL",
    ]
    told = run_with_teardown([*outside_of_make, *shlex.split(command)]).stdout
    assert "Left mounted: nothing" in told
    assert "no privileged container, no changed program" in told
    recorded = ElementTree.parse(ROOT / "docs/demo.svg").iter("{http://www.w3.org/2000/svg}text")
    assert steps(told.splitlines()) == steps(each.text or "" for each in recorded), "make demo-recording"
