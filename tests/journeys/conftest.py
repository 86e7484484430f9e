"""Fixtures: a machine that has just been installed, with Podman and nothing of ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.journeys.host import SETTINGS, SUITE, Host, machine
from tests.lab import debian
from tests.lab.cache import Cache, recipe_hash
from tests.lab.commands import run
from tests.lab.images import BUSYBOX, SSHFS, image_tag, rootfs
from tests.lab.podman import Volume
from tests.lab.programs import whoamifs
from tests.packaging import machines

if TYPE_CHECKING:
    from collections.abc import Iterator


def archive(image: str) -> Path:
    """Return the image in an archive, as `podman load` takes it."""

    def save(directory: Path) -> None:
        run(["podman", "save", "--format=docker-archive", "--output", directory / "image.tar", image])

    return Cache().entry("journeys-image", recipe_hash(image), save) / "image.tar"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """A machine that has booted, whose administrator is in a clone in which `make deb` has run; at the end, it has no
    mount."""
    for name, text in SETTINGS.items():
        (tmp_path / name).write_text(text)
    packages = debian.built(SUITE)
    volumes = [
        *(Volume(tmp_path / name, f"/etc/containers/{name}") for name in SETTINGS),
        Volume(packages, "/srv/ours"),
        Volume(debian.archive(SUITE, packages, ("fuse",)), "/srv/debian"),
        Volume(whoamifs(), "/usr/local/bin/whoamifs"),
        Volume(rootfs(SSHFS), "/srv/sshfs.tar"),
        Volume(archive(image_tag(BUSYBOX)), "/srv/busybox.tar"),
    ]
    with machines.booted(image_tag(machine()), volumes) as container:
        yield Host(container)
