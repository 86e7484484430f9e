"""--sync-init: the FUSE program gets its descriptor first, and its mount when it is ready to serve.

libfuse 3.19, which requests this, is in no Debian release yet; so the test plays the FUSE program, with the kernel's
own FUSE_DEV_IOC_SYNC_INIT where available.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import threading
import time
from errno import EOPNOTSUPP
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import RunBroker
from tests.e2e.hostile import fuse_mounts, in_private_namespace
from tests.lab.broker import PROXY, Broker
from tests.lab.kernel import kernel_has, needs_kernel

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.e2e

FUSE_DEV_IOC_SYNC_INIT = 229 << 8 | 3
FUSE_INIT_REPLY = struct.pack("=IIIIHHIIHH28x", 7, 31, 65536, 0, 12, 9, 65536, 1, 0, 0)
EXCLUSIVE = "FSCONFIG_CMD_CREATE_EXCL"
READY = b"\0"


class FakeLibfuse319:
    """The part of libfuse 3.19, and of a FUSE program on it, that answers FUSE_INIT and nothing else."""

    def __init__(self, broker: Broker, mountpoint: Path, options: str = "rw,subtype=fake", *more: str) -> None:
        self.comm, theirs = socket.socketpair()
        self.comm.settimeout(20)
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            self.helper = subprocess.Popen(
                [PROXY, "--sync-init", "--comm-fd", str(theirs.fileno()), "-o", options, *more, "--", mountpoint],
                env={"FUSERMOUNT3PROXY_FDPASSING_SOCKPATH": str(broker.socket)},
                pass_fds=[theirs.fileno()],
                stderr=subprocess.PIPE,
                text=True,
            )
        _, descriptors, _, _ = socket.recv_fds(self.comm, 1, 1)
        self.descriptor = descriptors[0] if descriptors else -1

    def wait_for_init(self) -> bool:
        """Have the kernel's mount wait for FUSE_INIT; return whether the kernel can (Linux 6.18)."""
        try:
            fcntl.ioctl(self.descriptor, FUSE_DEV_IOC_SYNC_INIT)
        except OSError:
            return False
        return True

    def serve(self) -> threading.Thread:
        """Answer FUSE_INIT in a thread when it arrives."""
        thread = threading.Thread(target=self._answer_init, daemon=True)
        thread.start()
        return thread

    def _answer_init(self) -> None:
        while True:
            try:
                request = os.read(self.descriptor, 65536)
                break
            except PermissionError:  # not mounted yet
                time.sleep(0.01)
        unique = struct.unpack_from("=Q", request, 8)[0]
        os.write(self.descriptor, struct.pack("=IiQ", 16 + len(FUSE_INIT_REPLY), 0, unique) + FUSE_INIT_REPLY)

    def status(self) -> int | None:
        """Return the status that the helper sends, or None if it closes the socket instead."""
        data = self.comm.recv(8)
        return struct.unpack("=i", data)[0] if data else None

    def end(self) -> tuple[int, str]:
        """Release all descriptors; return the helper's exit status and its output."""
        self.comm.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
        _, said = self.helper.communicate(timeout=20)
        return self.helper.returncode, said


def test_it_is_mounted_when_the_fake_libfuse_is_ready_and_not_before(broker: Broker, tmp_path: Path) -> None:
    def body() -> None:
        program = FakeLibfuse319(broker, tmp_path)
        waits = program.wait_for_init()
        time.sleep(0.2)
        assert not fuse_mounts()
        if waits:
            program.serve()
        program.comm.send(READY)
        if not kernel_has(EXCLUSIVE):
            assert program.status() == -EOPNOTSUPP
            assert program.end()[0] == 1
            assert not fuse_mounts()
            return
        assert program.status() == 0
        assert [mount.fstype for mount in fuse_mounts()] == ["fuse.fake"]
        assert program.end() == (0, "")
        subprocess.run(["umount", "--lazy", tmp_path], check=True)

    in_private_namespace(body)


def test_a_refusal_comes_before_the_descriptor_to_the_fake_libfuse(broker: Broker, tmp_path: Path) -> None:
    def body() -> None:
        program = FakeLibfuse319(broker, tmp_path, "no_such_option")
        assert program.descriptor == -1
        status, said = program.end()
        assert status == 1
        assert "unknown option 'no_such_option'" in said

    in_private_namespace(body)


def test_a_mount_that_the_kernel_refuses_is_told_with_its_errno_to_the_fake_libfuse(
    broker: Broker, tmp_path: Path
) -> None:
    def body() -> None:
        program = FakeLibfuse319(broker, tmp_path, "blksize=512")  # valid only for fuseblk
        program.comm.send(READY)
        assert program.status() == -22
        status, said = program.end()
        assert status == 1
        assert "mount failed: Invalid argument" in said

    in_private_namespace(body)


def test_a_fake_libfuse_that_goes_away_before_it_is_ready_leaves_nothing(broker: Broker, tmp_path: Path) -> None:
    def body() -> None:
        status, said = FakeLibfuse319(broker, tmp_path).end()
        assert status == 1
        assert "connection closed while waiting for signal" in said

    in_private_namespace(body)


def test_a_fake_libfuse_that_dies_while_the_kernel_waits_for_it_leaves_nothing(broker: Broker, tmp_path: Path) -> None:
    def body() -> None:
        program = FakeLibfuse319(broker, tmp_path)
        program.wait_for_init()
        program.comm.send(READY)
        time.sleep(0.3)
        status, _ = program.end()
        if not fuse_mounts():  # a kernel that does not wait has mounted it at once
            assert status == 1
        else:
            subprocess.run(["umount", "--lazy", tmp_path], check=True)

    in_private_namespace(body)


def test_the_wait_for_a_fake_libfuse_is_bounded(run_broker: RunBroker, tmp_path: Path) -> None:
    broker = run_broker("deadlines.sync_init = 1")

    def body() -> None:
        program = FakeLibfuse319(broker, tmp_path)
        time.sleep(2)  # longer than the broker waits
        program.comm.send(READY)
        assert program.status() is None
        status, said = program.end()
        assert status == 1
        assert said

    in_private_namespace(body)


@needs_kernel(EXCLUSIVE)
def test_with_auto_unmount_the_same_socket_is_watched_for_a_fake_libfuse(broker: Broker, tmp_path: Path) -> None:
    def body() -> None:
        program = FakeLibfuse319(broker, tmp_path, "auto_unmount")
        program.comm.send(READY)
        assert program.status() == 0
        time.sleep(0.2)
        assert program.helper.poll() is None
        assert program.end() == (0, "")
        assert not fuse_mounts()

    in_private_namespace(body)
