"""Very many mounts that die at once: one process holds the descriptors of all of them, and is killed."""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from fusermount3_proxy import wire
from tests.lab.callers import enter_private_namespace, fuse_mounts
from tests.lab.load import Beside

if TYPE_CHECKING:
    from pathlib import Path

#: Concurrent requests; more are not carried out sooner.
_AT_ONCE = 8
_PATIENCE = 60


class Died(NamedTuple):
    """How mounts died: the seconds until the last one was gone, and the number left when the wait was given up."""

    seconds: float
    left: int


def die_together(socket_path: Path, directory: Path, number: int, patience: float) -> Died:
    """Make so many mounts below `directory`, in a mount namespace of their own, and kill the process that holds them.

    Wait `patience` seconds for them to be gone. Leaves nothing. AssertionError if a mount fails.
    """
    with Beside(partial(_die_together, socket_path, directory, number, patience)) as beside:
        return beside.result()


def _die_together(socket_path: Path, directory: Path, number: int, patience: float) -> Died:
    """Do the work in the process that keeps the namespace, which must not be gone before the mounts are."""
    enter_private_namespace()
    places = [directory / str(each) for each in range(number)]
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
    wanted = set(map(str, places))
    reader, writer = os.pipe()
    with Beside(partial(_hold, socket_path, places, writer)) as holder:
        os.close(writer)
        with os.fdopen(reader, "rb") as ready:
            if not ready.read(1):
                holder.result()
        there = count(wanted)
        assert there == number, f"{there} of {number} filesystems are mounted"
        begun = last = time.monotonic()
        os.kill(holder.pid, signal.SIGKILL)
    left = number
    while left and time.monotonic() - begun < patience:
        time.sleep(0.05)
        left, last = count(wanted), time.monotonic()
    return Died(last - begun, left)


def count(places: set[str]) -> int:
    """Return how many FUSE filesystems are mounted at these places."""
    return sum(mount.mountpoint in places for mount in fuse_mounts())


def _hold(socket_path: Path, places: list[Path], ready: int) -> None:
    """Mount everywhere, report it, and hold the descriptors until the end."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2 * len(places) + 1000), hard))
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        descriptors = list(threads.map(partial(_mount, socket_path), places))
    assert len(descriptors) == len(places)
    os.write(ready, b"!")
    while True:
        signal.pause()


def _mount(socket_path: Path, place: Path) -> int:
    """Return the /dev/fuse descriptor of a new filesystem there. Raises OSError, AssertionError."""
    pinned = os.open(place, os.O_PATH)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(_PATIENCE)
            connection.connect(str(socket_path))
            request = wire.encode_request(wire.MountRequest(bytes(place), b"rw,nosuid,nodev,subtype=dying", False))
            socket.send_fds(connection, [request], [pinned])
            record, descriptors, _, _ = socket.recv_fds(connection, wire.MAX_MESSAGE, 1)
            reply = wire.decode_reply(record)
            assert reply.errno == 0, f"{reply.text.decode()}, request {reply.id.decode()}"
            connection.send(wire.encode_request(wire.CommitRequest()))
            connection.recv(1)
            return descriptors[0]
    finally:
        os.close(pinned)
