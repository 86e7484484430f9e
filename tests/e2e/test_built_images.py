"""Images built by Podman, without a network, from the lines in docs/containers.md and docs/kubernetes.md; and the
effect of installing the distribution's fuse3 in them later."""

from __future__ import annotations

import secrets
import shutil
from typing import TYPE_CHECKING, Protocol

import pytest

from tests.e2e.documented import containerfiles, options_of, with_paths_of
from tests.e2e.mergerfs import use_mergerfs
from tests.e2e.sshfs import use_sshfs
from tests.lab.broker import PROXY, Broker
from tests.lab.commands import run
from tests.lab.images import (
    BUSYBOX,
    INSTALL_FUSE,
    REPOSITORY,
    SSHFS,
    WITHOUT_FUSE,
    WITHOUT_FUSE_TRIXIE,
    WITHOUT_MERGERFS,
    DebianRecipe,
    image_tag,
)
from tests.lab.podman import LIMITS, RUNTIME, Container, Options, Volume
from tests.lab.programs import whoamifs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PROXY_VERSION = "fusermount3 version: 3.18.2\n"
USER = "1000:1000"

FOR_DPKG, FOR_OTHERS, FOR_NO_SHELL, _ = containerfiles()
(FOR_PODS,) = containerfiles("kubernetes.md")


class Build(Protocol):
    """Build an image from a base image and lines of a Containerfile; return its name."""

    def __call__(self, base: str, lines: str) -> str: ...


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    shutil.copy(PROXY, tmp_path / "fusermount3-proxy")
    built: list[str] = []

    def build(base: str, lines: str) -> str:
        (tmp_path / "Containerfile").write_text(f"FROM {base}\n{lines}")
        built.append(f"{REPOSITORY}/built:{secrets.token_hex(8)}")
        offline = ["--network=none", "--pull=never"]
        run(["podman", *RUNTIME, "build", *LIMITS, *offline, "--tag", built[-1], tmp_path], timeout=300)
        return built[-1]

    yield build
    for tag in built:
        run(["podman", "image", "rm", "--force", tag])


def options(broker: Broker, user: str | None, *volumes: Volume) -> Options:
    """The options that docs/containers.md still requires on the command line."""
    return Options(user=user, volumes=volumes, extra=with_paths_of(broker, options_of("podman run -v")))


def check_probe(container: Container, mountpoint: str) -> None:
    """Check that our FUSE program mounts, serves and unmounts."""
    result = container.exec(["/usr/bin/whoamifs", "--probe", mountpoint], check=False)
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "ok=yes"), result.stdout + result.stderr


PROBE = Volume(whoamifs(), "/usr/bin/whoamifs")


@pytest.mark.parametrize(("user", "mountpoint"), [("0:0", "/mnt"), (USER, "/home/user/mnt")], ids=["root", "a user"])
def test_debian_with_its_fuse3_and_our_lines(user: str, mountpoint: str, build: Build, broker: Broker) -> None:
    image = build(image_tag(SSHFS), FOR_DPKG)
    with Container(image, options=options(broker, user)) as container:
        for name in ("fusermount3", "fusermount", "/bin/fusermount3", "/bin/fusermount", "mergerfs-fusermount"):
            assert container.exec([name, "-V"]).stdout == PROXY_VERSION
        assert container.exec(["/usr/bin/fusermount3.distrib", "-V"]).stdout != PROXY_VERSION
        use_sshfs(container, mountpoint)


@pytest.mark.parametrize("recipe", [WITHOUT_FUSE, WITHOUT_FUSE_TRIXIE], ids=lambda recipe: recipe.suite)
def test_fuse3_that_is_installed_later_is_put_beside_the_proxy(
    recipe: DebianRecipe, build: Build, broker: Broker
) -> None:
    image = build(image_tag(recipe), f"{FOR_DPKG}RUN {INSTALL_FUSE}\n")
    with Container(image, options=options(broker, USER, PROBE)) as container:
        assert container.exec(["fusermount3", "-V"]).stdout == PROXY_VERSION
        assert container.exec(["fusermount", "-V"]).stdout == PROXY_VERSION
        assert container.exec(["/usr/bin/fusermount3.distrib", "-V"]).stdout != PROXY_VERSION
        assert "Status: install ok installed" in container.exec(["dpkg", "--status", "fuse3"]).stdout
        check_probe(container, "/home/user/mnt")


def test_the_helper_of_libfuse_2_that_is_installed_later_is_put_beside_the_proxy(build: Build, broker: Broker) -> None:
    lines = FOR_DPKG.replace(" in ", " in /bin/fusermount ", 1)
    image = build(image_tag(WITHOUT_FUSE), f"{lines}RUN {INSTALL_FUSE.replace('fuse3', 'fuse')}\n")
    with Container(image, options=options(broker, USER)) as container:
        assert container.exec(["fusermount", "-V"]).stdout == PROXY_VERSION
        assert container.exec(["/usr/bin/fusermount.distrib", "-V"]).stdout != PROXY_VERSION
        assert "Status: install ok installed" in container.exec(["dpkg", "--status", "fuse"]).stdout


def test_mergerfs_that_is_installed_later_uses_the_proxy(build: Build, broker: Broker) -> None:
    install = "apt-get install --quiet --yes /packages/mergerfs_*.deb"
    image = build(image_tag(WITHOUT_MERGERFS), f"{FOR_DPKG}RUN {install}\n")
    with Container(image, options=options(broker, USER)) as container:
        assert container.exec(["mergerfs-fusermount", "-V"]).stdout == PROXY_VERSION
        assert container.exec(["/usr/bin/mergerfs-fusermount.distrib", "-V"]).stdout != PROXY_VERSION
        use_mergerfs(container, "/home/user/mnt")


def test_without_the_diversion_fuse3_replaces_the_proxy_and_mounting_fails(build: Build, broker: Broker) -> None:
    diverting, copying = FOR_DPKG.split("COPY", 1)
    assert "dpkg-divert" in diverting
    image = build(image_tag(WITHOUT_FUSE), f"COPY{copying}RUN {INSTALL_FUSE}\n")
    with Container(image, options=options(broker, USER, PROBE)) as container:
        assert container.exec(["fusermount3", "-V"]).stdout != PROXY_VERSION
        result = container.exec(["whoamifs", "--probe", "/home/user/mnt"], check=False)
        assert result.returncode == 1
        assert "fusermount3: mount failed: Operation not permitted" in result.stderr


def test_an_image_without_dpkg(build: Build, broker: Broker) -> None:
    image = build(image_tag(BUSYBOX), FOR_OTHERS)
    with Container(image, options=options(broker, USER, PROBE)) as container:
        for name in ("fusermount", "mergerfs-fusermount"):
            assert container.exec([name, "-V"]).stdout == PROXY_VERSION
        check_probe(container, "/home/user/mnt")


def test_an_image_for_pods(build: Build, broker: Broker) -> None:
    """The image of the lab has the contents of the first two lines: Debian, sshfs, and a user."""
    base, install, *lines = FOR_PODS.splitlines(keepends=True)
    assert base.startswith("FROM debian:") and "sshfs" in install and "useradd --uid 1000 user" in install
    image = build(image_tag(SSHFS), "".join(lines))
    with Container(image, options=options(broker, USER)) as container:
        assert container.exec(["fuse-starter", "-h"]).stdout.startswith("fuse-starter [options]")
        use_sshfs(container, "/home/user/mnt")


def test_an_image_without_a_shell(build: Build, broker: Broker, tmp_path: Path) -> None:
    shutil.copy(whoamifs(), tmp_path / "program")
    image = build("scratch", f"{FOR_NO_SHELL}COPY program /usr/bin/whoamifs\nWORKDIR /mnt\n")
    command = ["/usr/bin/whoamifs", "--pause"]
    with Container(image, command, options(broker, None)) as container:
        check_probe(container, "/mnt")
