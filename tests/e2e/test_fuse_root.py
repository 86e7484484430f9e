"""A caller whose root filesystem is FUSE, served by a program that hangs: the mounter looks up no path there."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.mounter import filesystem
from tests.e2e.conftest import wait_until
from tests.e2e.hostile import O_PATH, Client, fuse_mounts, in_private_namespace, in_process, mount_request
from tests.lab.commands import run
from tests.lab.pace import SLOWNESS

if TYPE_CHECKING:
    from tests.lab.broker import Broker

pytestmark = pytest.mark.e2e

#: Seconds in which a mount is made, much less than the broker's deadline for a step.
SOON = SLOWNESS
#: Options of a mount that is not plain, which a forked child of the mounter makes.
UNUSUAL = b"fsname=" + b"x" * (filesystem.LONGEST_STRING + 1)


@pytest.mark.parametrize("has_pid_namespace", [False, True])
@pytest.mark.parametrize("options", [b"", UNUSUAL], ids=["plain", "unusual"])
def test_a_root_that_hangs_holds_up_no_mount(
    options: bytes, has_pid_namespace: bool, broker: Broker, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    root.mkdir()

    ours, theirs = socket.socketpair()

    def mount_there() -> None:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        run(["mount", "-t", "tmpfs", "tmpfs", root / "mnt"])
        (root / "mnt/place").mkdir()
        with Client(broker) as client:
            os.chdir(root)
            run(["pivot_root", ".", "srv"])
            place = os.open("/mnt/place", O_PATH)
            theirs.send(b"stop it")
            assert theirs.recv(100) == b"stopped"
            begun = time.monotonic()
            client.send(mount_request(Path("/mnt/place"), options), place)
            reply = client.reply()
            assert time.monotonic() - begun < SOON
            assert reply is not None
            assert reply.errno == 0, reply.text

    def stop(program: psutil.Process) -> None:
        assert ours.recv(100) == b"stop it"
        program.suspend()
        ours.send(b"stopped")

    def body() -> None:
        with subprocess.Popen(["bindfs", "-f", "--no-allow-other", "/", root]) as serving:
            wait_until(lambda: any(mount.mountpoint == str(root) for mount in fuse_mounts()))
            # A process in a pid namespace of its own can't stop it.
            threading.Thread(target=stop, args=[psutil.Process(serving.pid)], daemon=True).start()
            if has_pid_namespace:
                syscalls.unshare(syscalls.CLONE_NEWPID)
            try:
                in_process(mount_there)
            finally:
                serving.send_signal(signal.SIGCONT)
                syscalls.umount2(bytes(root), syscalls.MNT_DETACH)

    in_private_namespace(body)
