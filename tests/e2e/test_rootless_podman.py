"""A user's own Podman, without root: its containers mount through the host's broker, by the options in the page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.documented import options_of, with_paths_of
from tests.journeys.journey import walking
from tests.lab.images import BUSYBOX, image_tag
from tests.lab.podman import Volume
from tests.lab.programs import whoamifs
from tests.lab.rootless import FIRST_SUBORDINATE, UID, run_rootless

if TYPE_CHECKING:
    from tests.lab.broker import Broker

pytestmark = pytest.mark.e2e

PROGRAM = Volume(whoamifs(), "/usr/bin/whoamifs")


@pytest.fixture
def volumes(broker: Broker) -> list[Volume]:
    """The volumes that the page gives to a container, with the paths of the test, and the FUSE program."""
    words = with_paths_of(broker, options_of("podman run", "where-it-runs.md"))
    split = [word.split(":") for word in words if word != "-v"]
    return [*(Volume(Path(source), target, mode) for source, target, mode in split), PROGRAM]


@pytest.mark.parametrize(("user", "mountpoint"), [("0:0", "/mnt"), ("1000:1000", "/home/user/mnt")])
def test_a_container_mounts_as(user: str, mountpoint: str, volumes: list[Volume]) -> None:
    command = ["sh", "-c", 'whoamifs --probe "$0" && cat /proc/self/uid_map', mountpoint]
    with walking("Podman without root") as journey:
        journey.typed()
        result = run_rootless(image_tag(BUSYBOX), volumes, ["--user", user], *command)
        assert result.returncode == 0, result.stdout + result.stderr
        *probe, root, others = result.stdout.splitlines()
        assert "ok=yes" in probe
        journey.mounted()
    assert [root.split(), others.split()] == [["0", str(UID), "1"], ["1", str(FIRST_SUBORDINATE), "65536"]]


def test_without_the_volumes_it_does_not() -> None:
    result = run_rootless(image_tag(BUSYBOX), [PROGRAM], [], "whoamifs", "--probe", "/mnt")
    assert "ok=yes" not in result.stdout.splitlines()
    assert result.returncode != 0
