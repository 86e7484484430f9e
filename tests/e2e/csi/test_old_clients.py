"""Images and manifests made for meta-fuse-csi-plugin work unchanged, and so do new ones beside them.

The clients are a stand-in (tests/programs/oldclient.c): the originals are not available where only packages are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import settle, wait_until
from tests.e2e.csi.conftest import CONFIGURATION
from tests.e2e.csi.pods import (
    DATA,
    OWN_MOUNTPOINT,
    SOCKET,
    SOCKETS,
    consumer,
    kill,
    pod,
    read,
    serve,
    starter,
    wait_for_volume,
)
from tests.lab.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.kubelet import Images, Kubelet

pytestmark = pytest.mark.e2e

OLD_DRIVER = "meta-fuse-csi-plugin.csi.storage.pfn.io"
NAMES = {"fdPassingEmptyDirName": SOCKETS, "fdPassingSocketName": SOCKET}
COMMANDS = {
    "fusermount3-proxy": serve(),
    "fuse-starter": f"exec fuse-starter --fd-passing-socket-path /sockets/{SOCKET} -- hello_ll -f /dev/fd/3",
}


@pytest.fixture(scope="module")
def old_kubelet(images: Images) -> Iterator[Kubelet]:
    """The kubelet of a cluster in which the driver has the name of the old one."""
    with Cluster(OLD_DRIVER, images, CONFIGURATION) as cluster:
        settle(cluster.broker)
        yield cluster.kubelet
        assert cluster.kubelet.left() == []


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
def test_an_old_client(old_kubelet: Kubelet, command: str) -> None:
    spec = pod(
        [consumer(mount={"readOnly": True}), starter(command, image="old")],
        driver=OLD_DRIVER,
        attributes=NAMES,
        read_only=True,
    )
    with old_kubelet.pod(spec) as running:
        wait_for_volume(running)
        assert read(running) == "hello\n"
        said = running["consumer"].exec(["sh", "-c", f"echo > {DATA}/hello"], check=False)
        assert "Read-only file system" in said.stderr
        assert running["starter"].fuse_mounts() == []


def test_an_old_client_that_was_killed_is_served_again(old_kubelet: Kubelet) -> None:
    spec = pod([consumer(), starter(serve(), image="old")], driver=OLD_DRIVER, attributes=NAMES)
    with old_kubelet.pod(spec) as running:
        wait_for_volume(running)
        for restarts in (1, 2, 3):
            kill(running)
            running.wait_until_restarted("starter", restarts)
            wait_until(lambda: "hello" in running["consumer"].exec(["cat", f"{DATA}/hello"], check=False).stdout)


def test_a_new_client_with_an_old_manifest(old_kubelet: Kubelet) -> None:
    with old_kubelet.pod(pod([consumer(), starter(serve())], driver=OLD_DRIVER, attributes=NAMES)) as running:
        wait_for_volume(running)
        assert read(running) == "hello\n"
        assert running["starter"].fuse_mounts(OWN_MOUNTPOINT)


def test_an_old_client_with_the_new_driver_when_the_volume_says_so(kubelet: Kubelet) -> None:
    spec = pod([consumer(), starter(serve(), image="old")], attributes={"oldClients": "true"})
    with kubelet.pod(spec) as running:
        wait_for_volume(running)
        assert read(running) == "hello\n"
