"""Memory use: of the broker with and without mounts, and of a helper that waits with auto_unmount.

All numbers are PSS, in which a page that several processes share is counted once, in shares.
"""

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.crowd import Crowd
from benchmarks.latency import GENUINE_PROGRAM
from benchmarks.results import GENUINE, PROXY, Memory, Waiting
from tests.lab.broker import PROXY as PROXY_PROGRAM
from tests.lab.broker import Broker
from tests.lab.load import holding

WAITING = 10


def measure(mounts: int) -> Memory:
    """Measure with so many filesystems mounted at once. Needs a private mount namespace."""
    with ExitStack() as stack:
        crowd = Crowd(stack, mounts)
        idle = crowd.holding().pss
        crowd.fill()
        full = crowd.holding().pss
    with tempfile.TemporaryDirectory() as temporary, Broker() as broker:
        waiting = {
            name: Waiting(
                alone=mean_pss(program, broker, Path(temporary), 1),
                each_of_ten=mean_pss(program, broker, Path(temporary), WAITING),
            )
            for name, program in ((GENUINE, GENUINE_PROGRAM), (PROXY, PROXY_PROGRAM))
        }
    return Memory(mounts, idle, full, waiting)


def mean_pss(program: Path, broker: Broker, directory: Path, number: int) -> int:
    """Return the PSS of each of so many helpers that wait at once, in bytes."""
    with ExitStack() as stack:
        helpers = [stack.enter_context(waiting(program, broker, directory / str(each))) for each in range(number)]
        return settled(helpers) // number


def settled(helpers: list[subprocess.Popen[bytes]]) -> int:
    """Return the total PSS once it stays the same, at most after 5 s, because other processes share pages, too."""
    last = -1
    for _ in range(25):
        now = sum(holding(helper.pid).pss for helper in helpers)
        if now == last:
            break
        last = now
        time.sleep(0.2)
    return now


@contextmanager
def waiting(program: Path, broker: Broker, mountpoint: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a helper that has mounted, and waits until its FUSE program, which is this process, has ended."""
    mountpoint.mkdir(exist_ok=True)
    ours, theirs = socket.socketpair()
    environment = {
        "_FUSE_COMMFD": str(theirs.fileno()),
        "FUSERMOUNT3PROXY_FDPASSING_SOCKPATH": str(broker.socket),
    }
    command: list[str | Path] = [program, "-o", "rw,nosuid,nodev,auto_unmount,subtype=bench", "--", mountpoint]
    with ours, theirs:
        helper = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        assert descriptors, f"{program} failed with status {helper.wait()}"
        try:
            yield helper
        finally:
            os.close(descriptors[0])
            ours.close()
            helper.wait(timeout=30)
