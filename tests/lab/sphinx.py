"""The documentation's site, built as the Makefile builds it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab.commands import Argument, run

if TYPE_CHECKING:
    from subprocess import CompletedProcess

ROOT = Path(__file__).parents[2]


def build(directory: Path) -> CompletedProcess[str]:
    """Build the site into `directory`/site; what the builder says is a complaint. CommandFailed if it fails."""
    makefile = (ROOT / "Makefile").read_text()
    (options,) = re.findall(
        r"^\t\$\(VENV\)/bin/sphinx-build (.+) --doctree-dir build/doctrees docs build/site$", makefile, re.MULTILINE
    )
    doctrees: list[Argument] = ["--doctree-dir", directory / "doctrees"]
    return run([sys.executable, "-m", "sphinx", *options.split(), *doctrees, ROOT / "docs", directory / "site"])
