"""The sdist and the wheel of the project, and the packages from which pip installs them without a network.

`make_wheel` is `make wheel`, in these sources or in others; `wheelhouse` has the packages that pip would fetch.
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


def make_wheel(sources: Path, *variables: str, directory: Path | None = None, prefix: tuple[str, ...] = ()) -> Path:
    """Have make build sdist and wheel, with the tools of this venv; return their directory.

    This is `directory`, or else make's own, which each run of make empties, whoever reads there. `prefix`: words in
    front of make, to run it with another umask or environment.
    """
    made = directory or sources / "build/dist"
    installed = ENVIRONMENT / "installed"
    # The venv is up to date, however old that file is: the unpacked sources have old dates or new ones.
    make = ["make", "--directory", str(sources), f"--old-file={installed}", "wheel", f"VENV={ENVIRONMENT}"]
    with Cache().locked("wheel"):  # setuptools writes into the sources, too
        run([*prefix, *make, f"DIST={made}", *variables], timeout=300)
    return made


def wheelhouse(python: str) -> Path:
    """Return a directory with the project's requirements, to run and to be built, for this version of Python."""
    configuration = configparser.ConfigParser()
    configuration.read(SOURCES / "setup.cfg")
    required = [*configuration["options"]["install_requires"].split(), "setuptools", "wheel"]
    names = {requirement: re.split("[<>=]", requirement)[0] for requirement in required}
    wheels = [requirement for requirement, name in names.items() if name not in ONLY_AS_SOURCES]

    def fill(directory: Path) -> None:
        run([*_download(directory, python), *wheels], timeout=600)
        sources = [requirement for requirement in required if requirement not in wheels]
        run([*_PIP_DOWNLOAD, directory, "--no-deps", "--no-binary=:all:", *sources], timeout=600)

    return Cache().entry(f"wheelhouse-{python}", recipe_hash(python, os.uname().machine, *required), fill)


def wheels(python: str, *requirements: str) -> Path:
    """Return a directory with the wheels of these projects and their requirements, for this version of Python."""
    name = f"wheels-{re.sub('[^a-z0-9]+', '-', ' '.join(requirements))}-{python}"

    def fill(directory: Path) -> None:
        run([*_download(directory, python), *requirements], timeout=600)

    return Cache().entry(name, recipe_hash(python, os.uname().machine, *requirements), fill)


_PIP_DOWNLOAD: list[Argument] = [ENVIRONMENT / "bin/pip", "download", "--quiet", "--dest"]


def _download(directory: Path, python: str) -> list[Argument]:
    """Return the beginning of a command that downloads wheels for this version of Python."""
    platforms = [f"--platform=manylinux{version}_{os.uname().machine}" for version in ("_2_17", "2014", "_2_28")]
    return [*_PIP_DOWNLOAD, directory, "--only-binary=:all:", *platforms, f"--python-version={python}"]
