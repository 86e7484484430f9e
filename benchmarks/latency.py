"""How long a FUSE program waits for its helper: from exec to the /dev/fuse descriptor, and until the helper's exit.

The genuine helper and the proxy on the host, and the proxy in containers are called in turn, in one run, against a
broker that this module starts; so the ratio means something on a machine on which the milliseconds do not. The start
alone is measured with ``-V``, and a static C program that does nothing shows the cost of exec and exit by themselves.
"""

import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from benchmarks import metafuse
from benchmarks.remote_caller import Mounted, RemoteCaller, in_containers
from benchmarks.results import GENUINE, IN_CONTAINERS, PROXY, Latency, Timing
from tests.lab.broker import PROXY as PROXY_PROGRAM
from tests.lab.broker import Broker
from tests.lab.load import Helper

MeasuredT = TypeVar("MeasuredT")

GENUINE_PROGRAM = Path("/usr/bin/fusermount3")
META_FUSE = "proxy of meta-fuse-csi-plugin"
NOTHING = "int main(void) { return 0; }"


def published(driver: metafuse.Driver, caller: RemoteCaller, mountpoint: Path) -> Mounted:
    """Measure a helper that receives the descriptor of an earlier mount."""
    driver.publish(mountpoint)
    return caller.mount()


def start_to_exit(program: Path, *arguments: str) -> float:
    """Return the milliseconds that a program takes from exec to exit."""
    begun = time.perf_counter()
    silent = [(os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0)]
    pid = os.posix_spawn(program, [str(program), *arguments], {}, file_actions=silent)
    os.waitpid(pid, 0)
    return 1000 * (time.perf_counter() - begun)


def in_turn(calls: int, measures: Mapping[str, Callable[[], MeasuredT]]) -> dict[str, list[MeasuredT]]:
    """Return the results of each measure, `calls` times, taken in turn so that all see the same machine.

    The order changes from turn to turn: what comes before, such as another call of the broker, makes a difference.
    """
    taken: dict[str, list[MeasuredT]] = {name: [] for name in measures}
    order, chance = list(measures), random.Random(1)
    for _ in range(calls):
        chance.shuffle(order)
        for name in order:
            taken[name].append(measures[name]())
    return taken


def timings(taken: Mapping[str, list[float]]) -> dict[str, Timing]:
    return {name: Timing.of(milliseconds) for name, milliseconds in taken.items()}


def measure(calls: int) -> Latency:
    """Return the timings of so many calls of each kind. Needs a private mount namespace."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        mounted, not_measured = mounting(calls, directory)
        return Latency(
            exec_to_descriptor=timings({name: [each.to_descriptor for each in all_] for name, all_ in mounted.items()}),
            start_to_exit=timings(starting(calls, directory)),
            not_measured=not_measured,
            exec_to_exit=timings({name: [each.to_exit for each in all_] for name, all_ in mounted.items()}),
        )


def mounting(calls: int, directory: Path) -> tuple[dict[str, list[Mounted]], dict[str, str]]:
    """Return what each mount took, and the callers that could not be measured with the reasons."""
    mountpoint = directory / "mountpoint"
    mountpoint.mkdir()
    not_measured = {}
    with ExitStack() as stack:
        broker = stack.enter_context(Broker())

        def on_host(socket_path: Path, program: Path) -> RemoteCaller:
            return stack.enter_context(RemoteCaller(Helper(socket_path, program), mountpoint))

        measures = {
            GENUINE: on_host(broker.socket, GENUINE_PROGRAM).mount,
            PROXY: on_host(broker.socket, PROXY_PROGRAM).mount,
        }
        for name, caller in stack.enter_context(in_containers(broker, *IN_CONTAINERS)).items():
            measures[name] = caller.mount
        try:
            program = metafuse.install(directory)
        except metafuse.NotMeasured as reason:
            not_measured[META_FUSE] = str(reason)
        else:
            driver = metafuse.Driver(directory)
            other = on_host(driver.socket, program)  # forked before the driver starts a thread
            stack.enter_context(driver)
            measures[META_FUSE] = lambda: published(driver, other, mountpoint)
        return in_turn(calls, measures), not_measured


def starting(calls: int, directory: Path) -> dict[str, list[float]]:
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
