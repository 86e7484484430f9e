"""Unmodified FUSE programs of each kind mount, read, write and unmount as usual, as a plain user."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import has_ended_all, wait_until
from tests.lab.images import DEBIAN, SSHFS, image_tag
from tests.lab.podman import Volume
from tests.lab.programs import SOURCES
from tests.lab.sshd import sshd_for

if TYPE_CHECKING:
    from subprocess import Popen

    from tests.e2e.conftest import Start
    from tests.lab.podman import Container

pytestmark = pytest.mark.e2e

USER = "1000:1000"
MOUNTPOINT = "/home/user/mnt"


def run_program(container: Container, argv: list[str]) -> Popen[str]:
    """Start a program in the foreground; return when it has mounted."""
    program = container.start(argv)
    wait_until(lambda: container.fuse_mounts(MOUNTPOINT) or program.poll() is not None)
    assert program.poll() is None, program.communicate()
    return program


def check_read_and_write(container: Container, directory: str = MOUNTPOINT) -> None:
    """Write a file, read it, list it with its owner, and remove it."""
    content = "line\n" * 10_000
    container.exec(["sh", "-c", f"cat > {directory}/new"], input=content)
    assert container.exec(["cat", f"{directory}/new"]).stdout == content
    assert "new\n" in container.exec(["ls", directory]).stdout
    container.exec(["mv", f"{directory}/new", f"{directory}/renamed"])
    container.exec(["rm", f"{directory}/renamed"])


def unmount(container: Container, argv: tuple[str, ...] = ("fusermount3", "-u", MOUNTPOINT)) -> None:
    """Unmount as the program's manual says, and check that it exits silently."""
    result = container.exec(argv)
    assert (result.stdout, result.stderr) == ("", "")
    assert container.fuse_mounts() == []


@pytest.mark.parametrize("background", [False, True], ids=["in the foreground", "in the background"])
@pytest.mark.parametrize("user_namespace", [False, True], ids=["", "in a user namespace"])
def test_sshfs(background: bool, user_namespace: bool, start: Start) -> None:
    container = start(image_tag(SSHFS), user=USER, user_namespace=user_namespace)
    with sshd_for(container) as sshd:
        sshd.authorize(container)
        (sshd.export / "file").write_text("of the server\n")
        argv = ["sshfs", *sshd.sshfs_arguments(), MOUNTPOINT]
        if background:
            container.exec(argv)
        else:
            run_program(container, [*argv, "-f"])

        (mount,) = container.fuse_mounts(MOUNTPOINT)
        assert (mount.fstype, mount.source) == ("fuse.sshfs", f"lab:{sshd.export}")
        assert container.exec(["cat", f"{MOUNTPOINT}/file"]).stdout == "of the server\n"
        check_read_and_write(container)
        container.exec(["sh", "-c", f"echo of the client > {MOUNTPOINT}/other"])
        assert (sshd.export / "other").read_text() == "of the client\n"
        unmount(container)
        wait_until(lambda: has_ended_all(container))


def test_sshfs_as_root_of_the_container(start: Start) -> None:
    container = start(image_tag(SSHFS))
    with sshd_for(container) as sshd:
        sshd.authorize(container)
        container.exec(["sshfs", *sshd.sshfs_arguments(), "/mnt"])
        check_read_and_write(container, "/mnt")
        container.exec(["fusermount3", "-u", "/mnt"])
        wait_until(lambda: has_ended_all(container))


def test_rclone_which_is_written_in_go(start: Start) -> None:
    container = start(image_tag(DEBIAN), user=USER)
    container.exec(["sh", "-c", "mkdir /tmp/source && echo there > /tmp/source/file"])
    program = run_program(container, ["rclone", "mount", "--vfs-cache-mode=writes", "/tmp/source", MOUNTPOINT])
    (mount,) = container.fuse_mounts()
    assert mount.fstype == "fuse.rclone"
    assert container.exec(["cat", f"{MOUNTPOINT}/file"]).stdout == "there\n"
    check_read_and_write(container)
    unmount(container)
    assert program.wait(timeout=20) == 0


def test_archivemount_which_uses_libfuse_2(start: Start) -> None:
    container = start(image_tag(DEBIAN), user=USER)
    container.exec(["sh", "-c", "cd /tmp && echo there > file && tar -cf archive.tar file"])
    program = run_program(container, ["archivemount", "-f", "-o", "nobackup", "/tmp/archive.tar", MOUNTPOINT])
    assert container.exec(["cat", f"{MOUNTPOINT}/file"]).stdout == "there\n"
    container.exec(["sh", "-c", f"echo new > {MOUNTPOINT}/new"])
    assert container.exec(["cat", f"{MOUNTPOINT}/new"]).stdout == "new\n"
    unmount(container, ("fusermount", "-u", MOUNTPOINT))
    assert program.wait(timeout=20) == 0
    assert container.exec(["tar", "-xOf", "/tmp/archive.tar", "new"]).stdout == "new\n"


def test_a_program_in_python_with_pyfuse3(start: Start) -> None:
    container = start(image_tag(DEBIAN), user=USER, volumes=(Volume(SOURCES / "whoami_pyfuse3.py", "/opt/whoami.py"),))
    program = run_program(container, ["python3", "/opt/whoami.py", MOUNTPOINT])
    said = container.exec(["sh", "-c", f'read -r seen < {MOUNTPOINT}/whoami; echo "$$ $seen"']).stdout
    assert re.fullmatch(r"(\d+) uid=1000 gid=1000 pid=\1\n", said)
    unmount(container)
    assert program.wait(timeout=20) == 0


def test_bindfs(start: Start) -> None:
    container = start(image_tag(DEBIAN), user=USER)
    container.exec(["sh", "-c", "mkdir /tmp/source && echo there > /tmp/source/file"])
    container.exec(["bindfs", "--no-allow-other", "/tmp/source", MOUNTPOINT])
    assert container.exec(["cat", f"{MOUNTPOINT}/file"]).stdout == "there\n"
    check_read_and_write(container)
    unmount(container)
    wait_until(lambda: has_ended_all(container))
