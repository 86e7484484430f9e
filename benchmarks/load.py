"""The load that the broker sustains: many mounts, many callers, a long run, and a malicious container.

    .venv/bin/python -m benchmarks.load [--mounts 1000] [--callers 64] [--seconds 60] [--cycles 20000] [part ...]

Prints each number beside its bound, and ends with status 1 if one is missed. Comparisons are measured in turn, in one
run, so that a ratio means something on a machine on which the milliseconds do not. Everything happens in a private
mount namespace against brokers that this module starts; nothing is left.
"""

import argparse
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.bounds import MIB, UNLIMITED, Report
from benchmarks.crowd import many_mounts, standing
from benchmarks.neighbours import neighbours
from benchmarks.results import percentile
from benchmarks.sample import Sample, caller
from tests.e2e.conftest import settle
from tests.e2e.hostile import mount, unmount
from tests.lab.broker import PROXY, Broker
from tests.lab.callers import enter_private_namespace
from tests.lab.load import Beside, Holding, holding

# Many callers ------------------------------------------------------------------------------------------------------


def many_callers(report: Report, arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as temporary, Broker(UNLIMITED) as broker:
        end = time.monotonic() + arguments.seconds
        callers = [caller(broker, Path(temporary) / str(number), end) for number in range(arguments.callers)]
        most = holding(broker.process.pid)
        while time.monotonic() < end:
            time.sleep(0.5)
            most = max(most, holding(broker.process.pid), key=lambda each: each.pss)
        total = Sample.empty()
        for each in callers:
            total.extend(each.result())
        calls = len(total.mounts) + len(total.unmounts)
        left = len(broker.mounts())
    report.title(
        f"{arguments.callers} callers at once for {arguments.seconds} s, each mounts and unmounts by the proxy"
    )
    report.say("calls a second", f"{calls / arguments.seconds:.0f}")
    report.say("mount, p50 and p99", f"{percentile(total.mounts, 50):.0f}, {percentile(total.mounts, 99):.0f} ms")
    report.say("unmount, p50 and p99", f"{percentile(total.unmounts, 50):.0f}, {percentile(total.unmounts, 99):.0f} ms")
    report.at_most("mount, the longest: ratio to the p50", max(total.mounts) / percentile(total.mounts, 50), 3, "x")
    report.no_errors(total.errors)
    report.at_most("mounts left", left, 0, "")
    report.say("most processes, descriptors at once", f"{most.processes}, {most.descriptors}")
    report.say("most RSS", f"{most.rss / MIB:.1f} MB")
    report.at_most("most PSS", most.pss / MIB, 60, "MB")


# A long run --------------------------------------------------------------------------------------------------------


def cycle(broker: Broker, mountpoint: Path, times: int) -> int:
    enter_private_namespace()
    mountpoint.mkdir(exist_ok=True)
    for _ in range(times):
        os.close(mount(broker, mountpoint))
        unmount(broker, mountpoint)
    return times


def many_cycles(report: Report, arguments: argparse.Namespace) -> None:
    at_once = 4
    with tempfile.TemporaryDirectory() as temporary, Broker(UNLIMITED) as broker:

        def run(times: int) -> Holding:
            places = [Path(temporary) / str(number) for number in range(at_once)]
            cycles = [Beside(partial(cycle, broker, place, times // at_once)) for place in places]
            for each in cycles:
                each.result()
            settle(broker)
            time.sleep(1)
            return min((holding(broker.process.pid) for _ in range(10)), key=lambda each: each.pss)

        before = run(arguments.cycles // 10)
        begun = time.monotonic()
        after = run(arguments.cycles)
        took = time.monotonic() - begun
        table = sum(each.stat().st_size for each in (broker.directory / "state").iterdir())
    report.title(
        f"{arguments.cycles} mounts and unmounts, {at_once} at a time, after {arguments.cycles // 10} to warm up"
    )
    report.say("cycles a second", f"{arguments.cycles / took:.0f}")
    report.say("PSS before, after", f"{before.pss / MIB:.2f}, {after.pss / MIB:.2f} MB")
    report.at_most("growth of descriptors", after.descriptors - before.descriptors, 0, "")
    report.at_most("growth of processes", after.processes - before.processes, 0, "")
    report.at_most("growth of PSS", (after.pss - before.pss) / MIB, 1, "MB")
    report.at_most("table of mounts on disk", table / MIB, 8, "MB")


PARTS: dict[str, Callable[[Report, argparse.Namespace], None]] = {
    "mounts": many_mounts,
    "callers": many_callers,
    "cycles": many_cycles,
    "standing": standing,
    "neighbours": neighbours,
}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; all")
    parser.add_argument("--mounts", type=int, default=1000, help="that live at once (%(default)s)")
    parser.add_argument("--calls", type=int, default=300, help="measured beside those (%(default)s)")
    parser.add_argument("--standing", type=int, default=5000, help="that live at once, unused (%(default)s)")
    parser.add_argument("--callers", type=int, default=64, help="at once (%(default)s)")
    parser.add_argument("--seconds", type=int, default=60, help="for which they call (%(default)s)")
    parser.add_argument("--cycles", type=int, default=20_000, help="of mount and unmount (%(default)s)")
    parser.add_argument("--rounds", type=int, default=8, help="with a harmful container (%(default)s)")
    return parser


def main() -> None:
    arguments = parser().parse_args()
    if not PROXY.exists():
        sys.exit(f"{PROXY} is missing: make static")
    missed = run(arguments)
    for each in missed:
        print(f"MISSED {each}")
    sys.exit(1 if missed else 0)


def run(arguments: argparse.Namespace) -> list[str]:
    """Run the parts; return the bounds that were missed."""
    allow_many_descriptors()
    missed = []
    for name in arguments.parts or PARTS:
        # In a separate process: it goes through mount namespaces.
        of_part = Beside(partial(run_part, name, arguments)).result()
        missed += [f"{name}: {what}" for what in of_part]
    return missed


def allow_many_descriptors() -> None:
    """Let this process and its children open as many descriptors as the system allows: each filesystem has one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run_part(name: str, arguments: argparse.Namespace) -> list[str]:
    enter_private_namespace()
    report = Report()
    PARTS[name](report, arguments)
    return report.missed


if __name__ == "__main__":
    main()
