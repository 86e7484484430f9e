"""Test that our package can be installed beside Debian's and PyPI's packages named broker, and that all work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fusermount3_proxy import __version__
from tests.lab import debian, pypi
from tests.lab.cache import Cache, recipe_hash
from tests.lab.commands import Argument, run
from tests.lab.images import image_tag
from tests.lab.podman import Container, Options, Volume
from tests.packaging.machines import Machine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e

#: Debian's package, which exists only in this release; and PyPI's, with the packages that it requires.
SUITE, DEBIANS, PYPIS = "bookworm", "python3-broker", "broker==0.8.11"
#: Both can be imported, and neither is a part of the other.
BOTH = "import broker, fusermount3_broker as ours; assert broker.__file__ and 'fusermount3' not in broker.__file__"
SAID = f"fusermount3-broker, version {__version__}\n"


@pytest.fixture
def machine(suite: str, archives: list[Volume]) -> Iterator[Machine]:
    """A machine whose archives also have Debian's package."""

    def fill(directory: Path) -> None:
        debian.download(suite, [[DEBIANS]], directory)

    recipe = recipe_hash(debian.machine(suite).key(), DEBIANS)
    theirs = Cache().entry(f"debian-{DEBIANS}-{suite}", recipe, fill)
    volumes = [*archives, Volume(theirs, "/srv/theirs")]
    with Container(image_tag(debian.machine(suite)), options=Options(volumes=volumes)) as container:
        machine = Machine(container)
        machine.use("ours", "debian", "theirs")
        yield machine


@pytest.mark.parametrize("suite", [SUITE], indirect=True)
@pytest.mark.parametrize("order", [(DEBIANS, "fusermount3-broker"), ("fusermount3-broker", DEBIANS)])
def test_debians_python3_broker_is_installed_beside_ours(machine: Machine, order: tuple[str, str]) -> None:
    for package in order:
        machine.apt("install", package)
    machine.run("python3", "-c", BOTH)
    assert machine.run("fusermount3-broker", "--version").stdout == SAID
    assert machine.run("dpkg", "--verify", *order).stdout == ""


def test_pypis_broker_is_installed_in_one_venv_with_ours(dist: Path, tmp_path: Path) -> None:
    programs = tmp_path / "venv/bin"
    run(["/usr/bin/python3", "-m", "venv", programs.parent])
    python = run([programs / "python", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).stdout.strip()
    places = (dist, pypi.wheelhouse(python), pypi.wheels(python, PYPIS))
    known: list[Argument] = ["--no-index", *(word for place in places for word in ("--find-links", place))]
    run([programs / "pip", "install", *known, "fusermount3-proxy", PYPIS], timeout=300)
    home: list[Argument] = ["env", "--chdir", tmp_path, f"HOME={tmp_path}", f"BROKER_DIRECTORY={tmp_path}"]
    run([*home, programs / "python", "-c", BOTH])
    assert run([programs / "fusermount3-broker", "--version"]).stdout == SAID
    run([programs / "pip", "check"])
