"""Without dpkg, make says what to install on this distribution, once and in few words, and fails before it builds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "packaging/install-packages"
PAGE = (ROOT / "docs/where-it-runs.md").read_text()

FEDORA = 'NAME="Fedora Linux"\nID=fedora\n'
ROCKY = 'NAME="Rocky Linux"\nID="rocky"\nID_LIKE="rhel centos fedora"\n'
ARCH = 'NAME="Arch Linux"\nID=arch\n'
TUMBLEWEED = 'NAME="openSUSE Tumbleweed"\nID="opensuse-tumbleweed"\nID_LIKE="opensuse suse"\n'
ALPINE = 'NAME="Alpine Linux"\nID=alpine\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A directory for PATH with what the script and make call, but neither dpkg nor compilers."""
    place = tmp_path / "bin"
    place.mkdir()
    for name in ("bash", "sh", "env", "id", "sed", "make", "uname", "grep", "git", "cat"):
        found = shutil.which(name)
        assert found is not None, name
        (place / name).symlink_to(found)
    return place


def said(
    path: Path, os_release: str, *argv: str, program: tuple[str, ...] = (str(SCRIPT),)
) -> subprocess.CompletedProcess[str]:
    """Run the script, or another program, on a machine with this os-release(5)."""
    file = path.parent / "os-release"
    file.write_text(os_release)
    environment = {"PATH": str(path), "OS_RELEASE": str(file)}
    return subprocess.run([*program, *argv], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("os_release", "command"),
    [
        (FEDORA, "on Fedora Linux, as root: dnf install gcc glibc-static "),
        (ROCKY, "on Rocky Linux, as root: dnf install gcc glibc-static "),
        (ARCH, "on Arch Linux, as root: pacman -S --needed gcc "),
        (TUMBLEWEED, "on openSUSE Tumbleweed, as root: zypper install gcc glibc-devel-static "),
    ],
    ids=["fedora", "like fedora", "arch", "opensuse"],
)
def test_it_names_what_is_missing_and_the_command_of(os_release: str, command: str, path: Path) -> None:
    result = said(path, os_release, "--or-tools", "gcc")
    missing, install, again = result.stderr.splitlines()
    assert result.returncode == 1
    assert missing == "missing: python3, gcc, pkg-config, libsystemd, python3's headers, a static libc"
    assert install.startswith(command)
    assert f"| `{install.partition('as root: ')[2]}` |" in PAGE
    assert again == "then run make again"


def test_alpine_is_told_that_only_the_image_runs_there(path: Path) -> None:
    assert "the broker runs there only from its image: apk add podman" in said(path, ALPINE, "--or-tools", "gcc").stderr


@pytest.mark.parametrize("os_release", ["", 'NAME="Void"\nID=void\n'], ids=["nothing is known", "void"])
def test_elsewhere_it_names_the_commands_of_all(os_release: str, path: Path) -> None:
    lines = said(path, os_release, "--or-tools", "gcc").stderr.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == ["fedora", "arch", "opensuse"]


def test_what_needs_debian_says_so(path: Path) -> None:
    result = said(path, FEDORA, "podman", "mmdebstrap")
    assert result.returncode == 1
    assert result.stderr.startswith(
        "this target needs Debian 12 or 13, and Fedora Linux has no dpkg: run it in a conta"
    )


def test_with_the_tools_it_says_nothing(path: Path) -> None:
    for name in ("python3", "gcc", "pkg-config"):
        (path / name).write_text("#!/bin/sh\n")
        (path / name).chmod(0o755)
    result = said(path, FEDORA, "--or-tools", "gcc")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_make_says_it_once_and_nothing_of_dpkg(path: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    result = said(path, FEDORA, "--silent", "venv", f"VENV={venv}", program=("make",))
    assert result.returncode != 0
    assert len(re.findall("as root: dnf install", result.stderr)) == 1
    assert "dpkg" not in result.stdout + result.stderr
    assert not venv.exists()


@pytest.mark.skipif(not shutil.which("dpkg"), reason="needs dpkg")
def test_the_architecture_has_debians_name() -> None:
    script = "include Makefile\n.PHONY: say\nsay:\n\t@echo $(NATIVE)\n"
    make = ["make", "--silent", "--makefile=-", "say"]
    found = subprocess.run(make, cwd=ROOT, input=script, env=dict(os.environ), capture_output=True, text=True).stdout
    assert found == subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True).stdout
