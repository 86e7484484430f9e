"""How long a FUSE program waits for its helper: from exec to the /dev/fuse descriptor, the proxy against the genuine.

Both are called in turn, in one run, in a private mount namespace, against a broker that this module starts; so the
ratio means something on a machine on which the milliseconds do not. The start alone is measured with ``-V``, and a
static C program that does nothing shows the cost of exec and exit by themselves.
"""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from benchmarks import metafuse
from benchmarks.results import GENUINE, PROXY, Latency, Timing
from fusermount3_broker.kernel import syscalls
from tests.lab.broker import PROXY as PROXY_PROGRAM
from tests.lab.broker import Broker
from tests.lab.load import Helper

GENUINE_PROGRAM = Path("/usr/bin/fusermount3")
META_FUSE = "proxy of meta-fuse-csi-plugin"
NOTHING = "int main(void) { return 0; }"


def exec_to_descriptor(helper: Helper, mountpoint: Path) -> float:
    """Return the seconds from exec to the descriptor, and leave nothing mounted."""
    call = helper.mount(mountpoint)
    assert call.status == 0, call.said
    syscalls.umount2(bytes(mountpoint), syscalls.MNT_DETACH)
    os.close(call.descriptor)
    return call.seconds


def published_to_descriptor(driver: metafuse.Driver, helper: Helper, mountpoint: Path) -> float:
    """Return the same for a helper that receives the descriptor of an earlier mount."""
    driver.publish(mountpoint)
    return exec_to_descriptor(helper, mountpoint)


def start_to_exit(program: Path, *arguments: str) -> float:
    """Return the seconds that a program takes from exec to exit."""
    begun = time.perf_counter()
    silent = [(os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0)]
    pid = os.posix_spawn(program, [str(program), *arguments], {}, file_actions=silent)
    os.waitpid(pid, 0)
    return time.perf_counter() - begun


def in_turn(calls: int, measures: Mapping[str, Callable[[], float]]) -> dict[str, Timing]:
    """Return the timing of each measure, `calls` times, taken in turn so that all see the same machine."""
    taken: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(calls):
        for name, measure in measures.items():
            taken[name].append(1000 * measure())
    return {name: Timing.of(milliseconds) for name, milliseconds in taken.items()}


def measure(calls: int) -> Latency:
    """Return the timings of so many calls of each kind. Needs a private mount namespace."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        broker = stack.enter_context(Broker())
        mountpoint = directory / "mountpoint"
        mountpoint.mkdir()
        genuine, proxy = Helper(broker.socket, GENUINE_PROGRAM), Helper(broker.socket)
        mounting = {
            GENUINE: lambda: exec_to_descriptor(genuine, mountpoint),
            PROXY: lambda: exec_to_descriptor(proxy, mountpoint),
        }
        not_measured = {}
        try:
            program = metafuse.install(directory)
        except metafuse.NotMeasured as reason:
            not_measured[META_FUSE] = str(reason)
        else:
            driver = stack.enter_context(metafuse.Driver(directory))
            other = Helper(driver.socket, program)
            mounting[META_FUSE] = lambda: published_to_descriptor(driver, other, mountpoint)
        return Latency(in_turn(calls, mounting), starting(calls, directory), not_measured)


def starting(calls: int, directory: Path) -> dict[str, Timing]:
    """Return the times from start to exit with `-V`, beside a program that does nothing at all."""
    nothing = directory / "nothing"
    compile_nothing: list[str | Path] = ["cc", "-O2", "-static", "-x", "c", "-", "-o", nothing]
    subprocess.run(compile_nothing, input=NOTHING, text=True, check=True)
    return in_turn(
        calls,
        {
            "static C program that does nothing": lambda: start_to_exit(nothing),
            "genuine fusermount3 -V": lambda: start_to_exit(GENUINE_PROGRAM, "-V"),
            "proxy -V": lambda: start_to_exit(PROXY_PROGRAM, "-V"),
        },
    )
