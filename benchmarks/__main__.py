"""All benchmarks in one run: what a mount costs beside the genuine fusermount3, and whether the promised bounds hold.

    .venv/bin/python -m benchmarks [--quick] [--write | --json FILE] [part ...]
    .venv/bin/python -m benchmarks --render

The parts latency, cpu, callers, datapath and memory compare; with ``--write`` their measurements go into
docs/performance.json, from which the tables and the plot of docs/performance.md are made. The parts load and volumes
print numbers beside bounds. ``--quick`` runs everything in short, to check that it runs: its numbers mean nothing.
Ends with status 1 if a bound is missed, or the data path is not the same; not so with ``--quick``.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from benchmarks import callers, cpu, datapath, latency, load, machine, memory, page, plot, results, volumes
from benchmarks.latency import GENUINE_PROGRAM
from benchmarks.results import Results
from benchmarks.section import Section
from tests.lab.broker import PROXY as PROXY_PROGRAM
from tests.lab.callers import enter_private_namespace
from tests.lab.load import Beside

ResultT = TypeVar("ResultT")

DOCS = Path(__file__).parents[1] / "docs"
PAGE = Section(DOCS / "performance.md", "make bench")
STORED, PLOT = DOCS / "performance.json", DOCS / "performance.svg"


@dataclass(frozen=True)
class Extent:
    """The extent of the measurements. Seconds are those of one job, or one number of callers, in one round."""

    calls: int
    cpu_batches: int
    cpu_mounts: int
    """In each batch."""
    caller_rounds: int
    caller_seconds: float
    datapath_fewest: int
    datapath_most: int
    """Rounds, depending on how much they differ."""
    datapath_seconds: float
    mounts: int
    volumes: int
    load: tuple[str, ...]
    """Options of benchmarks/load.py."""
    pause: float
    """Seconds for which the load of other processes is measured before each part."""


FULL = Extent(
    calls=1000,
    cpu_batches=10,
    cpu_mounts=100,
    caller_rounds=5,
    caller_seconds=4,
    datapath_fewest=20,
    datapath_most=120,
    datapath_seconds=0.25,
    mounts=1000,
    volumes=200,
    load=(),
    pause=5,
)
QUICK = Extent(
    calls=50,
    cpu_batches=2,
    cpu_mounts=10,
    caller_rounds=1,
    caller_seconds=1,
    datapath_fewest=2,
    datapath_most=2,
    datapath_seconds=0.25,
    mounts=50,
    volumes=10,
    load=("--mounts=50", "--standing=100", "--calls=20", "--callers=8", "--seconds=2", "--cycles=200", "--rounds=1"),
    pause=0.5,
)


class Part(NamedTuple):
    """A part that compares: its measurement, and its tables. Its name is that of the field of `Results`."""

    measure: Callable[[Extent], Any]
    show: Callable[[Any], str]


COMPARED = {
    "latency": Part(lambda extent: latency.measure(extent.calls), page.latency),
    "cpu": Part(lambda extent: cpu.measure(extent.cpu_batches, extent.cpu_mounts), page.cpu),
    "callers": Part(lambda extent: callers.measure(extent.caller_rounds, extent.caller_seconds), page.callers),
    "datapath": Part(
        lambda extent: datapath.measure(extent.datapath_fewest, extent.datapath_most, extent.datapath_seconds),
        page.datapath,
    ),
    "memory": Part(lambda extent: memory.measure(extent.mounts), page.memory),
}
#: Parts that print numbers beside bounds, and return the bounds that were missed.
BOUNDED: dict[str, Callable[[Extent], list[str]]] = {
    "load": lambda extent: load.run(load.parser().parse_args(extent.load)),
    "volumes": lambda extent: volumes.run(extent.volumes),
}
PARTS = (*COMPARED, *BOUNDED)


def compare(names: Sequence[str], extent: Extent) -> Results:
    """Measure these parts, and print their tables one by one."""
    busy, measured = [], {}
    for name in names:
        busy.append(machine.others_use(extent.pause))
        measured[name] = in_private_namespace(partial(COMPARED[name].measure, extent))
        print(f"\n{COMPARED[name].show(measured[name])}", flush=True)
    compared = Results(machine.describe(busy), quick=extent is QUICK, **measured)
    print(page.introduction(compared), flush=True)
    return compared


def in_private_namespace(measure: Callable[[], ResultT]) -> ResultT:
    """Return the result of `measure`, called in a separate process and mount namespace."""

    def body() -> ResultT:
        enter_private_namespace()
        return measure()

    return Beside(body).result()


def render() -> None:
    """Make tables and plot of docs/performance.md from the stored numbers."""
    stored = results.load(STORED)
    plot.draw(stored, STORED, PLOT)
    PAGE.write(page.rendered(stored))


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments. Ends the program if they don't go together."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; all")
    parser.add_argument("--quick", action="store_true", help="in short, to see that it runs")
    parser.add_argument("--write", action="store_true", help="put the results into docs/performance.*")
    parser.add_argument("--json", type=Path, metavar="FILE", help="put the results there, too")
    parser.add_argument("--render", action="store_true", help="measure nothing: docs/performance.* from what is stored")
    arguments = parser.parse_args(words)
    arguments.parts = arguments.parts or list(PARTS)
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if arguments.write and (missing := set(COMPARED) - set(arguments.parts)):
        parser.error(f"--write needs also: {', '.join(sorted(missing))}")
    return arguments


def main() -> None:
    arguments = parse()
    if arguments.render:
        render()
        return
    for needed in (GENUINE_PROGRAM, PROXY_PROGRAM):
        if not needed.exists():
            sys.exit(f"{needed} is missing: apt-get install fuse3, make static")
    load.allow_many_descriptors()
    extent = QUICK if arguments.quick else FULL
    missed = []
    if compared := [name for name in COMPARED if name in arguments.parts]:
        measured = compare(compared, extent)
        missed += measured.missed()
        if arguments.json:
            results.store(measured, arguments.json)
        if arguments.write:
            results.store(measured, STORED)
            render()
    for name in BOUNDED:
        if name in arguments.parts:
            missed += [f"{name}: {what}" for what in BOUNDED[name](extent)]
    for each in missed:
        print(f"MISSED {each}")
    sys.exit(1 if missed and not arguments.quick else 0)


if __name__ == "__main__":
    main()
