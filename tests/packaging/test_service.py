"""Test the broker's package on a machine that boots: the service mounts, is upgraded, and leaves nothing behind."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.lab import debian
from tests.lab.images import image_tag
from tests.lab.podman import Volume
from tests.lab.programs import whoamifs
from tests.packaging import machines
from tests.packaging.machines import MOUNTPOINT, Machine, check_usable, mountpoints

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SERVICE = "fusermount3-broker.service"
SOCKET = "fusermount3-broker.socket"
METRICS = "fusermount3-broker-metrics.socket"
CONFIGURATION = "/etc/fusermount3-broker.toml"


@pytest.fixture
def booted(suite: str, archives: list[Volume], sources: Path) -> Iterator[Machine]:
    """A machine that has booted; at the end it must have no mount."""
    volumes = [*archives, Volume(whoamifs(), "/usr/local/bin/whoamifs"), Volume(sources, "/srv/sources")]
    with machines.booted(image_tag(debian.machine(suite)), volumes) as container:
        yield Machine(container)


def mount(machine: Machine) -> None:
    """Mount whoamifs as an ordinary user, and check that it is usable."""
    machine.run("whoamifs", MOUNTPOINT, user="user")
    check_usable(machine.container)


def unmount(machine: Machine) -> None:
    machine.run("fusermount3", "-u", MOUNTPOINT, user="user")


def version(machine: Machine, package: str) -> str:
    return machine.run("dpkg-query", "--show", "--showformat=${Version}", package).stdout


def test_the_installation_says_nothing_that_is_not_so(booted: Machine) -> None:
    install = "DEBIAN_FRONTEND=noninteractive apt-get --yes --no-install-recommends install fusermount3-broker 2>&1"
    said = booted.run("sh", "-c", install).stdout
    assert "disabled" not in said, said
    assert "sockets.target.wants/fusermount3-broker.socket" in said
    assert booted.systemctl("is-active", SOCKET) == "active"
    assert booted.systemctl("is-active", SERVICE, check=False) == "inactive", "a caller starts it"
    booted.systemctl("start", SERVICE)
    booted.use("newer", "debian")
    first = booted.systemctl("show", "--value", "--property=MainPID", SERVICE)
    said = booted.run("sh", "-c", install).stdout
    assert "disabled" not in said, said
    assert booted.systemctl("is-active", SERVICE) == "active"
    assert booted.systemctl("show", "--value", "--property=MainPID", SERVICE) != first, "an upgrade restarts it"


def test_an_installed_broker_runs_and_mounts(booted: Machine) -> None:
    booted.apt("install", "fusermount3-broker", "fusermount3-proxy")
    assert booted.systemctl("is-active", SOCKET) == "active"
    assert booted.systemctl("is-enabled", SOCKET) == "enabled"
    assert booted.systemctl("is-enabled", METRICS, check=False) == "disabled"
    mount(booted)
    assert booted.systemctl("is-active", SERVICE) == "active", "the first call has started it"
    assert booted.systemctl("show", "--value", "--property=User", SERVICE) == "fusermount3-broker"
    assert booted.run("stat", "--format=%U %a", "/var/lib/fusermount3-broker").stdout == "fusermount3-broker 700\n"
    assert mountpoints(booted.container) == [MOUNTPOINT]
    booted.apt("install", "fuse3")
    unmount(booted)
    mount(booted)
    assert mountpoints(booted.container) == [MOUNTPOINT], "fuse3 did not take the place of the proxy"
    unmount(booted)
    assert booted.run("dpkg", "--verify", "fusermount3-broker", "fusermount3-proxy", "fuse3").stdout == ""


def test_an_upgrade_restarts_the_service_and_leaves_mounts_and_configuration(booted: Machine) -> None:
    booted.apt("install", "fusermount3-broker", "fusermount3-proxy", "fuse3")
    booted.run("sed", "--in-place", "s/^#user_allow_other = false/user_allow_other = true/", CONFIGURATION)
    mount(booted)
    before = booted.systemctl("show", "--value", "--property=MainPID", SERVICE)
    listening = booted.systemctl("show", "--value", "--property=InvocationID", SOCKET)
    booted.use("newer", "debian")
    booted.apt("upgrade")
    assert booted.systemctl("show", "--value", "--property=InvocationID", SOCKET) == listening, "callers wait in it"
    assert version(booted, "fusermount3-broker").endswith("+newer")
    assert booted.systemctl("is-active", SERVICE, SOCKET).split() == ["active", "active"]
    assert booted.systemctl("show", "--value", "--property=MainPID", SERVICE) != before
    check_usable(booted.container)
    assert mountpoints(booted.container) == [MOUNTPOINT]
    unmount(booted)
    assert "user_allow_other = true" in booted.run("cat", CONFIGURATION).stdout


def test_a_removal_leaves_mounts_and_configuration_and_a_purge_nothing(booted: Machine) -> None:
    booted.apt("install", "fusermount3-broker", "fusermount3-proxy")
    mount(booted)
    booted.apt("remove", "fusermount3-broker")
    check_usable(booted.container)
    booted.run("test", "-e", CONFIGURATION)
    booted.run("test", "-e", "/var/lib/fusermount3-broker")
    assert booted.systemctl("is-active", SERVICE, SOCKET, check=False).split() == ["inactive", "inactive"]
    booted.apt("install", "fusermount3-broker")
    booted.systemctl("start", SERVICE)
    assert mountpoints(booted.container) == [MOUNTPOINT], "it still knows its mounts"
    unmount(booted)
    booted.apt("purge", "fusermount3-broker", "fusermount3-proxy")
    assert [path for path in booted.files() if "fusermount3" in path] == []
    assert booted.run("sh", "-c", "ls --directory /run/fusermount3-*", check=False).stdout == ""


@pytest.mark.long
def test_the_packages_own_tests_pass(booted: Machine) -> None:
    booted.apt("install", "autopkgtest")
    debs = sorted(path.name for path in (booted.container.root() / "srv/ours").glob("*.deb"))
    command = ["autopkgtest", "--no-built-binaries", "--ignore-restrictions=isolation-machine"]
    packages = [f"/srv/ours/{name}" for name in debs]
    result = booted.run(*command, *packages, "/srv/sources/", "--", "null", check=False, timeout=900)
    said = result.stdout + result.stderr
    print(said)
    assert result.returncode == 0
    assert set(re.findall(r"^(\S+) +PASS", said, flags=re.MULTILINE)) == {"mount", "commands"}
