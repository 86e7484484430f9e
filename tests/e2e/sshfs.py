"""sshfs from mount to unmount, for tests of how a container comes by the proxy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.e2e.conftest import has_ended_all, wait_until
from tests.lab.sshd import sshd_for

if TYPE_CHECKING:
    from tests.lab.podman import Container


def use_sshfs(container: Container, mountpoint: str) -> None:
    """Mount with sshfs, write and read, and unmount with the command that people know."""
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
