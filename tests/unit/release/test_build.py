"""A release is refused on a machine that can't make it, before anything is built; and two builds are compared."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from release import build, check
from release.version import CannotRelease

ROOT = Path(__file__).parents[3]
DEBIAN = {"ID": "debian", "VERSION_CODENAME": "bookworm", "PRETTY_NAME": "Debian GNU/Linux 12 (bookworm)"}


@pytest.fixture
def suitable(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine that can make releases."""
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: DEBIAN)
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "", "6.12", "", "x86_64")))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(build, "can_emulate", lambda: True)
    return monkeypatch


@pytest.mark.usefixtures("suitable")
def test_a_suitable_machine_is_accepted() -> None:
    build.check_machine()


def test_another_distribution_is_refused(suitable: pytest.MonkeyPatch) -> None:
    suitable.setattr(platform, "freedesktop_os_release", lambda: {"ID": "fedora", "PRETTY_NAME": "Fedora Linux 43"})
    with pytest.raises(CannotRelease, match=r"Debian 12 on x86_64.*this is Fedora Linux 43"):
        build.check_machine()


def test_a_user_is_refused(suitable: pytest.MonkeyPatch) -> None:
    suitable.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CannotRelease, match="as root"):
        build.check_machine()


def test_a_kernel_that_emulates_nothing_is_refused(suitable: pytest.MonkeyPatch) -> None:
    suitable.setattr(build, "can_emulate", lambda: False)
    with pytest.raises(CannotRelease, match=r"Linux 6\.7 and qemu-user-static"):
        build.check_machine()


def test_the_packages_of_a_tree_are_read_from_dpkgs_table() -> None:
    table = "Package: a\nStatus: install ok installed\nArchitecture: all\nVersion: 1:2-3\nDepends: b\n text\n\n"
    assert build.installed_packages(table + table.replace("a\n", "b\n", 1)) == [
        ("a", "1:2-3", "all"),
        ("b", "1:2-3", "all"),
    ]


def test_the_sources_are_where_the_metadata_say() -> None:
    assert f"\n    Source = {build.source_url(ROOT)}\n" in (ROOT / "setup.cfg").read_text()


def test_files_that_are_missing_or_differ_are_named() -> None:
    assert check.different({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "4", "d": "5"}) == ["b", "c", "d"]
    assert check.different({"a": "1"}, {"a": "1"}) == []
