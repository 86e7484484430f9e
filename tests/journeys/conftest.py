"""Fixtures: a machine that has just been installed, with Podman and nothing of ours."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster import released
from tests.e2e.documented import PAGES
from tests.journeys.host import DOCKER, DOCKER_DAEMON, PYTHON, SETTINGS, SUITE, Host, machine
from tests.lab import debian
from tests.lab.cache import Cache, recipe_hash
from tests.lab.cgroups import CgroupRoot
from tests.lab.commands import run
from tests.lab.images import BUSYBOX, SSHFS, image_tag, rootfs
from tests.lab.podman import Volume
from tests.lab.programs import whoamifs
from tests.packaging import machines

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.lab.images import DebianRecipe


#: The package of Debian that the last release depends on, and this checkout does not.
OF_THE_RELEASED = ("python3-psutil",)


def archive(image: str) -> Path:
    """Return the image in an archive, as `podman load` takes it."""

    def save(directory: Path) -> None:
        run(["podman", "save", "--format=docker-archive", "--output", directory / "image.tar", image])

    return Cache().entry("journeys-image", recipe_hash(image), save) / "image.tar"


@contextlib.contextmanager
def booted(recipe: DebianRecipe, directory: Path, settings: Mapping[str, str], *more: Volume) -> Iterator[Host]:
    """Yield a machine that has booted; at the end, it has no mount. The directory gets the settings, which are files by
    their paths."""
    packages = debian.built(recipe.suite)
    volumes = [
        Volume(packages, "/srv/ours"),
        Volume(debian.archive(recipe.suite, packages, ("fuse",), OF_THE_RELEASED), "/srv/debian"),
        Volume(rootfs(SSHFS), "/srv/sshfs.tar"),
        *more,
    ]
    for path, text in settings.items():
        file = directory / Path(path).name
        file.write_text(text)
        volumes.append(Volume(file, path))
    with machines.booted(image_tag(recipe), volumes) as container:
        yield Host(container)


@contextlib.contextmanager
def with_podman(directory: Path, *more: Volume) -> Iterator[Host]:
    """Yield such a machine, whose container engine is Podman."""
    volumes = [
        Volume(whoamifs(), "/usr/local/bin/whoamifs"),
        Volume(rootfs(PYTHON), "/srv/python.tar"),
        Volume(archive(image_tag(BUSYBOX)), "/srv/busybox.tar"),
        *more,
    ]
    with booted(machine(), directory, SETTINGS, *volumes) as host:
        yield host


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """A machine whose administrator is in a clone in which `make deb` has run."""
    with with_podman(tmp_path) as host:
        host.has_built("ours")
        yield host


@pytest.fixture
def docker_host(tmp_path: Path) -> Iterator[Host]:
    """The same with Docker, which has the feature for CDI, and Compose."""
    cgroups = CgroupRoot()
    (feature,) = re.findall(r'`({"features": .*})`', PAGES["containers.md"].read_text())
    daemon = {**DOCKER_DAEMON, **json.loads(feature), "cgroup-parent": cgroups.path}
    try:
        with booted(DOCKER, tmp_path, {"/etc/docker/daemon.json": json.dumps(daemon)}) as host:
            host.has_built("ours")
            yield host
    finally:
        cgroups.remove()


@pytest.fixture
def released_host(tmp_path: Path) -> Iterator[Host]:
    """A machine with the last release's broker and proxy, as its page says, in a clone in which `make deb` has made
    packages of a newer version from this checkout."""
    last, newer = Volume(released.packages(SUITE), "/srv/released"), Volume(debian.newer(SUITE), "/srv/newer")
    with with_podman(tmp_path, last, newer) as host:
        host.use("debian")
        host.install_the_released()
        host.has_built("newer")
        yield host
