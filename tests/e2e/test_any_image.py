"""Unprepared images: they need nothing but the command lines in docs/containers.md and the README.

Podman runs the command lines for Docker, which is not available here; the options are the same.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from fusermount3_broker.injection.cdi import DEVICE
from tests.e2e.conftest import has_ended_all, wait_until
from tests.e2e.documented import PAGES, known_to_engines, options_of, with_paths_of
from tests.e2e.mergerfs import use_mergerfs
from tests.e2e.sshfs import use_sshfs
from tests.lab.broker import Broker
from tests.lab.images import DEBIAN, INSTALL_FUSE, MERGERFS, SSHFS, WITHOUT_FUSE, image_tag, scratch_tag
from tests.lab.podman import Container, Options
from tests.lab.programs import Variant, whoamifs

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.e2e

USER = "1000:1000"
PROXY_VERSION = "fusermount3 version: 3.18.2\n"


@pytest.fixture
def by_cdi(broker: Broker) -> Iterator[list[str]]:
    """The options as documented for CDI, with the device registered with the container engines of this host."""
    with known_to_engines(broker):
        yield options_of("podman run --device")


@pytest.fixture
def by_volumes(broker: Broker) -> list[str]:
    """The options as documented for Docker, with the host paths of the test."""
    return with_paths_of(broker, options_of("docker run"))


@pytest.fixture(params=["by_cdi", "by_volumes"])
def given(request: pytest.FixtureRequest) -> list[str]:
    """The options that a container needs."""
    options: list[str] = request.getfixturevalue(request.param)
    return options


@pytest.mark.parametrize("user_namespace", [False, True], ids=["", "in a user namespace"])
@pytest.mark.parametrize(("user", "mountpoint"), [("0:0", "/mnt"), (USER, "/home/user/mnt")], ids=["root", "a user"])
def test_sshfs_of_an_untouched_debian_mounts_as(
    user: str, mountpoint: str, user_namespace: bool, given: list[str]
) -> None:
    options = Options(user=user, user_namespace=user_namespace, extra=given)
    with Container(image_tag(SSHFS), options=options) as container:
        use_sshfs(container, mountpoint)


def test_sshfs_mounts_with_the_command_line_of_the_readme(by_readme: list[str]) -> None:
    with Container(image_tag(SSHFS), options=Options(user=USER, extra=by_readme)) as container:
        use_sshfs(container, "/home/user/mnt")


def test_the_helper_of_the_image_is_covered_and_not_changed(given: list[str]) -> None:
    def version(options: Options) -> str:
        with Container(image_tag(SSHFS), options=options) as container:
            return container.exec(["fusermount3", "-V"]).stdout

    genuine = version(Options())
    assert version(Options(extra=given)) == PROXY_VERSION != genuine
    assert version(Options()) == genuine


@pytest.fixture
def given_to_mergerfs(request: pytest.FixtureRequest, given: list[str]) -> list[str]:
    """The options in `given`, with the additional option of the documented command line if that needs it."""
    if request.node.callspec.params["given"] == "by_cdi":
        return given
    (option,) = re.findall(r"`(-v \S+:/usr/bin/mergerfs-fusermount:ro)`", PAGES["containers.md"].read_text())
    return [*given, *with_paths_of(request.getfixturevalue("broker"), option.split())]


@pytest.mark.parametrize(("user", "mountpoint"), [("0:0", "/mnt"), (USER, "/home/user/mnt")], ids=["root", "a user"])
def test_mergerfs_of_an_untouched_debian_mounts_as(user: str, mountpoint: str, given_to_mergerfs: list[str]) -> None:
    with Container(image_tag(MERGERFS), options=Options(user=user, extra=given_to_mergerfs)) as container:
        use_mergerfs(container, mountpoint)


@pytest.fixture
def by_readme(broker: Broker) -> list[str]:
    return with_paths_of(broker, options_of("podman run -v", "README.md"))


@pytest.mark.parametrize("way", ["by_cdi", "by_volumes", "by_readme"])
def test_a_program_on_libfuse_2_mounts_too(way: str, request: pytest.FixtureRequest) -> None:
    options = Options(user=USER, extra=request.getfixturevalue(way))
    with Container(image_tag(DEBIAN), options=options) as container:
        container.exec(["sh", "-c", "cd /tmp && echo there > file && tar -cf archive.tar file"])
        container.exec(["archivemount", "-o", "nobackup", "/tmp/archive.tar", "/home/user/mnt"])
        assert container.exec(["cat", "/home/user/mnt/file"]).stdout == "there\n"
        container.exec(["fusermount", "-u", "/home/user/mnt"])
        wait_until(lambda: has_ended_all(container))


@pytest.mark.parametrize("read_only", [False, True], ids=["", "with a read-only root directory"])
def test_an_image_of_one_file_and_no_directories_of_the_system(read_only: bool, given: list[str]) -> None:
    tag = scratch_tag({"/program": (whoamifs(Variant.FUSE3_STATIC), 0o755)})
    extra = [*given, *(["--tmpfs", "/mnt"] if read_only else [])]
    options = Options(user=USER, read_only=read_only, extra=extra)
    with Container(tag, ["/program", "--pause"], options) as container:
        result = container.exec(["/program", "--probe", "/mnt"], check=False)
        assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "ok=yes"), result.stdout + result.stderr


def test_a_program_on_libfuse_2_finds_its_helper_with_the_command_line_of_the_readme(by_readme: list[str]) -> None:
    """The image has no fusermount; the link of that name in Debian's fuse3 would suffice."""
    tag = scratch_tag({"/program": (whoamifs(Variant.FUSE2_STATIC), 0o755)})
    with Container(tag, ["/program", "--pause"], Options(user=USER, extra=by_readme)) as container:
        result = container.exec(["/program", "--probe", "/mnt"], check=False)
        assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "ok=yes"), result.stdout + result.stderr


@pytest.mark.parametrize("path", ["/usr/bin/fusermount3", "/run/fusermount3-proxy", "/dev/fuse"])
def test_not_even_root_of_a_container_can_change_what_it_was_given(path: str, given: list[str]) -> None:
    with Container(image_tag(SSHFS), options=Options(extra=given)) as container:
        result = container.exec(["chmod", "0700", path], check=False)
        assert (result.returncode, "Read-only file system" in result.stderr) == (1, True), result


def test_a_package_manager_does_not_replace_the_proxy(given: list[str]) -> None:
    with Container(image_tag(WITHOUT_FUSE), options=Options(extra=given)) as container:
        result = container.exec(["sh", "-c", INSTALL_FUSE], check=False)
        assert result.returncode != 0
        assert "before installing new version: Invalid cross-device link" in result.stdout
        assert container.exec(["fusermount3", "-V"]).stdout == PROXY_VERSION


def test_the_device_has_the_name_that_the_document_says() -> None:
    assert options_of("podman run --device") == ["--device", DEVICE]
