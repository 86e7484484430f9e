"""The sdist and the wheel of the project, and what pip installs them with where there is no network.

`make_wheel` is `make wheel`, in these sources or in others; `wheelhouse` has what pip would fetch.
"""

from __future__ import annotations

import configparser
import os
import re
import sys
from pathlib import Path

from tests.lab.cache import Cache, recipe_hash
from tests.lab.commands import Argument, run

SOURCES = Path(__file__).parents[2]
ENVIRONMENT = Path(sys.prefix)
"""The venv in which the tests run."""

PYTHONS = {"bookworm": "3.11", "trixie": "3.13"}
"""The version that a release of Debian has."""
ONLY_AS_SOURCES = ("pyxattr", "systemd-python")
"""Of these, PyPI has no wheel."""


def make_wheel(sources: Path, *variables: str, prefix: tuple[str, ...] = ()) -> Path:
    """Have make build sdist and wheel, with the tools of this venv; return the directory where they are.

    `prefix`: words in front of make, to run it with another umask or environment.
    """
    installed = ENVIRONMENT / "installed"
    # The venv is as it should be, however old that file is: the sources are unpacked, and have old dates or new ones.
    make = ["make", "--directory", str(sources), f"--old-file={installed}", "wheel", f"VENV={ENVIRONMENT}", *variables]
    run([*prefix, *make], timeout=300)
    return sources / "build/dist"


def wheelhouse(python: str) -> Path:
    """Return a directory with what the project requires, to run and to be built, for this version of Python."""
    configuration = configparser.ConfigParser()
    configuration.read(SOURCES / "setup.cfg")
    required = [*configuration["options"]["install_requires"].split(), "setuptools", "wheel"]
    names = {requirement: re.split("[<>=]", requirement)[0] for requirement in required}
    wheels = [requirement for requirement, name in names.items() if name not in ONLY_AS_SOURCES]

    def fill(directory: Path) -> None:
        download: list[Argument] = [ENVIRONMENT / "bin/pip", "download", "--quiet", "--dest", directory]
        platforms = [f"--platform=manylinux{version}_{os.uname().machine}" for version in ("_2_17", "2014", "_2_28")]
        run([*download, "--only-binary=:all:", *platforms, f"--python-version={python}", *wheels], timeout=600)
        sources = [requirement for requirement in required if requirement not in wheels]
        run([*download, "--no-deps", "--no-binary=:all:", *sources], timeout=600)

    return Cache().entry(f"wheelhouse-{python}", recipe_hash(python, os.uname().machine, *required), fill)
