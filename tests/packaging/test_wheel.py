"""Test PyPI's archives: the sdist has all files in git, the wheel both programs, and pip installs and removes it."""

from __future__ import annotations

import configparser
import email
import os
import re
import stat
import tarfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fusermount3_proxy import __version__
from tests.lab import pypi
from tests.lab.broker import PROXY
from tests.lab.cache import sha256
from tests.lab.checkout import make_static
from tests.lab.commands import run

if TYPE_CHECKING:
    from email.message import Message

ROOT = f"fusermount3_proxy-{__version__}"
WHEEL = f"{ROOT}-py3-none-manylinux_2_17_{os.uname().machine}.whl"
SDIST = f"{ROOT}.tar.gz"
PROGRAMS = ["fusermount3_broker/mounter/superblock_creator", "fusermount3_broker/mounter/plain_call"]
EXECUTABLE = f"{ROOT}.data/scripts/fusermount3-proxy"
#: Files below sys.prefix that are neither modules nor metadata.
SHARED = {
    "share/bash-completion/completions/fusermount3-broker",
    "share/bash-completion/completions/fusermount3-proxy",
    "share/fish/vendor_completions.d/fusermount3-broker.fish",
    "share/fish/vendor_completions.d/fusermount3-proxy.fish",
    "share/fusermount3-proxy/fusermount3-broker.toml",
    "share/fusermount3-proxy/systemd/fusermount3-broker-metrics.socket",
    "share/fusermount3-proxy/systemd/fusermount3-broker.service",
    "share/fusermount3-proxy/systemd/fusermount3-broker.socket",
    "share/fusermount3-proxy/systemd/fusermount3-broker.sysusers",
    "share/man/man1/fusermount3-proxy.1",
    "share/man/man5/fusermount3-broker.toml.5",
    "share/man/man8/fusermount3-broker.8",
    "share/zsh/site-functions/_fusermount3-broker",
    "share/zsh/site-functions/_fusermount3-proxy",
}


@pytest.fixture(scope="session")
def wheel(dist: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(dist / WHEEL)


@pytest.fixture(scope="session")
def metadata(wheel: zipfile.ZipFile) -> Message:
    return email.message_from_bytes(wheel.read(f"{ROOT}.dist-info/METADATA"))


@pytest.fixture
def sources(dist: Path, tmp_path: Path) -> Path:
    """The unpacked sdist."""
    run(["tar", "--extract", "--file", dist / SDIST, "--directory", tmp_path, "--no-same-owner"])
    return tmp_path / ROOT


def git_files() -> set[str]:
    """Return the files that git tracks, and untracked files that it does not ignore."""
    git = ["git", "-C", str(pypi.SOURCES)]
    names = run([*git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]).stdout.rstrip("\0").split("\0")
    return {name for name in names if (pypi.SOURCES / name).is_file()}


def test_the_sdist_has_what_git_has_to_the_byte(sources: Path) -> None:
    found = {str(path.relative_to(sources)): path for path in sources.rglob("*") if not path.is_dir()}
    assert {name for name in found if not name.startswith("fusermount3_proxy.egg-info/")} == git_files() | {"PKG-INFO"}
    for name in git_files():
        ours = pypi.SOURCES / name
        assert found[name].read_bytes() == ours.read_bytes()
        assert found[name].stat().st_mode & 0o111 == (0o111 if ours.stat().st_mode & 0o100 else 0)


def test_the_archives_tell_nothing_of_who_made_them(dist: Path, wheel: zipfile.ZipFile) -> None:
    with tarfile.open(dist / SDIST) as archive:
        members = archive.getmembers()
    assert {(member.uid, member.gid, member.uname, member.gname, member.mtime) for member in members} == {
        (0, 0, "", "", members[0].mtime)
    }
    assert len({info.date_time for info in wheel.infolist()}) == 1


def test_the_unpacked_sdist_makes_the_same_archives_in_another_directory_zone_and_umask(
    dist: Path, sources: Path
) -> None:
    assert not (sources / "build").exists()
    again = pypi.make_wheel(sources, prefix=("env", "TZ=Asia/Kathmandu", "sh", "-c", 'umask 077 && "$@"', "sh"))
    assert {path.name: sha256(path) for path in again.iterdir()} == {
        name: sha256(dist / name) for name in (SDIST, WHEEL)
    }


def test_the_wheel_holds_the_modules_both_programs_and_what_belongs_to_them(wheel: zipfile.ZipFile) -> None:
    names = {info.filename for info in wheel.infolist() if not info.is_dir()}
    files = {name.removeprefix("broker/").removeprefix("controller/") for name in git_files()}
    packages = ("fusermount3_broker/", "fusermount3_controller/", "fusermount3_proxy/")
    modules = {name for name in files if name.startswith(packages) and not name.endswith((".c", ".h"))} | {*PROGRAMS}
    beside = {name for name in names if not name.startswith(f"{ROOT}.dist-info/")} - modules
    assert modules <= names
    assert beside == {EXECUTABLE, *(f"{ROOT}.data/data/{name}" for name in SHARED)}
    entry_points = configparser.ConfigParser()
    entry_points.read_string(wheel.read(f"{ROOT}.dist-info/entry_points.txt").decode())
    assert dict(entry_points["console_scripts"]) == {
        "fusermount3-broker": "fusermount3_broker.cli.main:main",
        "fusermount3-controller": "fusermount3_controller.cli:main",
    }


def test_the_executable_in_the_wheel_is_the_static_one(wheel: zipfile.ZipFile) -> None:
    assert wheel.read(EXECUTABLE) == PROXY.read_bytes()
    assert stat.S_IMODE(wheel.getinfo(EXECUTABLE).external_attr >> 16) == 0o755


def test_the_wheel_is_for_any_python_and_one_architecture(wheel: zipfile.ZipFile) -> None:
    tags = email.message_from_bytes(wheel.read(f"{ROOT}.dist-info/WHEEL"))
    assert tags.get_all("Tag") == [f"py3-none-manylinux_2_17_{os.uname().machine}"]
    assert tags["Root-Is-Purelib"] == "true"


@pytest.mark.e2e
def test_a_wheel_for_arm64_holds_executables_for_arm64() -> None:
    make_static("arm64")
    dist = pypi.make_wheel(pypi.SOURCES, "ARCH=arm64")
    wheel = zipfile.ZipFile(dist / f"{ROOT}-py3-none-manylinux_2_17_aarch64.whl")
    for executable in (EXECUTABLE, *PROGRAMS):
        e_machine = int.from_bytes(wheel.read(executable)[18:20], "little")
        assert e_machine == 183, "EM_AARCH64 in elf.h"


def test_the_metadata_passes_twines_strict_check(dist: Path) -> None:
    said = run([pypi.ENVIRONMENT / "bin/twine", "check", "--strict", dist / SDIST, dist / WHEEL]).stdout
    assert said.count("PASSED") == 2


def test_the_metadata_names_licence_and_version(wheel: zipfile.ZipFile, metadata: Message) -> None:
    assert (metadata["Name"], metadata["Version"]) == ("fusermount3-proxy", __version__)
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License"] == "Apache-2.0"
    files = metadata.get_all("License-File") or []
    assert {Path(name).name for name in files} == {"LICENSE", "README", "CPython", "glibc", "LGPL-2.1"}
    for name in files:
        assert wheel.read(f"{ROOT}.dist-info/licenses/{name}") == (pypi.SOURCES / name).read_bytes()


def test_no_link_on_the_page_of_pypi_is_relative(metadata: Message) -> None:
    page = str(metadata.get_payload())
    assert "pip install fusermount3-proxy" in page
    assert [target for target in re.findall(r"\]\(([^)]*)\)", page) if not target.startswith("https://")] == []


def environment(place: Path) -> Path:
    """Create a venv without the broker's dependencies, and return its pip."""
    run(["/usr/bin/python3", "-m", "venv", place])
    return place / "bin/pip"


def files(place: Path) -> set[Path]:
    """Return the files in this directory, without directories: pip leaves empty ones."""
    return {path for path in place.rglob("*") if path.is_symlink() or not path.is_dir()}


def test_pip_installs_both_programs_and_removes_all_of_it(dist: Path, tmp_path: Path) -> None:
    pip = environment(tmp_path / "venv")
    before = files(tmp_path)
    run([pip, "install", "--no-index", "--no-deps", "--find-links", dist, "fusermount3-proxy"])
    installed = tmp_path / "venv/bin/fusermount3-proxy"
    assert sha256(installed) == sha256(PROXY)
    assert stat.S_IMODE(installed.stat().st_mode) == 0o755
    assert run([installed, "--version"]).stdout.startswith(f"fusermount3-proxy version: {__version__}\n")
    assert (tmp_path / "venv/bin/fusermount3-broker").exists()
    assert {name for name in SHARED if not (tmp_path / "venv" / name).exists()} == set()
    run([pip, "uninstall", "--yes", "fusermount3-proxy"])
    assert files(tmp_path) == before
