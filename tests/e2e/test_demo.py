"""The demonstration, started as docs/index.md says."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import pytest

from tests.e2e.documented import ROOT, block
from tests.lab.commands import run_with_teardown

if TYPE_CHECKING:
    from tests.lab.commands import Argument

pytestmark = pytest.mark.e2e


def test_it_tells_of_a_mount_and_leaves_nothing() -> None:
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
