"""auto_unmount: the process that the FUSE program started stays, costs next to nothing, and removes a dead mount."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import RunBroker, Start, has_ended_all, is_alive, wait_until
from tests.e2e.hostile import fuse_mounts, in_private_namespace
from tests.lab.broker import PROXY, Broker
from tests.lab.images import BUSYBOX, image_tag
from tests.lab.pace import SLOWNESS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.lab.podman import Container

pytestmark = pytest.mark.e2e

MOUNTPOINT = "/home/user/mnt"
#: Seconds in which a program ends whose work is done.
SOON = 10 * SLOWNESS


class Watched:
    """A mount with a watcher. The test plays the FUSE program: it holds the comm socket and the descriptor."""

    def __init__(self, broker: Broker, arguments: list[str], helper: str | Path = PROXY) -> None:
        self.comm, theirs = socket.socketpair()
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            self.watcher = subprocess.Popen(
                [helper, *arguments],
                env={
                    "_FUSE_COMMFD": str(theirs.fileno()),
                    "FUSERMOUNT3PROXY_FDPASSING_SOCKPATH": str(broker.socket),
                },
                pass_fds=[theirs.fileno()],
            )

    def descriptor(self) -> int:
        _, descriptors, _, _ = socket.recv_fds(self.comm, 1, 1)
        return descriptors[0]


def watch_in_namespace(broker: Broker, tmp_path: Path, body: Callable[[Path, Watched, int], None]) -> None:
    """Mount with auto_unmount in a private namespace and call `body` with mountpoint, watcher and descriptor."""

    def in_namespace() -> None:
        watched = Watched(broker, ["-o", "auto_unmount", "--", str(tmp_path)])
        body(tmp_path, watched, watched.descriptor())

    in_private_namespace(in_namespace)


@pytest.mark.parametrize("user", [None, "1000:1000"])
def test_what_a_killed_program_leaves_is_unmounted_although_nobody_else_may_enter_it(
    start: Start, user: str | None
) -> None:
    container = start(image_tag(BUSYBOX), user=user)
    program = container.start(["whoamifs", "-f", "-o", "auto_unmount", MOUNTPOINT])
    wait_until(lambda: container.fuse_mounts(MOUNTPOINT))
    kill_in(container, "whoamifs")
    wait_until(lambda: not container.fuse_mounts())
    wait_until(lambda: has_ended_all(container))
    program.wait(timeout=SOON)


@pytest.mark.parametrize("user", [None, "1000:1000"])
def test_a_program_that_ends_by_itself_leaves_neither_mount_nor_watcher(start: Start, user: str | None) -> None:
    container = start(image_tag(BUSYBOX), user=user)
    container.exec(["whoamifs", "-o", "auto_unmount", MOUNTPOINT])
    kill_in(container, "whoamifs", signal.SIGTERM)
    wait_until(lambda: not container.fuse_mounts())
    wait_until(lambda: has_ended_all(container))


def test_the_watcher_is_the_process_that_was_started_and_costs_next_to_nothing(broker: Broker, tmp_path: Path) -> None:
    def body(_: Path, watched: Watched, descriptor: int) -> None:
        process = Path(f"/proc/{watched.watcher.pid}")
        wait_until(lambda: b"--auto-unmount" in (process / "cmdline").read_bytes())
        wait_until(lambda: (process / "wchan").read_text().startswith("poll") or waits_in_poll(process))
        status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines())
        assert int(status["RssAnon"].split()[0]) <= 128
        assert int(status["Threads"]) == 1
        blocked = int(status["SigBlk"], 16)
        assert all(blocked & 1 << number - 1 for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
        session = (process / "stat").read_text().rpartition(")")[2].split()[3]
        assert int(session) == watched.watcher.pid
        assert (process / "cwd").readlink() == Path("/")
        assert [(process / f"fd/{stream}").readlink() for stream in range(3)] == [Path("/dev/null")] * 3
        assert len(list((process / "fd").iterdir())) == 4, "stdio and the comm socket"
        assert (process / "comm").read_text() == "fusermount3-pro\n"
        watched.watcher.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        assert watched.watcher.poll() is None
        os.close(descriptor)
        watched.comm.close()
        assert watched.watcher.wait(timeout=SOON) == 0

    watch_in_namespace(broker, tmp_path, body)


def waits_in_poll(process: Path) -> bool:
    """Test whether the process sleeps in poll(2), for kernels that don't show it in wchan."""
    return (process / "syscall").read_text().split()[0] in ("7", "271")


def test_what_the_program_sends_meanwhile_is_of_no_interest(broker: Broker, tmp_path: Path) -> None:
    def body(_: Path, watched: Watched, descriptor: int) -> None:
        watched.comm.send(b"x" * 10_000)
        time.sleep(0.2)
        assert watched.watcher.poll() is None
        os.close(descriptor)
        watched.comm.close()
        assert watched.watcher.wait(timeout=SOON) == 0
        assert not fuse_mounts()

    watch_in_namespace(broker, tmp_path, body)


def test_a_mount_that_somebody_still_holds_is_left_until_it_is_dead(run_broker: RunBroker, tmp_path: Path) -> None:
    broker = run_broker("deadlines.operation = 1")

    def body(_: Path, watched: Watched, descriptor: int) -> None:
        watched.comm.close()  # the program has ended, but one of its children has inherited the descriptor
        time.sleep(2.5)
        assert fuse_mounts()
        assert watched.watcher.poll() is None
        os.close(descriptor)
        assert watched.watcher.wait(timeout=SOON) == 0
        assert not fuse_mounts()

    watch_in_namespace(broker, tmp_path, body)


def test_what_was_mounted_there_since_is_not_the_watchers(broker: Broker, tmp_path: Path) -> None:
    def body(mountpoint: Path, watched: Watched, descriptor: int) -> None:
        os.close(descriptor)
        helper: list[str | Path] = [PROXY, "-u", "--", mountpoint]
        subprocess.run(helper, env={"FUSERMOUNT3PROXY_FDPASSING_SOCKPATH": str(broker.socket)}, check=True)
        second = Watched(broker, ["-o", "auto_unmount", "--", str(mountpoint)])
        os.close(second.descriptor())  # the second is dead too, but it is not the mount of the first watcher
        watched.comm.close()
        assert watched.watcher.wait(timeout=SOON) == 0
        assert len(fuse_mounts()) == 1
        second.comm.close()
        assert second.watcher.wait(timeout=SOON) == 0
        assert not fuse_mounts()

    watch_in_namespace(broker, tmp_path, body)


def test_a_watcher_finds_the_broker_that_only_its_parents_environment_names(broker: Broker, tmp_path: Path) -> None:
    """go-fuse passes its helper no other variable than the comm socket's number."""
    script = 'env --ignore-environment _FUSE_COMMFD="$_FUSE_COMMFD" "$0" "$@"; exit $?'

    def body() -> None:
        watched = Watched(broker, ["-c", script, str(PROXY), "-o", "auto_unmount", "--", str(tmp_path)], "sh")
        os.close(watched.descriptor())
        watched.comm.close()
        assert watched.watcher.wait(timeout=SOON) == 0
        assert not fuse_mounts()

    in_private_namespace(body)


def test_a_watcher_waits_for_a_broker_that_is_down(run_broker: RunBroker, tmp_path: Path) -> None:
    broker = run_broker()

    def body(_: Path, watched: Watched, descriptor: int) -> None:
        os.kill(broker.process.pid, signal.SIGTERM)
        wait_until(lambda: not broker.socket.exists())
        os.close(descriptor)
        watched.comm.close()
        time.sleep(0.5)
        assert watched.watcher.poll() is None
        os.kill(os.getppid(), signal.SIGUSR1)
        wait_until(broker.socket.exists)
        assert watched.watcher.wait(timeout=20) == 0
        assert not fuse_mounts()

    def restart(*_: object) -> None:
        assert broker.process.wait(timeout=20) == 0
        broker.start()

    # The broker is a child of the test process, which restarts it on a signal from the process in the namespace.
    before = signal.signal(signal.SIGUSR1, restart)
    try:
        watch_in_namespace(broker, tmp_path, body)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_mount_that_the_program_made_by_itself_is_watched_over_too(broker: Broker, tmp_path: Path) -> None:
    """libfuse 3.15 and later call the helper this way, after their own mount(2)."""

    def in_namespace() -> None:
        genuine = Watched(broker, ["--", str(tmp_path)], helper="/usr/bin/fusermount3")
        descriptor = genuine.descriptor()
        genuine.watcher.wait()
        watched = Watched(broker, ["--auto-unmount", "--", str(tmp_path)])
        time.sleep(0.2)
        assert watched.watcher.poll() is None
        os.close(descriptor)
        watched.comm.close()
        assert watched.watcher.wait(timeout=SOON) == 0
        assert not fuse_mounts()

    in_private_namespace(in_namespace)


def test_a_watcher_whose_mount_is_gone_ends_without_a_word(broker: Broker, tmp_path: Path) -> None:
    def body(mountpoint: Path, watched: Watched, descriptor: int) -> None:
        os.close(descriptor)
        subprocess.run(["umount", "--lazy", mountpoint], check=True)
        watched.comm.close()
        assert watched.watcher.wait(timeout=SOON) == 0

    watch_in_namespace(broker, tmp_path, body)


def kill_in(container: Container, program: str, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to the processes of a program in the container."""
    for pid in container.processes():
        with contextlib.suppress(OSError):  # it has just ended
            if is_alive(pid) and Path(f"/proc/{pid}/comm").read_text().strip() == program:
                os.kill(pid, number)
