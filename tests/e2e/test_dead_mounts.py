"""Mounts whose FUSE program has ended: the broker finds and removes them, and only them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from fusermount3_broker.kernel import syscalls
from tests.e2e.conftest import RunBroker, containers, states, wait_until
from tests.e2e.hostile import fuse_mounts, in_private_namespace, mount, unmount
from tests.lab.broker import Broker
from tests.lab.images import BUSYBOX, image_tag
from tests.lab.pace import SLOWNESS
from tests.lab.podman import Container

pytestmark = [pytest.mark.e2e, pytest.mark.long]

MOUNTPOINT = "/home/user/mnt"
ON = "dead_mounts_seconds = 1"
SOON = 5 * SLOWNESS  # seconds, as promised


@pytest.fixture
def reaping(run_broker: RunBroker) -> Broker:
    return run_broker(ON)


def program_in(container: Container) -> psutil.Process:
    """Start the FUSE program in the container; return its process when it has mounted."""
    container.start(["whoamifs", "-f", MOUNTPOINT])
    wait_until(lambda: container.fuse_mounts(MOUNTPOINT))
    (program,) = (each for each in container.processes() if name_of(each) == "whoamifs")
    return psutil.Process(program)


def name_of(pid: int) -> str:
    """Return the name of the process with this pid now; empty if there is none.

    `psutil.process_iter` keeps what it knows of a pid, also when another process has that pid by now.
    """
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
    except OSError:
        return ""


@pytest.mark.parametrize("user", [None, "1000:1000"])
@pytest.mark.parametrize("user_namespace", [False, True])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_program_leaves_is_gone_soon(
    reaping: Broker, user: str | None, user_namespace: bool, end: signal.Signals
) -> None:
    with containers(reaping) as start:
        container = start(image_tag(BUSYBOX), user=user, user_namespace=user_namespace)
        program_in(container).send_signal(end)
        wait_until(lambda: not container.fuse_mounts(), SOON)


def test_it_is_told_in_the_log_which_mount_it_was(reaping: Broker) -> None:
    with containers(reaping) as start:
        container = start(image_tag(BUSYBOX))
        program = program_in(container)
        (mounted,) = reaping.wait_for("mount mounted")
        program.kill()
        (record,) = reaping.wait_for("unmounted a dead mount")
        assert (record["request_id"], record["mountpoint"]) == (mounted["request_id"], MOUNTPOINT)


def test_a_program_that_hangs_is_left_alone_and_not_asked(reaping: Broker) -> None:
    with containers(reaping) as start:
        container = start(image_tag(BUSYBOX))
        program = program_in(container)
        program.suspend()
        try:
            time.sleep(4)
            assert container.fuse_mounts(MOUNTPOINT)
            mounter = reaping.mounter
            wait_until(lambda: psutil.STATUS_DISK_SLEEP not in states(mounter.children()))
        finally:
            program.resume()
        assert container.exec(["ls", MOUNTPOINT]).stdout.split() == ["files", "whoami"]
        container.exec(["fusermount3", "-u", MOUNTPOINT])


def test_a_mount_that_died_while_the_broker_was_down_is_gone_soon_after_it_is_up(reaping: Broker) -> None:
    with containers(reaping) as start:
        container = start(image_tag(BUSYBOX))
        program = program_in(container)
        reaping.stop()
        program.kill()
        time.sleep(1)
        assert container.fuse_mounts(MOUNTPOINT)
        reaping.start()
        wait_until(lambda: not container.fuse_mounts(), SOON)


@pytest.mark.parametrize("name", ["a\rb", "\r", "a b", "a\nb", "a\\040b", "#"])
def test_it_is_gone_soon_whatever_its_mountpoint_is_called(reaping: Broker, tmp_path: Path, name: str) -> None:
    """mountinfo escapes some bytes and leaves others."""

    def body() -> None:
        (tmp_path / name).mkdir()
        os.close(mount(reaping, tmp_path / name))
        wait_until(lambda: not fuse_mounts(), 40)

    in_private_namespace(body)


def test_a_descriptor_on_its_way_between_processes_is_not_death(reaping: Broker, tmp_path: Path) -> None:
    """While the descriptor is in a socket, no process holds it, but a process may still receive it and serve."""

    def body() -> None:
        device = mount(reaping, tmp_path)
        here, there = socket.socketpair()
        socket.send_fds(here, [b"x"], [device])
        os.close(device)
        time.sleep(4)
        assert len(fuse_mounts()) == 1
        there.close()
        here.close()
        wait_until(lambda: not fuse_mounts(), 40)

    in_private_namespace(body)


def test_who_has_a_descriptor_of_a_filesystem_that_is_gone_serves_no_later_one_with_its_number(
    reaping: Broker, tmp_path: Path
) -> None:
    """The kernel gives the number of a filesystem that is gone to the next one."""

    def body() -> None:
        gone: dict[str, int] = {}
        while True:
            device = mount(reaping, tmp_path)
            (now,) = fuse_mounts()
            if now.device in gone:
                break
            gone[now.device] = device
            syscalls.umount2(bytes(tmp_path), syscalls.MNT_DETACH)
            assert len(gone) < 50
        os.close(device)
        wait_until(lambda: not fuse_mounts(), 10 * SLOWNESS)
        for each in gone.values():
            os.close(each)

    in_private_namespace(body)


def test_who_unmounts_late_what_was_dead_is_told_that_it_is_unmounted(reaping: Broker, tmp_path: Path) -> None:
    """As libfuse, which closes its descriptor first; a second time, there is nothing to unmount."""

    def body() -> None:
        os.close(mount(reaping, tmp_path))
        wait_until(lambda: not fuse_mounts(), SOON)
        unmount(reaping, tmp_path)
        with pytest.raises(AssertionError, match="Invalid argument"):
            unmount(reaping, tmp_path)

    in_private_namespace(body)


@pytest.mark.usefixtures("reaping")
def test_a_dead_mount_that_was_not_made_through_the_broker_stays(tmp_path: Path) -> None:
    def body() -> None:
        ours, theirs = socket.socketpair()
        command = ["/usr/bin/fusermount3", "--", str(tmp_path)]
        environment = {"_FUSE_COMMFD": str(theirs.fileno())}
        subprocess.run(command, env=environment, pass_fds=[theirs.fileno()], check=True)
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        os.close(descriptors[0])
        time.sleep(4)
        assert len(fuse_mounts()) == 1
        subprocess.run(["umount", "--lazy", tmp_path], check=True)

    in_private_namespace(body)


def test_where_it_is_switched_off_dead_mounts_stay(run_broker: RunBroker, tmp_path: Path) -> None:
    broker = run_broker("dead_mounts_seconds = 0")

    def body() -> None:
        os.close(mount(broker, tmp_path))
        time.sleep(4)
        assert len(fuse_mounts()) == 1
        unmount(broker, tmp_path)

    in_private_namespace(body)
