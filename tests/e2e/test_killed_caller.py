"""A caller that is killed at each of its system calls in turn leaves nothing but what it has committed; nor does a
caller that sends arbitrary data and reads nothing.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import struct
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import USER, is_idle, make_mountpoint, wait_until
from tests.e2e.hostile import (
    COMMIT,
    O_PATH,
    Client,
    check_service,
    fuse_mounts,
    in_private_namespace,
    mount,
    mount_request,
    unmount,
    wait_for_mounts,
)
from tests.lab.broker import PROXY
from tests.lab.forked import ending_afterwards

if TYPE_CHECKING:
    from pathlib import Path

    from tests.lab.broker import Broker

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@pytest.fixture
def place(users: Path) -> Path:
    """A mountpoint that belongs to the user."""
    return make_mountpoint(users, "mountpoint")


def run(broker: Broker, *arguments: str | Path, trace: Path, kill: tuple[str, int] | None = None) -> list[int]:
    """Run the proxy, and kill it when it begins the system call `kill[0]` for the `kill[1]`-th time.

    Return the descriptors that it had handed over by then; `trace` lists its system calls.
    """
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            environment = {
                "FUSERMOUNT3PROXY_FDPASSING_SOCKPATH": str(broker.socket),
                "_FUSE_COMMFD": str(theirs.fileno()),
            }
            inject = ["-e", f"inject={kill[0]}:signal=SIGKILL:when={kill[1]}"] if kill else []
            subprocess.run(
                ["strace", "-qq", "-o", trace, *inject, PROXY, *arguments],
                env=environment,
                pass_fds=[theirs.fileno()],
                stderr=subprocess.DEVNULL,
                check=not kill,
            )
        _, devices, _, _ = socket.recv_fds(ours, 16, 4)
    return devices


def steps(trace: Path) -> list[tuple[str, int]]:
    """Return the system calls of a run, each with the number of calls of that name up to and including it."""
    names = [line.partition("(")[0] for line in trace.read_text().splitlines() if "(" in line]
    assert names[0] == "execve"
    assert {"connect", "sendmsg", "recvmsg"} <= set(names)
    return [(name, names[: number + 1].count(name)) for number, name in enumerate(names)][1:]


def test_at_each_step_of_a_mount(broker: Broker, place: Path, tmp_path: Path) -> None:
    """A mount that was handed over but not committed is rolled back, too."""
    trace = tmp_path / "trace"

    def body() -> None:
        (device,) = run(broker, "-o", "rw", "--", place, trace=trace)
        os.close(device)
        unmount(broker, place)
        killed = steps(trace)
        given = kept = 0
        for step in killed:
            devices = run(broker, "-o", "rw", "--", place, trace=trace, kill=step)
            for device in devices:
                os.close(device)
            if not devices:
                wait_for_mounts([])
            given += len(devices)
            wait_until(lambda: agree(broker))
            for _ in fuse_mounts():  # it was committed before the kill, or is being rolled back
                with contextlib.suppress(AssertionError):
                    unmount(broker, place)
                    kept += 1
            wait_for_mounts([])
        print(f"killed at {len(killed)} steps, {given} times with the descriptor handed over, {kept} mounts committed")
        assert len(killed) > given > kept

    in_private_namespace(body)


def agree(broker: Broker) -> bool:
    """Return whether the broker lists exactly the mounts that exist."""
    return [mount["mountpoint"] for mount in broker.mounts()] == [mount.mountpoint for mount in fuse_mounts()]


@pytest.mark.parametrize("lazy", [[], ["-z"]], ids=["", "lazily"])
def test_at_each_step_of_an_unmount(lazy: list[str], broker: Broker, place: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"

    def body() -> None:
        os.close(mount(broker, place))
        run(broker, "-u", *lazy, "--", place, trace=trace)
        killed = steps(trace)
        device = mount(broker, place)
        done = 0
        for step in killed:
            run(broker, "-u", *lazy, "--", place, trace=trace, kill=step)
            wait_until(lambda: agree(broker))
            if not fuse_mounts():
                os.close(device)
                device = mount(broker, place)
                done += 1
        os.close(device)
        unmount(broker, place)
        print(f"killed at {len(killed)} steps, unmounted at {done} of them")
        assert 0 < done < len(killed)

    in_private_namespace(body)


def test_a_storm_of_callers_that_are_killed_at_any_time(broker: Broker, place: Path) -> None:
    """Each is killed by its own timer, between a time before its first message and a time after its commit."""
    chance = random.Random(4)

    def call(seconds: float) -> None:
        with Client(broker, USER) as client:
            signal.setitimer(signal.ITIMER_REAL, seconds)  # the signal kills this process
            client.send(mount_request(place), os.open(place, O_PATH))
            client.reply()
            client.send(COMMIT)
            client.reply()
            signal.pause()

    def body() -> None:
        children: list[int] = []
        for _ in range(300):
            seconds = chance.uniform(0.0001, 0.05)
            if (child := os.fork()) == 0:
                with ending_afterwards():
                    signal.signal(signal.SIGALRM, signal.SIG_DFL)
                    call(seconds)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        wait_until(lambda: agree(broker))
        for _ in fuse_mounts():  # committed by a caller that was killed afterwards, or being rolled back
            with contextlib.suppress(AssertionError):
                unmount(broker, place, uid=USER, lazy=True)
        wait_for_mounts([])
        wait_until(lambda: is_idle(broker))
        check_service(broker, place)

    in_private_namespace(body)


def credentials(pid: int, uid: int, gid: int) -> tuple[int, int, bytes]:
    return (socket.SOL_SOCKET, socket.SCM_CREDENTIALS, struct.pack("iII", pid, uid, gid))


def test_forged_credentials_change_nothing(broker: Broker, place: Path) -> None:
    """A privileged process may send any credentials with a message; those of the process that connected count."""

    def body() -> None:
        with Client(broker, USER) as client:
            pinned = os.open(place, O_PATH)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, pinned.to_bytes(4, "little"))
            client.socket.sendmsg([mount_request(place)], [rights, credentials(1, 0, 0)])
            os.close(pinned)
            reply = client.reply()
            assert reply is not None
            assert reply.errno == 0, reply.text
            client.socket.sendmsg([COMMIT], [credentials(1, 0, 0)])
            assert client.reply() is None
            (mounted,) = fuse_mounts()
            assert {f"user_id={USER}", f"group_id={USER}"} <= mounted.super_options
            (listed,) = broker.mounts()
            assert (listed["uid"], listed["pid"]) == (USER, os.getpid())
        unmount(broker, place, uid=USER)

    in_private_namespace(body)


def test_a_caller_that_reads_nothing_is_rolled_back_and_holds_nobody_up(broker: Broker, place: Path) -> None:
    other = place.with_name("other")
    other.mkdir()

    def body() -> None:
        clients = [Client(broker, USER) for _ in range(20)]
        for client in clients:
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            client.send(mount_request(place), os.open(place, O_PATH))
            client.socket.setblocking(False)
            while True:
                try:
                    client.socket.send(b"more" * 1000)
                except OSError:
                    break
        os.close(mount(broker, other))
        unmount(broker, other)
        for client in clients:
            client.socket.close()
        wait_for_mounts([])

    in_private_namespace(body)
