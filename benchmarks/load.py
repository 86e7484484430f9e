"""The load that the broker sustains: many mounts, many callers, a long run, and a malicious container.

    .venv/bin/python -m benchmarks.load [--mounts 1000] [--callers 64] [--seconds 60] [--cycles 20000] [part ...]

Prints each number beside its bound, and ends with status 1 if one is missed. Comparisons are measured in turn, in one
run, so that a ratio means something on a machine on which the milliseconds do not. Everything happens in a private
mount namespace against brokers that this module starts; nothing is left.
"""

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.results import percentile
from fusermount3_broker.kernel import syscalls
from tests.e2e.conftest import settle
from tests.e2e.hostile import fuse_mounts, mount, unmount
from tests.lab.broker import PROXY, Broker
from tests.lab.callers import enter_private_namespace
from tests.lab.images import DEBIAN, image_tag
from tests.lab.load import Beside, Call, Helper, Holding, holding
from tests.lab.podman import Container, Options, Volume

SOURCES = Path(__file__).parents[1]
#: The shipped settings that tests switch off: the search for dead mounts, and the limits.
SHIPPED = "dead_mounts_seconds = 2\n[limits]"
#: The limits by which one caller may have as many mounts and requests as are measured here.
NO_LIMITS = "mounts = 0\nrequests_per_second = 0\nconcurrent = 0"
UNLIMITED = f"mount_max = -1\n{SHIPPED}\n{NO_LIMITS}"
KIB, MIB = 1024, 1024 * 1024


@dataclass
class Report:
    """Prints numbers, and where there is a bound, the bound and whether it holds."""

    missed: list[str] = field(default_factory=list)

    def title(self, text: str) -> None:
        print(f"\n{text}", flush=True)

    def say(self, what: str, value: str) -> None:
        print(f"  {what:58} {value:>12}", flush=True)

    def no_errors(self, texts: list[str]) -> None:
        self.at_most("calls that failed", len(texts), 0, "")
        for text in sorted(set(texts))[:5]:
            print(f"    {text}", flush=True)

    def at_most(self, what: str, value: float, most: float, unit: str) -> None:
        held = value <= most
        if not held:
            self.missed.append(what)
        verdict = "" if held else "  MISSED"
        print(f"  {what:58} {value:>9.2f} {unit:2}  (at most {most:.2f} {unit}){verdict}", flush=True)


class Sample(NamedTuple):
    """Milliseconds of successful calls, and the messages of the others."""

    mounts: list[float]
    unmounts: list[float]
    errors: list[str]

    @classmethod
    def empty(cls) -> "Sample":
        return cls([], [], [])

    def extend(self, other: "Sample") -> None:
        self.mounts.extend(other.mounts)
        self.unmounts.extend(other.unmounts)
        self.errors.extend(other.errors)


def note(call: Call, milliseconds: list[float], errors: list[str]) -> None:
    if call.status:
        errors.append(call.said)
    else:
        milliseconds.append(1000 * call.seconds)


def mount_and_unmount(helper: Helper, mountpoint: Path, sample: Sample) -> None:
    """Call the proxy twice, as a FUSE program does."""
    mounted = helper.mount(mountpoint)
    note(mounted, sample.mounts, sample.errors)
    if mounted.descriptor >= 0:
        os.close(mounted.descriptor)
    if mounted.status == 0:
        note(helper.unmount(mountpoint), sample.unmounts, sample.errors)


# The n-th mount ----------------------------------------------------------------------------------------------------


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
        enter_private_namespace()
        self._namespace = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, self._namespace)
        self.by_proxy = Sample.empty()
        self.by_client = Sample.empty()
        self._live: list[tuple[Path, int]] = []
        stack.callback(self.empty)

    def fill(self) -> None:
        self.enter()
        for number in range(self.size):
            place = self.directory / str(number)
            place.mkdir()
            self._live.append((place, mount(self.broker, place)))

    def empty(self) -> None:
        """Unmount everything, without the broker: whatever has happened, no process may walk into a dead filesystem."""
        self.enter()
        for _, descriptor in self._live:
            os.close(descriptor)
        for each in fuse_mounts():
            with suppress(OSError):  # the broker was quicker: it finds dead mounts
                syscalls.umount2(os.fsencode(each.mountpoint), syscalls.MNT_DETACH)

    def enter(self) -> None:
        syscalls.setns(self._namespace, syscalls.CLONE_NEWNS)

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


def many_mounts(report: Report, arguments: argparse.Namespace) -> None:
    with ExitStack() as stack:
        few, many = Crowd(stack, 10), Crowd(stack, arguments.mounts)
        for _ in range(100):  # so that the measurement is warm
            many.measure()
        many.by_proxy, many.by_client = Sample.empty(), Sample.empty()
        empty = many.holding()
        for crowd in (few, many):
            crowd.fill()
        for number in range(arguments.calls):
            for crowd in (few, many) if number % 2 else (many, few):
                crowd.measure()
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


# Many callers ------------------------------------------------------------------------------------------------------


def call_until(end: float, socket_path: Path, mountpoint: Path, pause: float = 0.0) -> Sample:
    """Mount and unmount in a separate mount namespace, as a container would, until the monotonic time `end`.

    Before each call it waits for `pause` seconds on average, and for no fixed time: else it would always meet the same
    point of the tenth of a second in which other processes have their share of the processors.
    """
    enter_private_namespace()
    helper = Helper(socket_path)
    sample = Sample.empty()
    while time.monotonic() < end:
        mount_and_unmount(helper, mountpoint, sample)
        time.sleep(random.uniform(0, 2 * pause))
    return sample


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
    report.no_errors(total.errors)
    report.at_most("mounts left", left, 0, "")
    report.say("most processes, descriptors at once", f"{most.processes}, {most.descriptors}")
    report.say("most RSS", f"{most.rss / MIB:.1f} MB")
    report.at_most("most PSS", most.pss / MIB, 60, "MB")


def caller(broker: Broker, mountpoint: Path, end: float, pause: float = 0.0) -> Beside[Sample]:
    mountpoint.mkdir(exist_ok=True)
    return Beside(lambda: call_until(end, broker.socket, mountpoint, pause))


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


# Neighbours --------------------------------------------------------------------------------------------------------

#: The container's activities in turn. It may use half a processor, and can't be kept from using that, be it for system
#: calls that make a server on the host work: the broker is responsible for the additional effect of "does harm".
IDLE, COMPUTES, FLOODS_ANOTHER, HARMS = "is idle", "computes", "floods another server", "does harm"
#: In the container: the beginning of both scripts.
TURNS = f"""
def harm_to_do():
    with open("/work/turn") as turn:
        now = turn.read()
    if now in ({FLOODS_ANOTHER!r}, {HARMS!r}):
        return now
    if now == {COMPUTES!r}:
        sum(range(100_000))
    else:
        time.sleep(0.05)
"""

#: On the host: a server that does nothing for any client.
ANOTHER_SERVER = """
import signal, socket, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[1])
listener.listen(16)
served = 0
try:
    while True:
        connection, _ = listener.accept()
        connection.close()
        served += 1
finally:
    print(served)
"""

#: In the container: a few processes that make as many requests as they can.
FLOOD = f"""
import os, socket, sys, time
{TURNS}
sys.path.insert(0, "/usr/lib/python3/dist-packages")
from fusermount3_proxy import wire

PATHS = {{{HARMS!r}: "/run/fusermount3-proxy/broker.sock", {FLOODS_ANOTHER!r}: "/work/another.sock"}}
os.makedirs("/tmp/mnt", exist_ok=True)
REQUEST = wire.encode_request(wire.MountRequest(mountpoint=b"/tmp/mnt", options=b"subtype=flood"))

def connect():
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(10)
    connection.connect(path)
    return connection

def half_open(_):
    open_ = [connect() for _ in range(8)]
    time.sleep(0.01)

def garbage(_):
    connect().send(b"garbage" * 1000)

def never_confirmed(mountpoint):
    connection = connect()
    socket.send_fds(connection, [REQUEST], [os.open(mountpoint, os.O_PATH)])
    _, descriptors, _, _ = socket.recv_fds(connection, 65536, 4)
    for each in descriptors:
        os.close(each)

for number, harm in enumerate((half_open, garbage, never_confirmed) * 4):
    if os.fork() == 0:
        break
mountpoint = "/tmp/mnt%d" % number
os.makedirs(mountpoint, exist_ok=True)
while True:
    path = PATHS.get(harm_to_do())
    if not path:
        continue
    try:
        harm(mountpoint)
    except OSError:
        pass
"""

#: In the container: holds filesystems that never answer, and makes the broker look at them.
HUNG = f"""
import os, socket, sys, time
{TURNS}
sys.path.insert(0, "/usr/lib/python3/dist-packages")
from fusermount3_proxy import approach, client, wire

held = []
for number in range(32):
    mountpoint = b"/tmp/mnt%d" % number
    os.makedirs(mountpoint, exist_ok=True)
    request = wire.MountRequest(mountpoint=mountpoint, options=b"subtype=hung")
    answer = client.ask(approach.DEFAULT_PATH, request, os.open(mountpoint, os.O_PATH))
    assert answer.reply.errno == 0, answer.reply.text
    client.commit(answer)
    answer.connection.close()
    held.append(answer.descriptor)
    if os.fork() == 0:
        break
print("hung", flush=True)
while True:
    if not harm_to_do():
        continue
    try:
        request = wire.MountRequest(mountpoint=mountpoint, options=b"subtype=over")
        client.ask(approach.DEFAULT_PATH, request, os.open(mountpoint, os.O_PATH)).connection.close()
    except Exception:
        pass
"""


@contextmanager
def harmful(broker: Broker, script: str, directory: Path) -> Iterator[Callable[[str], None]]:
    """Run `script` in a container that may use half a processor; yield the function that selects its activity."""
    volumes = [
        *broker.volumes(),
        Volume(SOURCES / "fusermount3_proxy", "/usr/lib/python3/dist-packages/fusermount3_proxy"),
        Volume(directory, "/work"),
    ]
    options = Options(volumes=volumes, extra=["--cpus", "0.5"])

    def turn(to: str) -> None:
        (directory / "turn").write_text(to)
        time.sleep(1)

    turn(IDLE)
    with Container(image_tag(DEBIAN), ["python3", "-c", script], options):
        time.sleep(1)
        try:
            yield turn
        finally:
            turn(IDLE)


@contextmanager
def another_server(path: Path) -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", ANOTHER_SERVER, path], stdout=subprocess.PIPE) as server:
        try:
            yield
        finally:
            server.terminate()
            said, _ = server.communicate()
    assert int(said), "nobody has flooded it"


def neighbours(report: Report, arguments: argparse.Namespace) -> None:
    for name, script, turns, quiet in (
        ("floods the broker", FLOOD, (IDLE, COMPUTES, FLOODS_ANOTHER, HARMS), FLOODS_ANOTHER),
        ("holds 32 hung filesystems", HUNG, (IDLE, COMPUTES, HARMS), IDLE),
    ):
        samples = {each: Sample.empty() for each in turns}
        with tempfile.TemporaryDirectory() as temporary, Broker(SHIPPED) as broker:
            directory = Path(temporary)
            with ExitStack() as stack:
                if FLOODS_ANOTHER in turns:
                    stack.enter_context(another_server(directory / "another.sock"))
                turn = stack.enter_context(harmful(broker, script, directory))
                for _ in range(arguments.rounds):
                    for each, sample in samples.items():
                        turn(each)
                        sample.extend(phase(broker, directory))
        before = ", ".join(turns[:-1])
        report.title(f"Another caller, while a container {before}, {name} (in turn, {arguments.rounds} times)")
        for what in ("mount", "unmount"):
            beside = [getattr(sample, f"{what}s") for sample in samples.values()]
            if min(map(len, beside)) < 2:
                report.at_most(f"{what}: fewer than two calls were answered", 1, 0, "")
                continue
            for percent in (50, 99):
                figures = ", ".join(f"{percentile(each, percent):.1f}" for each in beside)
                report.say(f"{what}, p{percent}", f"{figures} ms")
            *references, harm = (percentile(each, 99) for each in beside)
            for each, reference in zip(turns, references, strict=False):
                ratio, text = harm / reference, f"{what}, p99 beside when it {each}"
                if each == quiet:
                    report.at_most(text, ratio, 2, "x")
                else:
                    report.say(text, f"{ratio:.2f} x")
        report.no_errors([error for sample in samples.values() for error in sample.errors])


def phase(broker: Broker, directory: Path) -> Sample:
    return caller(broker, directory / "other", time.monotonic() + 5, pause=0.04).result()


PARTS: dict[str, Callable[[Report, argparse.Namespace], None]] = {
    "mounts": many_mounts,
    "callers": many_callers,
    "cycles": many_cycles,
    "neighbours": neighbours,
}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; all")
    parser.add_argument("--mounts", type=int, default=1000, help="that live at once (%(default)s)")
    parser.add_argument("--calls", type=int, default=300, help="measured beside those (%(default)s)")
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
