"""A test of unmodified mergerfs in a prepared container."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.e2e.conftest import has_ended_all, wait_until

if TYPE_CHECKING:
    from tests.lab.podman import Container


def use_mergerfs(container: Container, mountpoint: str, *prefix: str) -> None:
    """Merge two directories with mergerfs, read and write there, and unmount; `prefix` precedes its commands."""
    container.exec(["sh", "-c", "mkdir /tmp/one /tmp/two && echo there > /tmp/one/file"])
    container.exec([*prefix, "mergerfs", "/tmp/one:/tmp/two", mountpoint])
    assert [mount.fstype for mount in container.fuse_mounts(mountpoint)] == ["fuse.mergerfs"]
    assert container.exec(["cat", f"{mountpoint}/file"]).stdout == "there\n"
    container.exec(["sh", "-c", f"echo new > {mountpoint}/new && cat /tmp/one/new || cat /tmp/two/new"])
    container.exec([*prefix, "mergerfs-fusermount", "-u", mountpoint])
    assert container.fuse_mounts() == []
    wait_until(lambda: has_ended_all(container))
