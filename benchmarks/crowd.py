"""Brokers with many live filesystems: what the next mount costs there, and what the broker itself does.

The filesystems are in a mount namespace of their own, and idle: their descriptors are this process's, which answers the
kernel's first request for each, and while `serve` runs the broker's, if it asks one whether it is alive.
"""

import argparse
import os
import select
import subprocess
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median

import psutil

from benchmarks.bounds import KIB, MIB, UNLIMITED, Report
from benchmarks.results import percentile
from benchmarks.sample import Sample, mount_and_unmount
from fusermount3_broker.kernel import syscalls
from tests.e2e.conftest import settle
from tests.e2e.hostile import fuse_mounts, mount, unmount
from tests.lab import tinyfuse
from tests.lab.broker import PROGRAM, Broker
from tests.lab.callers import enter_private_namespace
from tests.lab.kernel import keeping_fusectl
from tests.lab.load import Helper, Holding, holding

#: What is measured several times: `mounts`, and restarts.
TIMES = 5
#: Seconds after which the broker has found the process that serves the last mount, and has looked at it again.
SETTLED = 10.0


class Crowd:
    """A broker, and a mount namespace with so many of its live filesystems."""

    def __init__(self, stack: ExitStack, size: int) -> None:
        self.size = size
        self.broker = stack.enter_context(Broker(UNLIMITED))
        self.helper = Helper(self.broker.socket)
        stack.callback(self.helper.close)
        self.directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.mountpoint = self.directory / "measured"
        self.mountpoint.mkdir()
        self._namespace_of_host = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, self._namespace_of_host)
        enter_private_namespace()
        self._namespace = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, self._namespace)
        self.by_proxy = Sample.empty()
        self.by_client = Sample.empty()
        self._live: list[tuple[Path, int]] = []
        stack.callback(self.empty)
        self.leave()

    def fill(self) -> None:
        self.enter()
        for number in range(self.size):
            place = self.directory / str(number)
            place.mkdir()
            descriptor = mount(self.broker, place)
            self._live.append((place, descriptor))
            tinyfuse.answer(descriptor)  # or a request would wait in each: no idle mount has one

    def serve(self, seconds: float) -> None:
        """Answer what is asked of the filesystems, for so long."""
        asked = select.poll()
        for _, descriptor in self._live:
            asked.register(descriptor, select.POLLIN)
        give_up = time.monotonic() + seconds
        while (left := give_up - time.monotonic()) > 0:
            for descriptor, _ in asked.poll(1000 * left):
                tinyfuse.answer(descriptor)

    def empty(self) -> None:
        """Unmount everything, without the broker: whatever has happened, no process may walk into a dead filesystem."""
        self.enter()
        for _, descriptor in self._live:
            os.close(descriptor)
        for each in fuse_mounts():
            with suppress(OSError):  # the broker was quicker: it finds dead mounts
                syscalls.umount2(os.fsencode(each.mountpoint), syscalls.MNT_DETACH)
        self.leave()

    def enter(self) -> None:
        syscalls.setns(self._namespace, syscalls.CLONE_NEWNS)

    def leave(self) -> None:
        """Go back to where this process was, and where its broker was started."""
        syscalls.setns(self._namespace_of_host, syscalls.CLONE_NEWNS)

    def seconds_to_restart(self) -> float:
        """Restart the broker where it was started; return the seconds from SIGTERM until it serves again."""
        self.leave()
        begun = time.perf_counter()
        self.broker.stop()
        self.broker.start()
        return time.perf_counter() - begun

    def measure(self) -> None:
        """Mount and unmount once more, with the proxy and with a client that needs no start."""
        self.enter()
        mount_and_unmount(self.helper, self.mountpoint, self.by_proxy)
        begun = time.perf_counter()
        descriptor = mount(self.broker, self.mountpoint)
        mounted = time.perf_counter()
        os.close(descriptor)
        unmount(self.broker, self.mountpoint)
        self.by_client.mounts.append(1000 * (mounted - begun))
        self.by_client.unmounts.append(1000 * (time.perf_counter() - mounted))

    def holding(self) -> Holding:
        """Return the most that the broker's processes hold in a while: it makes children, and ends them."""
        settle(self.broker)
        return max((holding(self.broker.process.pid) for _ in range(10)), key=lambda each: each.pss)


def measure_in_turn(one: Crowd, other: Crowd, calls: int) -> None:
    for number in range(calls):
        for crowd in (one, other) if number % 2 else (other, one):
            crowd.measure()


def many_mounts(report: Report, arguments: argparse.Namespace) -> None:
    with ExitStack() as stack:
        few, many = Crowd(stack, 10), Crowd(stack, arguments.mounts)
        for _ in range(100):  # so that the measurement is warm
            many.measure()
        many.by_proxy, many.by_client = Sample.empty(), Sample.empty()
        empty = many.holding()
        for crowd in (few, many):
            crowd.fill()
        measure_in_turn(few, many, arguments.calls)
        full = many.holding()
        report.title(f"The n-th mount: {many.size} live beside {few.size} live, {arguments.calls} calls in turn")
        for name, here, there in (
            ("proxy, exec to descriptor", few.by_proxy.mounts, many.by_proxy.mounts),
            ("proxy, unmount, exec to exit", few.by_proxy.unmounts, many.by_proxy.unmounts),
            ("broker alone, mount", few.by_client.mounts, many.by_client.mounts),
            ("broker alone, unmount", few.by_client.unmounts, many.by_client.unmounts),
        ):
            p50 = percentile(here, 50), percentile(there, 50)
            report.say(f"{name}: p50 at {few.size}, at {many.size}", f"{p50[0]:.2f}, {p50[1]:.2f} ms")
            report.at_most(f"{name}: ratio of the p50", p50[1] / p50[0], 1.2, "x")
        report.no_errors(few.by_proxy.errors + many.by_proxy.errors)
        report.title("Memory of all the broker's processes")
        report.say("PSS, and RSS, without mounts", f"{empty.pss / MIB:.1f}, {empty.rss / MIB:.1f} MB")
        report.say(f"RSS with {many.size} mounts", f"{full.rss / MIB:.1f} MB")
        report.say("PSS that a mount adds", f"{(full.pss - empty.pss) / many.size / KIB:.2f} KB")
        most = 60 + 4 * many.size / KIB
        report.at_most(f"PSS with {many.size} mounts", full.pss / MIB, most, "MB")


def standing(report: Report, arguments: argparse.Namespace) -> None:
    """Measure a broker with so many mounts that nobody uses: its idle time, `mounts`, and a restart."""
    with ExitStack() as stack:
        few, many = Crowd(stack, 1), Crowd(stack, arguments.standing)
        for crowd in (few, many):
            crowd.fill()
        measure_in_turn(few, many, arguments.calls)
        p50 = [percentile(each.by_proxy.mounts, 50) for each in (few, many)]
        listed = [seconds_to_list(many.broker, many.size) for _ in range(TIMES)]
        anew = [many.seconds_to_restart() for _ in range(TIMES)]
        with keeping_fusectl():
            many.seconds_to_restart()  # the broker notes the mounts as this fusectl knows them
            restarted = [many.seconds_to_restart() for _ in range(TIMES)]
        kept = len(many.broker.mounts())
    with ExitStack() as stack:
        crowd = Crowd(stack, arguments.mounts)
        crowd.fill()
        crowd.serve(SETTLED)
        busy = busy_percent(crowd, arguments.seconds)
    report.title(f"{arguments.standing} mounts that nobody uses")
    report.say("proxy, exec to descriptor: p50 at 1, at all", f"{p50[0]:.2f}, {p50[1]:.2f} ms")
    report.at_most("proxy, exec to descriptor: ratio of the p50", p50[1] / p50[0], 1.1, "x")
    report.at_most("`mounts`, exec to exit: p50", median(listed), 0.5, "s")
    report.at_most("SIGTERM until a new broker serves: p50", median(restarted), 0.5, "s")
    report.say("the same, where only the broker uses fusectl: p50", f"{median(anew):.2f} s")
    report.at_most("mounts lost by the restarts", many.size - kept, 0, "")
    report.title(f"{arguments.mounts} mounts that nobody uses, for {arguments.seconds} s")
    report.at_most("the broker's share of one processor", busy, 0.2, "%")


def seconds_to_list(broker: Broker, expected: int) -> float:
    """Return how long `fusermount3-broker mounts` takes, from exec to exit; AssertionError if it lists others."""
    begun = time.perf_counter()
    listed = subprocess.run(
        [PROGRAM, "mounts", "--config", broker.config], stdout=subprocess.PIPE, text=True, check=True
    )
    took = time.perf_counter() - begun
    assert len(listed.stdout.splitlines()) >= expected, listed.stdout[:1000]
    return took


def busy_percent(crowd: Crowd, seconds: float) -> float:
    """Return which part of one processor all the broker's processes use while nobody calls, in percent."""
    broker = crowd.broker
    lasting = [psutil.Process(broker.process.pid), broker.front, broker.mounter]

    def used() -> float:
        # The mounter's children, which come and go, count for it when they have ended.
        return sum(sum(each.cpu_times()[:4]) for each in lasting)

    before, begun = used(), time.monotonic()
    crowd.serve(seconds)
    return 100 * (used() - before) / (time.monotonic() - begun)
