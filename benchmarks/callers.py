"""How many filesystems per second concurrent callers mount and unmount, by the proxy and by the genuine helper.

Each caller is a process in a mount namespace of its own, as in a container, which calls as fast as it is answered.
"""

import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.bounds import NO_LIMITS
from benchmarks.latency import GENUINE_PROGRAM
from benchmarks.results import Calls, Concurrency, Timing
from benchmarks.sample import Sample, mount_and_unmount
from tests.lab.broker import PROXY as PROXY_PROGRAM
from tests.lab.broker import Broker
from tests.lab.callers import enter_private_namespace
from tests.lab.load import Beside, Helper

CALLERS = (1, 8, 64)
#: A dead mount has time: each caller closes its descriptor, and then waits for its turn to unmount.
_CONFIGURATION = f"mount_max = -1\ndead_mounts_seconds = 60\n[limits]\n{NO_LIMITS}"


def measure(rounds: int, seconds: float) -> list[Concurrency]:
    """Have so many callers at once call each helper for so many seconds, in turn, in each round."""
    with tempfile.TemporaryDirectory() as temporary, Broker(_CONFIGURATION) as broker:
        return [measure_callers(callers, rounds, seconds, broker.socket, Path(temporary)) for callers in CALLERS]


def measure_callers(callers: int, rounds: int, seconds: float, socket_path: Path, directory: Path) -> Concurrency:
    genuine: list[Sample] = []
    proxy: list[Sample] = []
    for number in range(rounds):
        turns = [(genuine, GENUINE_PROGRAM), (proxy, PROXY_PROGRAM)]
        for samples, program in turns if number % 2 else reversed(turns):
            samples.append(one_round(callers, seconds, socket_path, program, directory))
    return Concurrency(callers, calls(genuine, seconds), calls(proxy, seconds))


def calls(samples: list[Sample], seconds: float) -> Calls:
    """Return the results of all rounds together."""
    total = Sample.empty()
    for sample in samples:
        total.extend(sample)
    return Calls(
        mounts_per_second=[round(len(sample.mounts) / seconds, 1) for sample in samples],
        mount=Timing.of(total.mounts),
        failed=len(total.errors),
    )


def one_round(callers: int, seconds: float, socket_path: Path, program: Path, directory: Path) -> Sample:
    # All callers begin together: starting a caller is work, too.
    begin = time.monotonic() + 0.5 + 0.05 * callers
    started = [
        Beside(partial(call, begin, begin + seconds, Helper(socket_path, program), directory / str(number)))
        for number in range(callers)
    ]
    total = Sample.empty()
    for each in started:
        total.extend(each.result())
    return total


def call(begin: float, end: float, helper: Helper, mountpoint: Path) -> Sample:
    """Mount and unmount between these monotonic times."""
    enter_private_namespace()
    mountpoint.mkdir(exist_ok=True)
    time.sleep(max(0, begin - time.monotonic()))
    sample = Sample.empty()
    while time.monotonic() < end:
        mount_and_unmount(helper, mountpoint, sample)
    return sample
