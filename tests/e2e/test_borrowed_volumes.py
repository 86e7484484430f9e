"""Volumes that have the filesystem of another pod's volume: a test commands the real mounter, as the front does."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fusermount3_broker.messages import mounter
from tests.e2e.hostile import in_private_namespace
from tests.e2e.owned_front import PATIENCE
from tests.e2e.test_locked_flags import is_locked
from tests.e2e.volumes import Program, a_volume, mount_fusectl, publish, serve, stat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.owned_front import OwnedFront
    from tests.e2e.volumes import Volume

pytestmark = pytest.mark.e2e


@contextlib.contextmanager
def borrower_beside(front: OwnedFront, source: Volume) -> Iterator[Volume]:
    """Yield a volume of another pod that has nothing yet; remove it when the block ends."""
    volume = source.beside()
    try:
        yield volume
        give_back(front, volume)
        assert not volume.target.exists()
    finally:
        volume.cgroups.remove()


def with_borrowers(directory: Path, body: Callable[[OwnedFront, Volume, Volume, Volume], None]) -> None:
    """Run `body` in a private mount namespace, with a mounter, a published volume, and two that borrow from it."""

    def in_namespace() -> None:
        kubelet = directory / "kubelet"
        kubelet.mkdir()
        mount_fusectl()
        with (
            a_volume(kubelet) as (front, source),
            borrower_beside(front, source) as one,
            borrower_beside(front, source) as two,
        ):
            for each in publish(front, source, shared=True):
                os.close(each)
            body(front, source, one, two)

    in_private_namespace(in_namespace)


def start_borrow(source: Volume, target: Volume, *, read_only: bool = False) -> mounter.StartBorrow:
    device = os.minor(number_of(source))
    connection = Path(f"/sys/fs/fuse/connections/{device}").stat().st_ino
    return mounter.StartBorrow(
        PATIENCE, source.relative(source.target), device, connection, target.relative(target.target), read_only, b""
    )


def number_of(volume: Volume) -> int:
    """Return the device number of the filesystem at the target, without asking it."""
    major, _, minor = volume.mounts()[-1].device.partition(":")
    return os.makedev(int(major), int(minor))


def borrow(front: OwnedFront, start: mounter.StartBorrow) -> mounter.Record | None:
    return front.begin(start).hear()


def give_back(front: OwnedFront, volume: Volume) -> None:
    start = mounter.StartUnpublish(PATIENCE, volume.relative(volume.target), b"", b"", b"", borrowed=True)
    said = front.begin(start).hear()
    assert said == mounter.Unpublished(), said


def test_all_have_one_filesystem_and_each_its_own_rights(tmp_path: Path) -> None:
    def body(front: OwnedFront, source: Volume, one: Volume, two: Volume) -> None:
        program = serve(front, source)
        start = start_borrow(source, one)
        assert borrow(front, start) == mounter.Borrowed(start.device, True)
        assert borrow(front, start_borrow(source, two, read_only=True)) == mounter.Borrowed(start.device, True)
        assert {each.file.stat().st_dev for each in (source, one, two)} == {number_of(source)}
        assert one.file.read_bytes() == two.file.read_bytes() == b"hello"
        for volume, expected in ((source, "not implemented"), (one, "not implemented"), (two, "Read-only")):
            with pytest.raises(OSError) as caught:
                (volume.target / "new").mkdir()
            assert (caught.value.errno == errno.EROFS) == (expected == "Read-only")
        assert {"nosuid", "nodev"} <= one.mounts()[-1].options
        assert borrow(front, start) == mounter.Borrowed(start.device, False), "it has it already"
        assert one.types() == ["tmpfs", "fuse"]
        give_back(front, two)
        assert one.file.read_bytes() == source.file.read_bytes() == b"hello"
        program.kill()

    with_borrowers(tmp_path, body)


@pytest.mark.parametrize("read_only", [False, True])
def test_nobody_can_clear_nosuid_and_nodev(read_only: bool, tmp_path: Path) -> None:
    def body(front: OwnedFront, source: Volume, one: Volume, _: Volume) -> None:
        program = serve(front, source)
        borrow(front, start_borrow(source, one, read_only=read_only))
        assert is_locked(one.target)
        program.kill()

    with_borrowers(tmp_path, body)


def test_a_volume_that_is_removed_while_the_program_hangs_takes_nothing_from_the_others(tmp_path: Path) -> None:
    def body(front: OwnedFront, source: Volume, one: Volume, two: Volume) -> None:
        program = serve(front, source)
        for each in (one, two):
            borrow(front, start_borrow(source, each))
        os.kill(program.pid, signal.SIGSTOP)
        read: list[bytes] = []
        reader = threading.Thread(target=lambda: read.append(one.file.read_bytes()))
        reader.start()
        time.sleep(1.5)  # longer than the requests of what may be aborted wait
        begun = time.monotonic()
        give_back(front, two)
        assert time.monotonic() - begun < 10
        assert not two.target.exists()
        os.kill(program.pid, signal.SIGCONT)
        reader.join(10)
        assert read == [b"hello"]
        program.kill()

    with_borrowers(tmp_path, body)


def test_the_last_that_has_the_filesystem_does_not_wait_for_a_program_that_hangs(tmp_path: Path) -> None:
    def body(front: OwnedFront, source: Volume, one: Volume, _: Volume) -> None:
        program = serve(front, source)
        borrow(front, start_borrow(source, one))
        start = mounter.StartUnpublish(PATIENCE, source.relative(source.target), b"", b"", b"", borrowed=True)
        assert front.begin(start).hear() == mounter.Unpublished()
        os.kill(program.pid, signal.SIGSTOP)
        begun = time.monotonic()
        give_back(front, one)
        assert time.monotonic() - begun < 10
        os.kill(program.pid, signal.SIGCONT)
        program.kill()

    with_borrowers(tmp_path, body)


def test_the_next_program_takes_the_place_of_a_dead_one_for_all(tmp_path: Path) -> None:
    def body(front: OwnedFront, source: Volume, one: Volume, two: Volume) -> None:
        first = serve(front, source)
        borrow(front, start_borrow(source, one))
        borrow(front, start_borrow(source, two))
        first.kill()
        assert stat(front, one).errno == errno.ENOTCONN
        second = serve(front, source, b"next")
        start = start_borrow(source, one)
        assert borrow(front, start) == mounter.Borrowed(start.device, True)
        assert one.types() == ["tmpfs", "fuse"]
        said = front.begin(mounter.StartTombstone(PATIENCE, two.relative(two.target), os.minor(number_of(two)))).hear()
        assert said == mounter.TombstonePut(True)
        assert borrow(front, start_borrow(source, two)) == mounter.Borrowed(start.device, True)
        assert one.file.read_bytes() == two.file.read_bytes() == b"next"
        second.kill()

    with_borrowers(tmp_path, body)


def test_what_a_program_serves_is_not_taken_away(tmp_path: Path) -> None:
    def body(front: OwnedFront, source: Volume, one: Volume, other: Volume) -> None:
        old = serve(front, source, b"old")
        borrow(front, start_borrow(source, one))
        for each in publish(front, other, shared=True):
            os.close(each)
        new = serve(front, other, b"new")
        assert borrow(front, start_borrow(other, one)) == mounter.Borrowed(os.minor(number_of(source)), False)
        assert one.file.read_bytes() == b"old"
        old.kill()
        new.kill()

    with_borrowers(tmp_path, body)


@pytest.mark.parametrize("changed", ["device", "connection", "source"])
def test_only_the_filesystem_that_is_meant_is_given(changed: str, tmp_path: Path) -> None:
    def body(front: OwnedFront, source: Volume, one: Volume, _: Volume) -> None:
        program = serve(front, source)
        start = start_borrow(source, one)
        others = {
            "device": start._replace(device=start.device + 1),
            "connection": start._replace(connection=start.connection + 1),
            "source": start._replace(source=one.relative(one.target)),
        }
        said = borrow(front, others[changed])
        expected = errno.EPERM if changed == "source" else errno.ENOENT
        assert said == mounter.Failed(expected, b"open the filesystem of the mount pod")
        assert not one.target.exists()
        said = borrow(front, start._replace(target=b"pods/x/volumes/kubernetes.io~empty-dir/y/mount"))
        assert said == mounter.Failed(errno.EPERM, b"check the volume")
        program.kill()

    with_borrowers(tmp_path, body)


def test_a_program_in_a_user_namespace_cannot_serve_other_pods(tmp_path: Path) -> None:
    def body(front: OwnedFront, source: Volume, *_: Volume) -> None:
        program = Program(front, source, user_namespace=True)
        said = program.begin(shared=True).hear()
        assert said == mounter.Failed(errno.EPERM, b"share")
        assert source.types() == ["tmpfs"]
        program.kill()

    with_borrowers(tmp_path, body)


def test_a_front_that_lies_about_what_is_shared_is_refused(tmp_path: Path) -> None:
    """One that was taken over wants to give a pod's volume to another pod, and says only now that it is shared."""

    def body(front: OwnedFront, _: Volume, own: Volume, target: Volume) -> None:
        for shared in (False, True):
            for each in publish(front, own, shared=shared):
                os.close(each)
        program = serve(front, own)
        refused = mounter.Failed(errno.EPERM, b"open the filesystem of the mount pod")
        assert borrow(front, start_borrow(own, target)) == refused
        assert not target.target.exists()
        program.kill()

    with_borrowers(tmp_path, body)
