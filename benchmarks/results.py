"""The measurements of a run of the benchmarks, as docs/performance.json keeps them; `page` and `plot` show them.

Only measured numbers are in here. Ratios, medians and other derived values are computed where they are shown, so that
they can't differ from the measurements.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cattrs.preconf.json import make_converter

GENUINE, PROXY = "genuine fusermount3", "proxy and broker"
AS_ROOT, AS_USER = "proxy in a container, as root", "proxy in a container, as uid 1000"
USER_NAMESPACE = "proxy in a container with a user namespace"
IN_CONTAINERS = (AS_ROOT, AS_USER, USER_NAMESPACE)
#: The data path is the same if the ratio of the throughputs differs from 1.00 by no more than this.
SAME_WITHIN = 0.05

_converter = make_converter()


def percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return a confidence interval of 95 % or slightly more for the median; None if there are fewer than 6 values.

    The interval reaches from the r-th smallest to the r-th greatest value, and so depends on no distribution: it misses
    the median only if fewer than r values lie on one side of it. Their number is binomial with p = 1/2; r is the
    greatest number for which either side has a probability of at most 2.5 %. The values have to be independent.
    """
    rank, outcomes, fewer = 0, 1, 0  # of all 2**len(values), those with exactly `rank` and with fewer than that
    while 40 * (fewer + outcomes) <= 2 ** len(values):
        fewer += outcomes
        outcomes = outcomes * (len(values) - rank) // (rank + 1)
        rank += 1
    if not rank:
        return None
    ordered = sorted(values)
    return ordered[rank - 1], ordered[-rank]


@dataclass(frozen=True)
class Timing:
    """Durations of calls, in milliseconds."""

    p50: float
    p99: float
    calls: int
    p50_interval: tuple[float, float] | None = None
    """The confidence interval of 95 % for the p50. None if there were too few calls, or in results of earlier runs."""

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> "Timing":
        interval = median_interval(milliseconds)
        return cls(
            p50=round(percentile(milliseconds, 50), 4),
            p99=round(percentile(milliseconds, 99), 4),
            calls=len(milliseconds),
            p50_interval=interval and (round(interval[0], 4), round(interval[1], 4)),
        )


@dataclass(frozen=True)
class Latency:
    """Timings by helper; the others are compared with the first."""

    exec_to_descriptor: dict[str, Timing]
    start_to_exit: dict[str, Timing]
    not_measured: dict[str, str]
    """The callers left out of the measurements from exec, and why."""
    exec_to_exit: dict[str, Timing] = field(default_factory=dict)
    """Of the same calls as `exec_to_descriptor`. Empty in results of earlier runs."""


@dataclass(frozen=True)
class Use:
    """What some processes use for one mount: the mean of a batch."""

    cpu_milliseconds: float
    minor_faults: float


@dataclass(frozen=True)
class Cost:
    """What helper and broker use for a mount, for each batch; `broker` is empty if it takes no part."""

    mounts: int
    """The number in each batch."""
    helper: list[Use]
    broker: list[Use]

    def cpu_milliseconds(self) -> list[float]:
        """Return for each batch what all processes use together."""
        broker = self.broker or [Use(0, 0)] * len(self.helper)
        return [sum(use.cpu_milliseconds for use in pair) for pair in zip(self.helper, broker, strict=True)]


@dataclass(frozen=True)
class Transfer:
    """The result of fio in one round: throughput, and the latency of one read or write."""

    bytes_per_second: float
    p50_microseconds: float
    p99_microseconds: float


@dataclass(frozen=True)
class Job:
    """A job of fio in each round, on a filesystem mounted by the genuine helper, and on one mounted by the proxy.

    The jobs of a run may have different numbers of rounds: one that is precise is not run again.
    """

    name: str
    block_size: str
    jobs: int
    genuine: list[Transfer]
    proxy: list[Transfer]

    def title(self) -> str:
        return f"{self.name}, {self.block_size}, {self.jobs} {'job' if self.jobs == 1 else 'jobs'}"

    def of(self, helper: str) -> list[Transfer]:
        """Return the results on the filesystem that this helper mounted."""
        return self.genuine if helper == GENUINE else self.proxy

    def ratios(self) -> list[float]:
        """Return for each round the throughput through the proxy's filesystem relative to the genuine helper's."""
        pairs = zip(self.proxy, self.genuine, strict=True)
        return [proxy.bytes_per_second / genuine.bytes_per_second for proxy, genuine in pairs]

    def interval(self) -> tuple[float, float] | None:
        """Return the confidence interval of 95 % for the median of the ratios; None for fewer than 6 rounds."""
        return median_interval(self.ratios())

    def is_precise(self, within: float = SAME_WITHIN) -> bool:
        """Return whether neither end of the interval is farther from the median than that."""
        if not (interval := self.interval()):
            return False
        middle = statistics.median(self.ratios())
        return all(abs(end - middle) <= within for end in interval)

    def is_same(self) -> bool | None:
        """Return whether the ratio is 1.00 within `SAME_WITHIN`; None if the interval reaches across that bound."""
        if not (interval := self.interval()):
            return None
        low, high = interval
        if low >= 1 - SAME_WITHIN and high <= 1 + SAME_WITHIN:
            return True
        return False if high < 1 - SAME_WITHIN or low > 1 + SAME_WITHIN else None


@dataclass(frozen=True)
class DataPath:
    """The results of fio through `program`, the same on both sides."""

    program: str
    jobs: list[Job]


@dataclass(frozen=True)
class Calls:
    """The work of concurrent callers. `mounts_per_second` of all of them together, for each round."""

    mounts_per_second: list[float]
    mount: Timing
    failed: int


@dataclass(frozen=True)
class Concurrency:
    """So many callers at once, of each helper in turn."""

    callers: int
    genuine: Calls
    proxy: Calls

    def failed(self) -> int:
        return self.genuine.failed + self.proxy.failed


@dataclass(frozen=True)
class Waiting:
    """PSS in bytes of a helper that waits with auto_unmount: of one alone, and of each where ten wait."""

    alone: int
    each_of_ten: int


@dataclass(frozen=True)
class Memory:
    """PSS in bytes of all the broker's processes, without mounts and with so many; and of helpers that wait."""

    mounts: int
    broker_idle: int
    broker_with_mounts: int
    waiting: dict[str, Waiting]


@dataclass(frozen=True)
class Machine:
    """Machine, time and versions of a run."""

    date: str
    kernel: str
    processor: str
    processors: int
    memory: int
    versions: dict[str, str]
    busy: list[float]
    """The processors' load by others, in percent, before each part was measured."""


@dataclass(frozen=True)
class Results:
    """A run. Parts that were not selected are None."""

    machine: Machine
    quick: bool
    latency: Latency | None = None
    callers: list[Concurrency] | None = None
    datapath: DataPath | None = None
    memory: Memory | None = None
    cpu: dict[str, Cost] | None = None

    def missed(self) -> list[str]:
        """Return the broken promises: calls that failed, jobs for which the mounting helper makes a difference."""
        differing = [job for job in self.datapath.jobs if job.is_same() is False] if self.datapath else []
        return [
            *[f"callers: {each.failed()} calls failed" for each in self.callers or [] if each.failed()],
            *[f"datapath: {job.title()}: the ratio is not 1.00" for job in differing],
        ]


def store(results: Results, file: Path) -> None:
    file.write_text(_converter.dumps(results, indent=2) + "\n")


def load(file: Path) -> Results:
    """Return the results that `store` has written."""
    return _converter.loads(file.read_text(), Results)
