"""Test that pip's installation serves and mounts, on this host and where the page on PyPI is followed to the letter."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from fusermount3_proxy import __version__
from tests.e2e.documented import block, options_of, with_paths_of
from tests.lab import pypi
from tests.lab.broker import Broker
from tests.lab.commands import Argument, run
from tests.lab.images import BUSYBOX, DebianRecipe, image_tag
from tests.lab.podman import Container, Options, Volume
from tests.lab.programs import whoamifs
from tests.packaging import machines
from tests.packaging.machines import MOUNTPOINT, check_usable, mountpoints

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from subprocess import CompletedProcess

pytestmark = pytest.mark.e2e

PAGE = "pypi.md"
SDIST = f"/srv/dist/fusermount3_proxy-{__version__}.tar.gz"
UNITS = ["fusermount3-broker.socket", "fusermount3-broker.service"]
#: pip uses no other sources than these.
PIP = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/srv/dist /srv/wheelhouse"}


def test_a_broker_that_pip_has_installed_mounts_for_a_container_that_is_given_the_proxy(
    dist: Path, tmp_path: Path
) -> None:
    programs = tmp_path / "venv/bin"
    run(["/usr/bin/python3", "-m", "venv", programs.parent])
    python = run([programs / "python", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).stdout.strip()
    known: list[Argument] = ["--no-index", "--find-links", dist, "--find-links", pypi.wheelhouse(python)]
    run([programs / "pip", "install", *known, "fusermount3-proxy"], timeout=300)
    with Broker(command=(programs / "fusermount3-broker",)) as broker:
        options = Options(
            user="1000:1000",
            volumes=[Volume(whoamifs(), "/bin/whoamifs")],
            extra=with_paths_of(broker, options_of("podman run", PAGE), programs / "fusermount3-proxy"),
        )
        with Container(image_tag(BUSYBOX), options=options) as container:
            container.exec(["whoamifs", MOUNTPOINT])
            assert container.exec(["head", "-n1", f"{MOUNTPOINT}/whoami"]).stdout.startswith("uid=1000 gid=1000 ")
            assert [mount["mountpoint"] for mount in broker.mounts()] == [MOUNTPOINT]
            container.exec(["fusermount3", "-u", MOUNTPOINT])
            assert container.fuse_mounts() == []
            assert broker.mounts() == []


def machine(suite: str) -> DebianRecipe:
    """Return the recipe of a system that boots, with the packages that the page names."""
    (install,) = block(PAGE, "apt-get install").commands
    packages = ("passwd", "systemd", "systemd-sysv", "dbus", "procps", *install.split()[2:])
    return DebianRecipe(f"pip-machine-{suite}", packages, suite)


@pytest.fixture
def booted(suite: str, dist: Path) -> Iterator[Container]:
    """A machine that has booted, with the packages that the page names; at the end it must have no mount."""
    volumes = [
        Volume(dist, "/srv/dist"),
        Volume(pypi.wheelhouse(pypi.PYTHONS[suite]), "/srv/wheelhouse"),
        Volume(whoamifs(), "/usr/local/bin/whoamifs"),
    ]
    with machines.booted(image_tag(machine(suite)), volumes) as container:
        yield container


def follow(container: Container, beginning: str) -> None:
    """Run a block of the page's commands, as root would after copying it into a shell."""
    commands = ["set -eux", *block(PAGE, beginning).commands]
    container.exec(["sh", "-c", "\n".join(commands)], env=PIP, timeout=300)


@pytest.mark.long
def test_who_follows_the_page_has_a_service_and_a_proxy_that_mount(booted: Container) -> None:
    follow(booted, "python3 -m venv")
    follow(booted, "cd /opt")
    # A container gets this as a volume; here it is for the machine's own users.
    booted.exec(["ln", "--symbolic", "fusermount3-proxy", "/usr/bin/fusermount3"])
    booted.exec(["whoamifs", MOUNTPOINT], user="user")
    check_usable(booted)
    assert booted.exec(["systemctl", "is-active", *UNITS]).stdout.split() == ["active", "active"]
    assert mountpoints(booted) == [MOUNTPOINT]
    booted.exec(["fusermount3", "-u", MOUNTPOINT], user="user")

    booted.exec(["mkdir", "/etc/cdi"])
    follow(booted, "fusermount3-broker cdi generate")
    assert json.loads(booted.exec(["cat", "/etc/cdi/fusermount3-proxy.json"]).stdout)["devices"]


def install_sdist(booted: Container, place: str, compiler: str) -> CompletedProcess[str]:
    """Have pip install the sdist in a new venv at `place`."""
    booted.exec(["python3", "-m", "venv", place])
    install = [f"{place}/bin/pip", "install", "--verbose", "--no-cache-dir", "--no-deps", SDIST]
    return booted.exec(install, env={**PIP, "CC": compiler}, check=False, timeout=300)


@pytest.mark.long
def test_without_a_compiler_pip_installs_nothing_from_the_sdist_and_says_why(booted: Container) -> None:
    said = install_sdist(booted, "/opt/nothing", "false")
    assert said.returncode != 0
    assert "it needs a C compiler" in said.stdout + said.stderr
    assert booted.exec(["test", "-e", "/opt/nothing/bin/fusermount3-broker"], check=False).returncode == 1


@pytest.mark.long
def test_pip_links_the_proxy_from_the_sdist_or_installs_the_broker_alone(booted: Container) -> None:
    """Python comes without its static library as if it could not be linked."""
    without_library = '#!/bin/sh\ncase "$*" in *libpython*) exit 1 ;; esac\nexec cc "$@"\n'
    booted.exec(["sh", "-c", 'printf "%s" "$1" > /usr/bin/no-libpython', "-", without_library])
    booted.exec(["chmod", "755", "/usr/bin/no-libpython"])
    scripts = {"fusermount3-broker", "fusermount3-controller"}
    for compiler, programs in (("cc", scripts | {"fusermount3-proxy"}), ("no-libpython", scripts)):
        place = f"/opt/{compiler}"
        said = install_sdist(booted, place, compiler)
        assert said.returncode == 0, said.stderr
        found = booted.exec(["sh", "-c", f"cd {place}/bin && ls -d fusermount3-*"]).stdout.split()
        assert set(found) == programs
        assert ("fusermount3-proxy is left out" in said.stdout + said.stderr) == (programs == scripts)
        booted.exec(["test", "-e", f"{place}/share/man/man8/fusermount3-broker.8"])
    version = booted.exec(["/opt/cc/bin/fusermount3-proxy", "--version"]).stdout
    assert version.startswith(f"fusermount3-proxy version: {__version__}\n")
