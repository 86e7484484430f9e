"""Test that the packages build reproducibly in a clean tree of each release, and that lintian reports nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fusermount3_proxy import FUSERMOUNT_VERSION, __version__
from tests.lab import debian
from tests.lab.cache import sha256
from tests.lab.commands import run
from tests.lab.images import image_tag
from tests.lab.podman import Options, Volume, run_once

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.e2e


def field(deb: Path, name: str) -> str:
    return run(["dpkg-deb", "--field", deb, name]).stdout.strip()


def test_each_package_has_the_version_of_the_program(packages: Path) -> None:
    found = debian.debs(packages)
    assert found.keys() == set(debian.NAMES)
    assert {field(deb, "Version") for deb in found.values()} == {__version__}
    assert len(list(packages.glob(f"fusermount3-proxy_{__version__}.tar.*"))) == 1


def test_the_proxy_needs_no_package_and_stands_for_the_fuse3_whose_behaviour_it_has(packages: Path) -> None:
    deb = debian.debs(packages)["fusermount3-proxy"]
    assert field(deb, "Depends") == ""
    assert field(deb, "Provides") == f"fuse3 (= {FUSERMOUNT_VERSION})"


def test_the_package_for_hosts_has_the_same_executable_and_no_helper(packages: Path, tmp_path: Path) -> None:
    found = debian.debs(packages)
    assert field(found[debian.STATIC], "Depends") == ""
    assert field(found["fusermount3-broker"], "Recommends").split(" | ")[0] == debian.STATIC
    for name in (debian.STATIC, "fusermount3-proxy"):
        run(["dpkg-deb", "--extract", found[name], tmp_path / name])
    executables = {path.name for path in (tmp_path / debian.STATIC / "usr/bin").iterdir()}
    assert executables == {"fusermount3-proxy"}
    ours, theirs = (tmp_path / name / "usr/bin/fusermount3-proxy" for name in (debian.STATIC, "fusermount3-proxy"))
    assert sha256(ours) == sha256(theirs)


def test_the_broker_depends_on_the_packages_of_all_that_it_imports(packages: Path) -> None:
    depends = {each.split()[0] for each in field(debian.debs(packages)["fusermount3-broker"], "Depends").split(",")}
    libraries = {"click", "h11", "prometheus-client", "pyxattr", "rich", "seccomp", "systemd"}
    assert depends >= {
        "python3:any" if "python3:any" in depends else "python3",
        *(f"python3-{name}" for name in libraries),
    }


def test_only_the_configuration_is_a_conffile(packages: Path) -> None:
    conffiles = {
        name: run(["dpkg-deb", "--info", deb, "conffiles"], check=False).stdout.split()
        for name, deb in debian.debs(packages).items()
    }
    assert conffiles.pop("fusermount3-broker") == ["/etc/fusermount3-broker.toml"]
    assert set(map(tuple, conffiles.values())) == {()}


def test_lintian_has_nothing_to_say(suite: str, packages: Path) -> None:
    (changes,) = packages.glob("*.changes")
    options = Options(volumes=[Volume(packages, "/srv")])
    command = ["lintian", "--allow-root", "--show-overrides", f"/srv/{changes.name}"]
    said = run_once(image_tag(debian.inspector(suite)), command, options, check=False, timeout=300)
    assert said.stderr == ""
    # Of a package named -static, lintian expects such an executable.
    # --show-overrides prints the tags that are known and accepted; so a printed tag also shows that lintian has run.
    tags = {line for line in said.stdout.splitlines() if not line.startswith("N:")}
    directory = "usr/lib/python3/dist-packages/fusermount3_broker/mounter"
    assert tags == {
        "O: fusermount3-proxy: statically-linked-binary [usr/bin/fusermount3-proxy]",
        f"O: fusermount3-broker: statically-linked-binary [{directory}/plain_call]",
        f"O: fusermount3-broker: statically-linked-binary [{directory}/superblock_creator]",
    }


@pytest.mark.long
def test_the_same_sources_give_the_same_bytes_in_another_directory_zone_and_umask(
    suite: str, packages: Path, tmp_path: Path
) -> None:
    debian.build(suite, tmp_path, parent="/somewhere/else", umask="077", zone="Asia/Kathmandu")
    names = sorted(path.name for path in packages.iterdir() if path.suffix in (".deb", ".dsc", ".xz"))
    assert len(names) == len(debian.NAMES) + 2
    assert {name: sha256(tmp_path / name) for name in names} == {name: sha256(packages / name) for name in names}
