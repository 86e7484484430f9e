"""Test that the proxy replaces the genuine helper, in any order of installation, and restores it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fusermount3_proxy import FUSERMOUNT_VERSION
from tests.lab.debian import STATIC
from tests.packaging.machines import HELPERS

if TYPE_CHECKING:
    from tests.packaging.machines import Machine

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PROXY = f"fusermount3 version: {FUSERMOUNT_VERSION}"
ASIDE = "/usr/bin/fusermount3.distrib"


def check_is_the_proxy(machine: Machine) -> None:
    """Check that each name is the proxy, which is not setuid, and that its package's files are unmodified."""
    for helper in HELPERS:
        assert machine.run("readlink", "--canonicalize", helper).stdout.strip() == "/usr/bin/fusermount3-proxy"
        assert machine.says(helper) == PROXY
        assert machine.mode(helper) == "755 root"
    assert machine.run("dpkg", "--verify", "fusermount3-proxy").stdout == ""


def check_is_genuine(machine: Machine) -> None:
    """Check that each name is fuse3's own helper, setuid root."""
    for helper in HELPERS:
        assert machine.run("readlink", "--canonicalize", helper).stdout.strip() == "/usr/bin/fusermount3"
        assert machine.says(helper) not in ("", PROXY)
        assert machine.mode(helper) == "4755 root"
    assert machine.run("dpkg", "--verify", "fuse3").stdout == ""
    assert machine.diversions() == []


def test_alone(tree: Machine) -> None:
    before = tree.files()
    tree.apt("install", "fusermount3-proxy")
    check_is_the_proxy(tree)
    tree.apt("purge", "fusermount3-proxy")
    assert tree.files() == before
    assert tree.diversions() == []


def test_fuse3_installed_afterwards_replaces_nothing_and_has_its_place_when_the_proxy_goes(tree: Machine) -> None:
    tree.apt("install", "fusermount3-proxy")
    tree.apt("install", "fuse3")
    check_is_the_proxy(tree)
    assert tree.says(ASIDE) not in ("", PROXY)
    assert tree.mode(ASIDE) == "4755 root"
    tree.apt("remove", "fusermount3-proxy")
    check_is_genuine(tree)


def test_fuse3_that_was_there_makes_room_and_has_its_place_when_the_proxy_goes(tree: Machine) -> None:
    tree.apt("install", "fuse3")
    before = tree.files()
    tree.apt("install", "fusermount3-proxy")
    check_is_the_proxy(tree)
    assert tree.mode(ASIDE) == "4755 root"
    tree.apt("install", "--reinstall", "fuse3")
    check_is_the_proxy(tree)
    assert tree.mode(ASIDE) == "4755 root"
    tree.apt("purge", "fusermount3-proxy")
    check_is_genuine(tree)
    assert tree.files() == before


def test_the_executable_for_containers_leaves_the_hosts_helper_alone(tree: Machine) -> None:
    tree.apt("install", "fuse3")
    before = tree.files()
    tree.apt("install", STATIC)
    check_is_genuine(tree)
    assert "fusermount3-proxy version: " in tree.run("/usr/bin/fusermount3-proxy", "--version").stdout
    assert tree.run("dpkg", "--verify", STATIC).stdout == ""
    tree.apt("install", "fusermount3-proxy")
    check_is_the_proxy(tree)
    tree.apt("install", STATIC)
    check_is_genuine(tree)
    assert "fusermount3-proxy version: " in tree.run("/usr/bin/fusermount3-proxy", "--version").stdout
    tree.apt("purge", STATIC, "fusermount3-proxy")
    assert tree.files() == before


def test_fuse3_can_go_while_the_proxy_stays(tree: Machine) -> None:
    tree.apt("install", "fuse3", "fusermount3-proxy")
    check_is_the_proxy(tree)
    tree.apt("purge", "fuse3")
    check_is_the_proxy(tree)


def test_the_helper_of_libfuse_2_makes_room_too(suite: str, tree: Machine) -> None:
    tree.apt("install", "fusermount3-proxy")
    tree.apt("install", "fuse")
    check_is_the_proxy(tree)
    if suite != "bookworm":
        return  # its fuse is empty, and depends on fuse3
    assert tree.says("/usr/bin/fusermount.distrib").startswith("fusermount version: 2.9")
    assert tree.mode("/usr/bin/fusermount.distrib") == "4755 root"
    tree.apt("remove", "fusermount3-proxy")
    assert tree.says("/usr/bin/fusermount").startswith("fusermount version: 2.9")
    assert tree.mode("/usr/bin/fusermount") == "4755 root"


def test_what_depends_on_fuse3_is_content_with_the_proxy(tree: Machine) -> None:
    tree.apt("install", "fusermount3-proxy")
    tree.apt("install", "sshfs")
    assert tree.run("dpkg-query", "--show", "--showformat=${db:Status-Status}", "fuse3").stdout == "not-installed"
    check_is_the_proxy(tree)


def test_an_upgrade_leaves_the_diversions(tree: Machine) -> None:
    tree.apt("install", "fusermount3-proxy", "fuse3")
    before = tree.diversions()
    assert len(before) == 2 * len(HELPERS), "the helpers, and their manual pages"
    tree.use("newer", "debian")
    tree.apt("upgrade")
    assert tree.run("dpkg-query", "--show", "--showformat=${Version}", "fusermount3-proxy").stdout.endswith("+newer")
    assert tree.diversions() == before
    check_is_the_proxy(tree)
    assert tree.mode(ASIDE) == "4755 root"


def test_an_installation_that_fails_leaves_the_genuine_helper(tree: Machine) -> None:
    tree.apt("install", "fuse3")
    # The archive is truncated.
    tree.run("sh", "-c", "head --bytes=-500000 /srv/ours/fusermount3-proxy_*.deb > /tmp/broken.deb")
    assert "unexpected end of file" in tree.run("dpkg", "--install", "/tmp/broken.deb", check=False).stderr
    check_is_genuine(tree)
