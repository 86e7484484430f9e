"""A container that sends the broker descriptors that no process can close: its filesystem never answers FLUSH.

A receiver of such a descriptor hangs when it closes it, at the latest when it exits, and not even SIGKILL ends that.
All of it ends with the container, because its filesystem is gone then.
"""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tests.lab.faults import children_of
from tests.lab.images import BUSYBOX, image_tag
from tests.lab.podman import FUSE_STAND_IN, Container, Options, Volume
from tests.lab.programs import flushattack, stopfs

if TYPE_CHECKING:
    from tests.lab.broker import Broker

MOUNTPOINT = "/home/user/mnt"
_PATIENCE = 60


class FlushAttack:
    """The attack of one container, as uid 1000, while the `with` block runs.

    with FlushAttack(broker) as attack:
        ...  # others are served
    assert attack.requests > 0
    """

    def __init__(self, broker: Broker, per_second: int = 100) -> None:
        volumes = [
            FUSE_STAND_IN,
            *broker.volumes(),
            Volume(stopfs(), "/usr/bin/stopfs"),
            Volume(flushattack(), "/usr/bin/flushattack"),
        ]
        self.container = Container(image_tag(BUSYBOX), options=Options(user="1000:1000", volumes=volumes))
        self._per_second = per_second
        #: How many requests were sent; known when the block has ended, and at most a second's less than there were.
        self.requests = 0

    def __enter__(self) -> FlushAttack:
        self.container.__enter__()
        try:
            self._filesystem = self.container.start(["stopfs", "-f", "-o", "silent_at=flush", MOUNTPOINT])
            give_up = time.monotonic() + _PATIENCE
            while not self.container.fuse_mounts(MOUNTPOINT):
                assert self._filesystem.poll() is None, "".join(self._filesystem.communicate())
                assert time.monotonic() < give_up, "the attacker's filesystem is not mounted"
                time.sleep(0.02)
            socket = "/run/fusermount3-proxy/broker.sock"
            self._program = self.container.start(["flushattack", socket, f"{MOUNTPOINT}/file", str(self._per_second)])
            assert self._program.stdout is not None
            said = self._program.stdout.readline()
            assert said.strip().isdecimal(), said + "".join(self._program.communicate())
        except BaseException:
            self.container.remove()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        """Kill the filesystem, and the attacker with it; then record the attacker's output."""
        try:
            for pid in self.container.processes():
                if pid != self.container.pid:
                    _kill(pid)
            said, _ = self._program.communicate(timeout=_PATIENCE)
            self.requests = int((said.split() or ["0"])[-1])
        except subprocess.TimeoutExpired:
            raise AssertionError("the attacker does not end") from None
        finally:
            self.container.remove()


def _kill(pid: int) -> None:
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).kill()


def most_children(config: Path, ended: Path) -> int:
    """Return the most children that the mounter has had until there is a file `ended`.

    The mounter is that of the broker with this configuration file, which may be killed and started again meanwhile.
    """
    most = 0
    mounter = 0
    while not ended.exists():
        mounter = mounter if _is_mounter(mounter) else _mounter_of(config)
        most = max(most, len(children_of(mounter)))
        time.sleep(0.1)
    return most


def _mounter_of(config: Path) -> int:
    """Return the pid of the mounter; 0 if there is none at the moment."""
    for process in psutil.process_iter(["cmdline"]):
        if str(config) in (process.info["cmdline"] or []):
            return next(filter(_is_mounter, children_of(process.pid)), 0)
    return 0


def _is_mounter(pid: int) -> bool:
    try:
        return b"fusermount3_broker.mounter.daemon" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
