"""Fixtures: the packages, built once, and machines to install them on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.lab import debian, pypi
from tests.lab.commands import run
from tests.lab.images import image_tag
from tests.lab.podman import Container, Options, Volume
from tests.packaging.machines import Machine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session", params=["bookworm", pytest.param("trixie", marks=pytest.mark.long)])
def suite(request: pytest.FixtureRequest) -> str:
    """A release of Debian."""
    return str(request.param)


@pytest.fixture(scope="session")
def packages(suite: str) -> Path:
    """The directory with the release's packages, as `dpkg-buildpackage` has left it."""
    return debian.built(suite)


@pytest.fixture(scope="session")
def newer(suite: str) -> Path:
    """The directory with the same packages in a newer version."""
    return debian.newer(suite)


@pytest.fixture(scope="session")
def sources(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source package."""
    (tarball,) = packages.glob("*.tar.xz")
    directory = tmp_path_factory.mktemp("sources")
    run(["tar", "--extract", "--file", tarball, "--directory", directory, "--strip-components=1", "--no-same-owner"])
    return directory


SHELLS = ("bash-completion", "zsh", "fish")
READERS = ("man-db", "groff-base", "mandoc")


@pytest.fixture(scope="session")
def archives(suite: str, packages: Path, newer: Path) -> list[Volume]:
    """The archives that a machine without a network installs from."""
    rest = debian.archive(suite, packages, ("sshfs", "bindfs", "autopkgtest", "dpkg-dev", *SHELLS, *READERS), ("fuse",))
    return [Volume(packages, "/srv/ours"), Volume(newer, "/srv/newer"), Volume(rest, "/srv/debian")]


@pytest.fixture(scope="session")
def installed(suite: str, archives: list[Volume]) -> Iterator[Machine]:
    """A container with all packages, for inspection and queries; no service runs in it."""
    with Container(image_tag(debian.machine(suite)), options=Options(volumes=archives)) as container:
        machine = Machine(container)
        machine.apt("install", *debian.TOGETHER, *SHELLS, *READERS)
        yield machine


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the output of `make wheel`, of this process alone: another one makes its own meanwhile."""
    directory = tmp_path_factory.mktemp("dist")
    directory.chmod(0o755)  # for all users of a container
    return pypi.make_wheel(pypi.SOURCES, directory=directory)


@pytest.fixture
def tree(suite: str, archives: list[Volume]) -> Iterator[Machine]:
    """A container without running services, as in a build of an image."""
    with Container(image_tag(debian.machine(suite)), options=Options(volumes=archives)) as container:
        yield Machine(container)
