"""CPU time and page faults of a mount: of the helper, and of the broker with all its processes.

The caller counts what the helper used (RUSAGE_CHILDREN): it waits for the helper, which waits for its own children.

The broker's CPU time is that of a cgroup in which it has been put. Its mounts are made by processes that are forked in
advance, end afterwards, and are reaped by the mounter, by another child or, if their parent has ended, by the
supervisor. The cgroup's clock counts them all, whoever reaps them and whether or not anybody has; and in nanoseconds,
where the sum of the times in /proc/PID/stat is in ticks of 10 ms, rounded down four times for each process.

Page faults are counted by a cgroup only with the controller for memory, and late. So they are the sum over the broker's
processes of their own and their reaped children's (/proc/PID/stat, minflt and cminflt). Those are exact, and none is
lost: the supervisor is a subreaper, so that no child leaves the tree, and who reaps a child inherits its count.

A batch begins and ends when the broker is idle. So it includes the children forked to replace those that were used, and
what the broker does when a filesystem has gone, because the mounts are removed without it; but not unmounting itself.
Work in kernel threads and interrupts is in no process's time.
"""

import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from benchmarks.latency import GENUINE_PROGRAM, in_turn
from benchmarks.remote_caller import Mounted, RemoteCaller, in_containers
from benchmarks.results import AS_ROOT, GENUINE, PROXY, Cost, Use
from tests.lab import cgroups
from tests.lab.broker import PROXY as PROXY_PROGRAM
from tests.lab.broker import Broker
from tests.lab.load import Helper

#: Seconds in which a broker that still works replaces a child, or notices that a filesystem has gone.
IDLE = 0.5
#: Indexes in /proc/PID/stat after the name (proc_pid_stat(5)).
MINFLT, CMINFLT = 7, 8


@dataclass(frozen=True)
class Total:
    """What the processes of a broker have used since they were started, or put into the cgroup."""

    cpu_milliseconds: float
    minor_faults: int


class Meter:
    """Counts what a broker uses: all processes that it has, had and will have."""

    def __init__(self, broker: Broker, cgroup: Path) -> None:
        self._leader = psutil.Process(broker.process.pid)
        self._cgroup = cgroup
        self._wait_until_idle()  # so that none is forked by one that has not been put into the cgroup yet
        for process in self._processes():
            (cgroup / "cgroup.procs").write_text(str(process.pid))

    def total(self) -> Total:
        """Wait until the broker is idle, without asking it, which would be work; return what it has used."""
        self._wait_until_idle()
        return Total(cpu_milliseconds(self._cgroup), sum(minor_faults(each.pid) for each in self._processes()))

    def _wait_until_idle(self) -> None:
        last = None
        while (now := [each.pid for each in self._processes()]) != last:
            last = now
            time.sleep(IDLE)

    def _processes(self) -> list[psutil.Process]:
        return [self._leader, *self._leader.children(recursive=True)]


@contextmanager
def metered(broker: Broker) -> Iterator[Meter]:
    """Yield the meter of a broker. The block has to end the broker, whose cgroup is removed afterwards."""
    name = f"/fusermount3-proxy-benchmark-{secrets.token_hex(4)}"
    cgroup = Path(f"{hierarchy()}{name}")
    cgroup.mkdir()
    try:
        with broker:
            yield Meter(broker, cgroup)
    finally:
        cgroups.remove(name)


def hierarchy() -> Path:
    """Return the top of the hierarchy of cgroups that counts CPU time: version 1, or version 2, which always does."""
    first = cgroups.CGROUPS / "cpuacct"
    return first if first.exists() else cgroups.CGROUPS


def cpu_milliseconds(cgroup: Path) -> float:
    """Return the CPU time of all processes that are or were in the cgroup, user and system together."""
    if (clock := cgroup / "cpuacct.usage").exists():
        return int(clock.read_text()) / 1e6
    lines = (line.split() for line in (cgroup / "cpu.stat").read_text().splitlines())
    return next(int(value) / 1e3 for name, value in lines if name == "usage_usec")


def minor_faults(pid: int) -> int:
    """Return the minor page faults of a process and of its children that were reaped."""
    numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(numbers[MINFLT]) + int(numbers[CMINFLT])


def batch(caller: RemoteCaller, mounts: int, meter: Meter) -> tuple[Use, Use]:
    """Mount so many times; return what helper and broker used for one of them."""
    before = meter.total()
    mounted = [caller.mount() for _ in range(mounts)]
    after = meter.total()
    broker = Use(
        (after.cpu_milliseconds - before.cpu_milliseconds) / mounts,
        (after.minor_faults - before.minor_faults) / mounts,
    )
    return mean(mounted), broker


def mean(mounted: list[Mounted]) -> Use:
    return Use(
        sum(each.cpu for each in mounted) / len(mounted),
        sum(each.minor_faults for each in mounted) / len(mounted),
    )


def cost(mounts: int, batches: list[tuple[Use, Use]], *, has_broker: bool) -> Cost:
    """Return the results of the batches of one helper."""
    helper, broker = zip(*batches, strict=True)
    return Cost(mounts, list(map(rounded, helper)), list(map(rounded, broker)) if has_broker else [])


def rounded(use: Use) -> Use:
    return Use(round(use.cpu_milliseconds, 4), round(use.minor_faults, 1))


def measure(batches: int, mounts: int) -> dict[str, Cost]:
    """Measure so many batches of so many mounts by each helper, in turn. Needs a private mount namespace."""
    broker = Broker()
    with ExitStack() as stack:
        mountpoint = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        meter = stack.enter_context(metered(broker))
        callers = {
            name: stack.enter_context(RemoteCaller(Helper(broker.socket, program), mountpoint))
            for name, program in ((GENUINE, GENUINE_PROGRAM), (PROXY, PROXY_PROGRAM))
        }
        callers |= stack.enter_context(in_containers(broker, AS_ROOT))
        for caller in callers.values():
            caller.mount()  # the first call of each is different: nothing is in memory yet
        one_batch = {name: partial(batch, caller, mounts, meter) for name, caller in callers.items()}
        measured = in_turn(batches, one_batch)
        return {name: cost(mounts, each, has_broker=name != GENUINE) for name, each in measured.items()}
