"""Journeys on one host of containers: from a machine with Podman to a mount, by the pages alone."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import pytest

from tests.e2e.documented import block, documented
from tests.journeys.host import CLONE, Host
from tests.journeys.journey import Journey, walking
from tests.lab.sshd import CLIENT_DIRECTORY, sshd_for

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.e2e, pytest.mark.long]

INSTALL = "install-systemd.md"
#: Of the author, and of all who are to have it.
PROGRAM = ["-v", "/usr/local/bin/whoamifs:/usr/bin/whoamifs:ro"]


def install(host: Host, journey: Journey) -> None:
    """Build and install the packages; the host comes with them built."""
    journey.typed()  # make deb
    words = documented("apt-get install ./build/deb/fusermount3-broker_*.deb", INSTALL)
    host.type(journey, " ".join(words))


def run(options: list[str], image: str, script: str) -> str:
    """Return the command that runs a script in a container."""
    return shlex.join(["podman", "run", "--rm", *options, image, "sh", "-euc", script])


def options_of(command: str, page: str = "containers.md") -> list[str]:
    words = documented(command, page)
    return words[words.index("run") + 1 : words.index("IMAGE")]


@pytest.fixture
def sshfs(host: Host) -> Iterator[str]:
    """A script that mounts by sshfs, and reads."""
    with sshd_for(host.container) as sshd:
        sshd.authorize(host.container)
        (sshd.export / "hello").write_text("from the other side\n")
        yield f"sshfs {shlex.join(sshd.sshfs_arguments())} /mnt && cat /mnt/hello && fusermount3 -u /mnt"


#: The user's keys.
KEYS = ["-v", f"{CLIENT_DIRECTORY}:{CLIENT_DIRECTORY}:ro"]


def test_sshfs_in_podman(host: Host, sshfs: str) -> None:
    image = host.sshfs()
    with walking("Debian packages and sshfs in Podman") as journey:
        install(host, journey)
        said = host.type(journey, run([*options_of("docker run"), *KEYS], image, sshfs)).stdout
        assert said == "from the other side\n"
        journey.mounted()


def test_ci_job(host: Host) -> None:
    image = host.busybox()
    containerfile = f"FROM {image}\nRUN whoamifs --probe /mnt\n"
    with walking("a CI job") as journey:
        install(host, journey)
        (host.container.root() / CLONE.lstrip("/") / "Containerfile").write_text(containerfile)
        words = [*documented("podman build", "ci.md")[:-1], "--pull=never", "--network=none", *PROGRAM, "."]
        assert "ok=yes" in host.type(journey, shlex.join(words)).stdout.splitlines()
        journey.mounted()


def cdi(host: Host, journey: Journey) -> list[str]:
    """Register the device as documented; return the option that requests it."""
    generate, _ = block("containers.md", "fusermount3-broker cdi generate").commands
    host.type(journey, generate)
    return options_of("podman run --device")


def test_cdi(host: Host, sshfs: str) -> None:
    image = host.sshfs()
    with walking("CDI, with an image that nobody changed") as journey:
        install(host, journey)
        option = cdi(host, journey)
        assert host.type(journey, run([*option, *KEYS], image, sshfs)).stdout == "from the other side\n"
        journey.mounted()
