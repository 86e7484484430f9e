"""sshfs from mount to unmount, for tests of the ways in which a container gets the proxy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.e2e.conftest import has_ended_all, wait_until
from tests.lab.sshd import client_files, sshd_for

if TYPE_CHECKING:
    from tests.lab.podman import Container
    from tests.lab.sshd import Sshd


def introduce(sshd: Sshd, container: Container, user: str, host: str) -> None:
    """Configure ssh of this user of the container to reach the server under the name `host`."""
    home = "/root" if user == "root" else f"/home/{user}"
    script = 'umask 077 && mkdir -p "$1" && cat > "$1/$2"'
    for name, content in client_files(sshd.directory, host, f"{home}/.ssh").items():
        container.exec(["sh", "-c", script, "sh", f"{home}/.ssh", name], user=user, input=content)


def use_sshfs(container: Container, mountpoint: str) -> None:
    """Mount with sshfs, write and read, and unmount with `fusermount3 -u`."""
    with sshd_for(container) as sshd:
        sshd.authorize(container)
        (sshd.export / "file").write_text("of the server\n")
        container.exec(["sshfs", *sshd.sshfs_arguments(), mountpoint])
        assert [mount.fstype for mount in container.fuse_mounts(mountpoint)] == ["fuse.sshfs"]
        assert container.exec(["cat", f"{mountpoint}/file"]).stdout == "of the server\n"
        container.exec(["sh", "-c", f"echo of the client > {mountpoint}/other"])
        assert (sshd.export / "other").read_text() == "of the client\n"
        container.exec(["fusermount3", "-u", mountpoint])
        wait_until(lambda: has_ended_all(container))
    assert container.fuse_mounts() == []
