"""The page on PyPI, followed to the letter on a machine that boots: what pip installs there serves and mounts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import wait_until
from tests.lab import pypi
from tests.lab.images import image_tag
from tests.lab.podman import Container, Options, Volume
from tests.lab.programs import whoamifs
from tests.packaging.test_service import KERNEL, MOUNTPOINT, SERVICE, SOCKET
from tests.packaging.test_wheel import SDIST

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PLACE = "/opt/fusermount3-proxy"
#: pip knows no other places than these, and asks nobody.
PIP = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/srv/dist /srv/wheelhouse", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


@pytest.fixture
def booted(suite: str, dist: Path) -> Iterator[Container]:
    """A machine that has booted, with the packages that the page names, and leaves no mount."""
    volumes = [
        Volume(dist, "/srv/dist"),
        Volume(pypi.wheelhouse(suite), "/srv/wheelhouse"),
        Volume(whoamifs(), "/usr/local/bin/whoamifs"),
    ]
    options = Options(privileged=True, volumes=volumes, extra=["--systemd=always"])
    with Container(image_tag(pypi.machine(suite)), ["/sbin/init", *KERNEL], options) as container:
        is_up = ["systemctl", "is-system-running"]
        wait_until(lambda: container.exec(is_up, check=False).stdout.strip() == "running", 60)
        container.exec(["mount", "--make-rshared", "/"])
        container.exec(["chmod", "0666", "/dev/fuse"])
        yield container
        assert container.fuse_mounts() == []
        assert container.exec(is_up).stdout.strip() == "running"


def follow(container: Container, block: list[str]) -> None:
    """Run a block of commands as a user does who has copied it into a shell."""
    container.exec(["sh", "-eux", "-c", "\n".join(block)], env=PIP, timeout=300)


def test_who_follows_the_page_has_a_service_and_a_proxy_that_mount(booted: Container) -> None:
    _, install = pypi.commands("Install")
    (serve,) = pypi.commands("Run the broker")
    follow(booted, install)
    follow(booted, serve)
    # Which a container gets as a volume.
    booted.exec(["ln", "--symbolic", f"{PLACE}/bin/fusermount3-proxy", "/usr/bin/fusermount3"])
    booted.exec(["whoamifs", MOUNTPOINT], user="user")
    assert booted.exec(["cat", f"{MOUNTPOINT}/whoami"], user="user").stdout.startswith("uid=1000 gid=1000 pid=")
    assert booted.exec(["systemctl", "is-active", SOCKET, SERVICE]).stdout.split() == ["active", "active"]
    listed = json.loads(booted.exec([f"{PLACE}/bin/fusermount3-broker", "mounts", "--json"]).stdout)
    assert [mount["mountpoint"] for mount in listed] == [MOUNTPOINT]
    booted.exec(["fusermount3", "-u", MOUNTPOINT], user="user")

    (generate,) = pypi.commands("Give it to a container")
    follow(booted, ["mkdir -p /etc/cdi", *generate])
    assert f"{PLACE}/bin/fusermount3-proxy" in booted.exec(["cat", "/etc/cdi/fusermount3-proxy.json"]).stdout


def test_pip_links_the_proxy_from_the_sdist_or_installs_the_broker_alone(booted: Container) -> None:
    for compiler, programs in (("cc", {"fusermount3-broker", "fusermount3-proxy"}), ("false", {"fusermount3-broker"})):
        place = f"/opt/{compiler}"
        booted.exec(["python3", "-m", "venv", place])
        install = [f"{place}/bin/pip", "install", "--verbose", "--no-cache-dir", "--no-deps", f"/srv/dist/{SDIST}"]
        said = booted.exec(install, env={**PIP, "CC": compiler}, timeout=300)
        found = booted.exec(["sh", "-c", f"cd {place}/bin && ls -d fusermount3-*"]).stdout.split()
        assert set(found) == programs
        assert ("fusermount3-proxy is left out" in said.stdout + said.stderr) == (len(programs) == 1)
        booted.exec(["test", "-e", f"{place}/share/man/man8/fusermount3-broker.8"])
    assert booted.exec(["/opt/cc/bin/fusermount3-proxy", "--version"]).stdout.startswith("fusermount3 version: ")
