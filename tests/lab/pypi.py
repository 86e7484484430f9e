"""The sdist and the wheel of the project, and machines on which pip installs them without a network.

`make_wheel` is `make wheel`, in these sources or in others. A `machine` has what packaging/pypi.md has its readers
install, and `wheelhouse` what pip would fetch for it.
"""

from __future__ import annotations

import configparser
import os
import re
import shlex
import sys
from pathlib import Path

from tests.lab.cache import Cache, recipe_hash
from tests.lab.commands import Argument, run
from tests.lab.images import DebianRecipe

SOURCES = Path(__file__).parents[2]
PAGE = SOURCES / "packaging/pypi.md"
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


def commands(heading: str) -> list[list[str]]:
    """Return the blocks of commands below a heading of the page on PyPI, each as its lines."""
    text = PAGE.read_text()
    _, found, rest = text.partition(f"\n## {heading}\n")
    assert found, f"{PAGE} has no {heading!r}"
    section = rest.partition("\n## ")[0]
    return [block.splitlines() for block in re.findall(r"```sh\n(.*?)```", section, flags=re.DOTALL)]


def machine(suite: str) -> DebianRecipe:
    """A system that boots, with the packages that the page names."""
    ((line,), *_) = commands("Install")
    packages = shlex.split(line)
    assert packages[:2] == ["apt-get", "install"]
    recipe = ("passwd", "systemd", "systemd-sysv", "dbus", "procps", *packages[2:])
    return DebianRecipe(f"pip-machine-{suite}", recipe, suite)


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
