"""The RPM packages, built, inspected and installed on Debian: Fedora is in no registry that we reach."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from fusermount3_proxy import __version__
from tests.lab import checkout, debian, rpm
from tests.lab.broker import PROXY
from tests.lab.cache import sha256
from tests.lab.commands import run
from tests.lab.images import image_tag
from tests.lab.podman import Options, Volume, run_once
from tests.lab.programs import whoamifs
from tests.packaging import machines
from tests.packaging.machines import MOUNTPOINT, check_usable, mountpoints

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.lab.podman import Container

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SERVICE, SOCKET = "fusermount3-broker.service", "fusermount3-broker.socket"
CONFIGURATION = "/etc/fusermount3-broker.toml"
RPMLINTRC = checkout.ROOT / "packaging/rpm/fusermount3-proxy.rpmlintrc"
#: Debian's rpmlint has no distribution's configuration. It reports what distributions add to each package (signatures,
#: packagers, groups, compressed pages), and licenses and interpreters by their names. The change log is CHANGELOG.md.
OF_NO_DISTRIBUTION = {
    "invalid-license",
    "manpage-not-compressed",
    "no-changelogname-tag",
    "no-dependency-on",
    "no-group-tag",
    "no-packager-tag",
    "no-signature",
}


@pytest.fixture(scope="module")
def packages() -> Path:
    return rpm.built()


def inspect(packages: Path, *command: str) -> str:
    """Return what a command prints in a system with the tools of RPM, where the packages are in /srv."""
    options = Options(volumes=[Volume(packages, "/srv")])
    return run_once(image_tag(rpm.BUILDER), command, options).stdout


def files(packages: Path, name: str) -> set[str]:
    """Return the files of a package that a host uses: without documents, and where Debian has them."""
    listed = inspect(packages, "rpm", "--query", "--list", "--package", f"/srv/{rpm.rpms(packages)[name].name}")
    return {
        path.replace("/zsh/site-functions/", "/zsh/vendor-completions/").replace("/usr/lib/systemd/", "/lib/systemd/")
        for path in listed.splitlines()
        if not re.search(r"^/usr/share/(doc|licenses)/|/__pycache__\b|\.dist-info\b", path)
    }


def files_of_deb(deb: Path) -> set[str]:
    """Return the same of a package of Debian's."""
    found = set()
    for line in run(["dpkg-deb", "--contents", deb]).stdout.splitlines():
        mode, *_, path = line.split(maxsplit=5)
        path = path.removeprefix(".").replace("/usr/lib/systemd/", "/lib/systemd/")
        wanted = not mode.startswith("d") or "/fusermount3_" in path
        if wanted and not re.search(r"^/usr/share/(doc|lintian)/|\.(dist|egg)-info\b", path):
            found.add(path.rstrip("/").removesuffix(".gz"))
    return found


def test_each_package_has_the_version_of_the_program(packages: Path) -> None:
    found = rpm.rpms(packages)
    assert found.keys() == set(rpm.NAMES)
    for path in found.values():
        said = inspect(packages, "rpm", "--query", "--queryformat", "%{VERSION}", "--package", f"/srv/{path.name}")
        assert said == __version__


@pytest.mark.parametrize("name", rpm.NAMES)
def test_they_have_the_files_of_debians(packages: Path, name: str) -> None:
    assert files(packages, name) == files_of_deb(debian.debs(debian.built("bookworm"))[name])


def test_the_executable_is_the_one_that_was_given(packages: Path, tmp_path: Path) -> None:
    name = rpm.rpms(packages)[rpm.STATIC].name
    options = Options(volumes=[Volume(packages, "/srv"), Volume(tmp_path, "/output", "rw")])
    unpack = f"rpm2cpio /srv/{name} | cpio --quiet --extract --make-directories --directory /output"
    run_once(image_tag(rpm.BUILDER), ["sh", "-c", unpack], options)
    assert sha256(tmp_path / "usr/bin/fusermount3-proxy") == sha256(PROXY)


def test_the_broker_requires_all_that_it_imports_and_nothing_by_its_name_on_pypi(packages: Path) -> None:
    name = rpm.rpms(packages)[rpm.BROKER].name
    required = inspect(packages, "rpm", "--query", "--requires", "--package", f"/srv/{name}").split("\n")
    names = {each.split()[0] for each in required if each}
    libraries = {name.replace("prometheus-client", "prometheus_client") for name in rpm.LIBRARIES}
    assert names >= {"systemd", *(f"python3-{name}" for name in libraries - {"seccomp"}), "python3-libseccomp"}
    assert [each for each in names if each.startswith("python3dist")] == []


def test_rpmlint_has_nothing_to_say(packages: Path) -> None:
    options = Options(volumes=[Volume(packages, "/srv"), Volume(RPMLINTRC, "/rpmlintrc")])
    command = ["rpmlint", "--rpmlintrc", "/rpmlintrc", *(f"/srv/{path.name}" for path in packages.glob("*.rpm"))]
    said = run_once(image_tag(rpm.BUILDER), command, options, check=False).stdout
    assert "2 packages and 0 specfiles checked" in said, said
    found = set(re.findall(r"^\S+: [WE]: (\S+)", said, re.MULTILINE))
    assert found == OF_NO_DISTRIBUTION, said


@pytest.fixture
def booted() -> Iterator[Container]:
    """A machine of Debian 12 that has booted, with RPM and the libraries; at the end it must have no mount."""
    volumes = [
        Volume(rpm.built(), "/srv/ours"),
        Volume(rpm.built(".newer"), "/srv/newer"),
        Volume(whoamifs(), "/usr/local/bin/whoamifs"),
    ]
    with machines.booted(image_tag(rpm.MACHINE), volumes) as container:
        yield container


def install(container: Container, directory: str, how: str) -> None:
    # --nodeps: its database has no packages of Debian's.
    container.exec(["sh", "-c", f"rpm {how} --nodeps /srv/{directory}/*.rpm"], timeout=300)


def systemctl(container: Container, *arguments: str) -> str:
    """Return what it prints, whatever its status."""
    return container.exec(["systemctl", *arguments], check=False).stdout.strip()


def test_a_machine_mounts_is_upgraded_and_keeps_mounts_and_configuration_when_it_is_removed(booted: Container) -> None:
    install(booted, "ours", "--install")
    assert systemctl(booted, "is-enabled", SOCKET) == "enabled"
    booted.exec(["systemctl", "start", SOCKET])
    booted.exec(["ln", "--symbolic", "fusermount3-proxy", "/usr/bin/fusermount3"])
    booted.exec(["sed", "--in-place", "s/^#user_allow_other = false/user_allow_other = true/", CONFIGURATION])
    booted.exec(["whoamifs", MOUNTPOINT], user="user")
    check_usable(booted)
    assert systemctl(booted, "show", "--value", "--property=User", SERVICE) == "fusermount3-broker"
    assert mountpoints(booted) == [MOUNTPOINT]

    before = systemctl(booted, "show", "--value", "--property=MainPID", SERVICE)
    listening = systemctl(booted, "show", "--value", "--property=InvocationID", SOCKET)
    install(booted, "newer", "--upgrade")
    assert systemctl(booted, "show", "--value", "--property=InvocationID", SOCKET) == listening, "callers wait in it"
    assert systemctl(booted, "is-active", SERVICE, SOCKET).split() == ["active", "active"]
    assert systemctl(booted, "is-enabled", SOCKET) == "enabled"
    assert systemctl(booted, "show", "--value", "--property=MainPID", SERVICE) != before
    check_usable(booted)
    assert mountpoints(booted) == [MOUNTPOINT]
    assert "\nuser_allow_other = true" in booted.exec(["cat", CONFIGURATION]).stdout

    booted.exec(["rpm", "--erase", rpm.BROKER])
    check_usable(booted)
    assert "\nuser_allow_other = true" in booted.exec(["cat", f"{CONFIGURATION}.rpmsave"]).stdout
    assert systemctl(booted, "list-unit-files", "--no-legend", "fusermount3-broker*") == ""
    assert booted.exec(["find", "/etc/systemd", "-name", "fusermount3*"]).stdout == ""
    booted.exec(["umount", MOUNTPOINT])
