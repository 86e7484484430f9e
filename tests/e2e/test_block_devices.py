"""Devices that one pod offers and volumes of other pods get: a test commands the real mounter, as the front does."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import stat
from typing import TYPE_CHECKING

import pytest

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.messages import mounter
from fusermount3_proxy import wire
from tests.e2e import volumes
from tests.e2e.hostile import in_private_namespace
from tests.e2e.owned_front import PATIENCE, process_that
from tests.e2e.volumes import a_volume, mount_fusectl
from tests.lab import loop, tinyfuse
from tests.lab.forked import ending_afterwards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.e2e.owned_front import OwnedFront
    from tests.e2e.volumes import Volume

pytestmark = pytest.mark.e2e

#: How the test program opens a device.
READ_WRITE = os.O_RDWR


@contextlib.contextmanager
def program(volume: Volume, path: Path | None, flags: int = READ_WRITE, *, in_pod: bool = True) -> Iterator[list[int]]:
    """Run a program in the volume's pod that has sent a descriptor of a file; yield its connection and pidfd."""

    def call(address: str) -> None:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        if in_pod:
            volume.enter_pod()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(address)
        sent = [os.open(path, flags)] if path else []
        socket.send_fds(connection, [wire.encode_request(wire.DeviceRequest())], sent)
        signal.pause()

    with process_that(call) as connected:
        yield [*connected]


def offer(front: OwnedFront, source: Volume, caller: list[int]) -> tuple[mounter.Record, list[int]]:
    """Have the mounter look at what the program has sent; return its answer, with the node."""
    start = mounter.StartOffer(PATIENCE, source.relative(source.target))
    conversation = front.begin(start, *caller)
    try:
        return conversation.hear_with_descriptors()
    finally:
        conversation.close()


def offered(front: OwnedFront, source: Volume, path: Path, flags: int = READ_WRITE) -> int:
    """Return the node of a device that a program of the pod has offered."""
    with program(source, path, flags) as caller:
        said, nodes = offer(front, source, caller)
    assert said == mounter.Offered(path.stat().st_rdev, loop.SIZE, flags == os.O_RDONLY)
    (node,) = nodes
    return node


class BlockVolume:
    """A block volume of another pod, whose directory kubelet has made."""

    def __init__(self, kubelet: Path) -> None:
        self.target = kubelet / "plugins/kubernetes.io/csi/volumeDevices/publish/pv/7e3c"
        self.path = bytes(self.target.relative_to(kubelet))
        self.target.parent.mkdir(parents=True)

    def lend(self, front: OwnedFront, source: Volume, node: int, *, read_only: bool = False) -> mounter.Record | None:
        start = mounter.StartLend(PATIENCE, source.relative(source.target), self.path, read_only)
        return front.begin(start, node).hear()

    def state(self, front: OwnedFront) -> mounter.Stated:
        said = front.begin(mounter.StartStat(PATIENCE, self.path)).hear()
        assert isinstance(said, mounter.Stated)
        return said

    def unpublish(self, front: OwnedFront) -> None:
        start = mounter.StartUnpublish(PATIENCE, self.path, b"", b"", b"", borrowed=True)
        assert front.begin(start).hear() == mounter.Unpublished()

    def read(self) -> bytes:
        with self.target.open("rb") as file:
            return file.read(5)


def with_disk(directory: Path, body: Callable[[OwnedFront, Volume, BlockVolume, Path], None]) -> None:
    """Run `body` in a private mount namespace: with a mounter, the volume of a mount pod, a block volume, a device."""

    def in_namespace() -> None:
        kubelet = directory / "kubelet"
        kubelet.mkdir()
        mount_fusectl()
        with a_volume(kubelet) as (front, source), loop.device(directory / "disk") as path:
            for each in volumes.publish(front, source, shared=True):
                os.close(each)
            block = BlockVolume(kubelet)
            body(front, source, block, path)
            block.unpublish(front)
            assert not block.target.exists()

    in_private_namespace(in_namespace)


def test_a_volume_is_the_device_that_the_pod_has_opened(tmp_path: Path) -> None:
    def body(front: OwnedFront, source: Volume, block: BlockVolume, path: Path) -> None:
        node = offered(front, source, path)
        assert block.lend(front, source, node) == mounter.Lent()
        found = block.target.stat()
        assert stat.S_ISBLK(found.st_mode)
        assert (found.st_rdev, stat.S_IMODE(found.st_mode), found.st_uid) == (path.stat().st_rdev, 0o600, 0)
        assert block.read() == b"hello"
        with block.target.open("r+b", buffering=0) as file:
            file.write(b"world")
            os.fsync(file.fileno())
        assert (tmp_path / "disk").read_bytes()[:5] == b"world"
        assert block.state(front) == mounter.Stated(True, True, 0, loop.SIZE, 0, 0, 0, 0)
        assert block.lend(front, source, node) == mounter.Lent(), "again"
        block.unpublish(front)
        assert not block.target.exists()
        assert not block.state(front).published

    with_disk(tmp_path, body)


def test_what_was_opened_for_reading_is_for_readers(tmp_path: Path) -> None:
    def body(front: OwnedFront, source: Volume, block: BlockVolume, path: Path) -> None:
        node = offered(front, source, path, os.O_RDONLY)
        assert block.lend(front, source, node) == mounter.Failed(errno.EPERM, b"check the device")
        assert block.lend(front, source, node, read_only=True) == mounter.Lent()

    with_disk(tmp_path, body)


@pytest.mark.parametrize(
    ("what", "flags", "expected"),
    [
        ("device", os.O_PATH, errno.EBADF),
        ("device", os.O_WRONLY, errno.EBADF),
        ("file", os.O_RDWR, errno.ENOTBLK),
        ("/dev/null", os.O_RDWR, errno.ENOTBLK),
    ],
)
def test_what_proves_no_right_to_a_device_is_refused(what: str, flags: int, expected: int, tmp_path: Path) -> None:
    def body(front: OwnedFront, source: Volume, _: BlockVolume, path: Path) -> None:
        sent = {"device": path, "file": tmp_path / "disk"}.get(what, tmp_path.__class__(what))
        with program(source, sent, flags) as caller:
            said, nodes = offer(front, source, caller)
        assert (said, nodes) == (mounter.Failed(expected, b"look at the device"), [])

    with_disk(tmp_path, body)


def test_the_program_sends_one_descriptor_and_is_in_the_pod(tmp_path: Path) -> None:
    def body(front: OwnedFront, source: Volume, _: BlockVolume, path: Path) -> None:
        with program(source, None) as caller:
            assert offer(front, source, caller) == (mounter.BadDescriptors(0), [])
        with program(source, path, in_pod=False) as caller:
            assert offer(front, source, caller) == (mounter.Failed(errno.EPERM, b"identify the caller"), [])
        front.check()

    with_disk(tmp_path, body)


def test_a_front_that_lies_about_an_offer_is_refused(tmp_path: Path) -> None:
    """It has no node of the mounter's for the device, or one for another volume, or names another place."""

    def body(front: OwnedFront, source: Volume, block: BlockVolume, path: Path) -> None:
        refused = mounter.Failed(errno.EPERM, b"check the device")
        node = offered(front, source, path)
        for other in (path, tmp_path / "disk"):
            forged = os.open(other, os.O_PATH)
            assert block.lend(front, source, forged) == refused
            os.close(forged)
        neighbour = source.beside()
        assert block.lend(front, neighbour, node) == refused
        start = mounter.StartLend(PATIENCE, source.relative(source.target), source.relative(source.target), False)
        assert front.begin(start, node).hear() == refused
        assert not block.target.exists()

    with_disk(tmp_path, body)


def test_a_fuse_program_that_forges_the_attributes_of_a_node_is_not_believed(tmp_path: Path) -> None:
    """It answers for all attributes of its filesystem, also for those that only root may set elsewhere."""

    def body(front: OwnedFront, source: Volume, block: BlockVolume, path: Path) -> None:
        said = b"0 0 " + source.relative(source.target)
        place = tmp_path / "forged"
        place.mkdir()
        fuse = os.open("/dev/fuse", os.O_RDWR)
        data = b"fd=%d,rootmode=40000,user_id=0,group_id=0" % fuse
        syscalls.mount(b"forged", bytes(place), b"fuse", 0, data)
        if (server := os.fork()) == 0:
            with ending_afterwards():
                syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
                tinyfuse.serve_a_node(fuse, path.stat().st_rdev, said)
        os.close(fuse)
        forged = os.open(place / os.fsdecode(tinyfuse.NAME), os.O_PATH)
        try:
            assert os.fstat(forged).st_rdev == path.stat().st_rdev
            assert os.getxattr(f"/proc/self/fd/{forged}", "trusted.fusermount3-broker.device") == said
            assert block.lend(front, source, forged) == mounter.Failed(errno.EPERM, b"check the device")
        finally:
            os.close(forged)
            syscalls.umount2(bytes(place), syscalls.MNT_DETACH)
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)

    with_disk(tmp_path, body)


def test_another_disk_with_the_same_number_is_not_given(tmp_path: Path) -> None:
    def body(front: OwnedFront, source: Volume, block: BlockVolume, path: Path) -> None:
        node = offered(front, source, path)
        assert block.lend(front, source, node) == mounter.Lent()
        loop.detach(path)
        (tmp_path / "secret").write_bytes(bytes(loop.SIZE))
        loop.attach(tmp_path / "secret", path)
        said = block.state(front)
        assert (said.published, said.served, said.errno) == (True, False, errno.ENODEV)
        assert block.lend(front, source, node) == mounter.Failed(errno.ENOENT, b"look at the device")

    with_disk(tmp_path, body)


def test_what_is_not_the_brokers_stays(tmp_path: Path) -> None:
    def body(front: OwnedFront, source: Volume, block: BlockVolume, path: Path) -> None:
        node = offered(front, source, path)
        block.target.write_text("somebody's")
        assert block.lend(front, source, node) == mounter.Failed(errno.EEXIST, b"make the target")
        block.unpublish(front)
        assert block.target.read_text() == "somebody's"
        block.target.unlink()

    with_disk(tmp_path, body)


def test_a_volume_that_is_not_shared_offers_nothing(tmp_path: Path) -> None:
    def body(front: OwnedFront, source: Volume, _: BlockVolume, path: Path) -> None:
        neighbour = source.beside()
        for each in volumes.publish(front, neighbour):
            os.close(each)
        with program(neighbour, path) as caller:
            assert offer(front, neighbour, caller) == (mounter.Failed(errno.EPERM, b"open the volume"), [])
        volumes.unpublish(front, neighbour)
        neighbour.cgroups.remove()

    with_disk(tmp_path, body)
