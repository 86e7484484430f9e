"""A long run under load, with faults injected at random: what was survived, what was lost.

    .venv/bin/python -m benchmarks.soak [--minutes 20] [--seed N] [--write]

Containers run real FUSE programs, others call without end; meanwhile parts of the broker are killed, programs are
killed and stopped, clients die, files are damaged. Who was not hit must see nothing of it but a slower answer. With
``--write`` the report goes into docs/reliability.md. Ends with status 1 if anything was lost, leaked or failed.
"""

import argparse
import os
import random
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from benchmarks.section import Section
from tests.e2e.conftest import settle, wait_until
from tests.lab.broker import PROXY, Broker
from tests.lab.callers import Seen, enter_private_namespace, fuse_mounts, start_callers
from tests.lab.faults import FRONT, MOUNTER, kill, status_of
from tests.lab.images import BUSYBOX, image_tag
from tests.lab.load import Beside, Helper, Holding, holding
from tests.lab.podman import FUSE_STAND_IN, Container, Options, Volume
from tests.lab.programs import whoamifs

REPORT = Section(Path(__file__).parents[1] / "docs/reliability.md", "make soak")
CONFIGURATION = "dead_mounts_seconds = 1"
CALLERS = 3
MIB = 1024 * 1024
#: Seconds after which the mount of a program that was killed has to be gone, as docs/reliability.md promises.
REAPED = 5

#: The first process of a container: a shell waits for whatever has lost its parent, as FUSE programs in the background
#: have. Nobody else does, and the container has no room for more processes after some thousands.
REAPER = ("sh", "-c", "while :; do sleep 1; done")
#: In a container: keeps one filesystem, mounts and unmounts another, and says what goes wrong.
WORK = """
kept=/home/user/kept worked=/home/user/worked cycles=0
mkdir -p $kept $worked
said=$(whoamifs $kept 2>&1) || echo "error: $said"
while [ ! -e /work/stop ]; do
    if said=$(whoamifs $worked 2>&1); then
        grep -q ^uid= $worked/whoami || echo "lost: a filesystem just mounted"
        said=$(fusermount3 -u $worked 2>&1) || echo "error: $said"
        cycles=$((cycles + 1))
    else
        echo "error: $said"
        sleep 0.2
    fi
    grep -q ^uid= $kept/whoami || echo "lost: a filesystem that was kept"
done
said=$(fusermount3 -u $kept 2>&1) || echo "error: $said"
echo "cycles: $cycles"
"""


@dataclass
class Report:
    """What has happened."""

    seed: int
    minutes: float
    faults: Counter[str] = field(default_factory=Counter)
    seen: Seen = field(default_factory=Seen)
    cycles: int = 0
    begin: Holding | None = None
    end: Holding | None = None

    def good(self) -> bool:
        return not self.seen.problems()

    def markdown(self) -> str:
        """Return the report as docs/reliability.md has it."""
        assert self.begin, "the run has not begun"
        assert self.end, "the run has not ended"
        faults = "".join(f"| {kind} | {count} |\n" for kind, count in sorted(self.faults.items()))
        rows = [
            ("faults survived", f"{self.faults.total()}"),
            ("mounts and unmounts by callers", f"{len(self.seen.mounts) + len(self.seen.unmounts)}"),
            ("mounts and unmounts by FUSE programs in containers", f"{2 * self.cycles}"),
            ("lost mounts", f"{len(self.seen.lost)}"),
            ("leaked mounts", f"{len(self.seen.leaked)}"),
            ("calls that failed", f"{len(self.seen.errors)}"),
            ("a caller's mount, p50 and p99", milliseconds(self.seen.mounts)),
            ("a caller's unmount, p50 and p99", milliseconds(self.seen.unmounts)),
            ("PSS of the broker, at the beginning and the end", f"{mib(self.begin.pss)}, {mib(self.end.pss)}"),
            ("RSS of its processes, added up", f"{mib(self.begin.rss)}, {mib(self.end.rss)}"),
            ("its descriptors", f"{self.begin.descriptors}, {self.end.descriptors}"),
            ("its processes", f"{self.begin.processes}, {self.end.processes}"),
        ]
        table = "".join(f"| {what} | {value} |\n" for what, value in rows)
        problems = "".join(f"    {text}\n" for text in sorted(set(self.seen.problems()))[:20])
        return (
            f"{self.minutes:g} minutes with seed {self.seed}; again: `make soak MINUTES={self.minutes:g} "
            f"SEED={self.seed}`. Linux {os.uname().release}, {os.cpu_count()} processors.\n\n"
            f"| what | figure |\n| --- | --- |\n{table}\n| fault | times |\n| --- | --- |\n{faults}\n{problems}"
        )


def milliseconds(values: list[float]) -> str:
    if len(values) < 2:
        return "none"
    percentiles = statistics.quantiles(values, n=100)
    return f"{percentiles[49]:.0f} ms, {percentiles[98]:.0f} ms"


def mib(size: int) -> str:
    return f"{size / MIB:.1f} MB"


class Worker:
    """A container in which FUSE programs come and go, and one stays."""

    def __init__(
        self, broker: Broker, stack: ExitStack, switches: Path, user: str | None, user_namespace: bool
    ) -> None:
        volumes = [
            FUSE_STAND_IN,
            *broker.volumes(),
            Volume(whoamifs(), "/usr/bin/whoamifs"),
            Volume(switches, "/work"),
        ]
        options = Options(user=user, user_namespace=user_namespace, volumes=volumes)
        self.container = stack.enter_context(Container(image_tag(BUSYBOX), REAPER, options))
        self._script = self.container.start(["sh", "-c", WORK])

    def result(self, report: Report) -> None:
        """Wait until it has seen that it is to stop; add what it has seen to the report."""
        said, error = self._script.communicate(timeout=60)
        for line in [*said.splitlines(), *error.splitlines()]:
            kind, _, text = line.partition(": ")
            if kind == "cycles":
                report.cycles += int(text)
            elif kind == "lost":
                report.seen.lost.append(text)
            else:
                report.seen.errors.append(line)
        report.seen.leaked += [f"in a container: {mount.mountpoint}" for mount in self.container.fuse_mounts()]


class Soak:
    """The broker under load, and what can be done to it. Each fault returns when its consequences are over."""

    def __init__(self, report: Report, stack: ExitStack, directory: Path) -> None:
        self._report = report
        self._chance = random.Random(report.seed)
        self._directory = directory
        self._broker = stack.enter_context(Broker(CONFIGURATION))
        self._switches = directory / "switches"
        self._switches.mkdir()
        kinds: list[tuple[str | None, bool]] = [(None, False), ("1000:1000", False), ("1000:1000", True)]
        self._workers = [Worker(self._broker, stack, self._switches, *kind) for kind in kinds]
        self._faults: dict[str, Callable[[], object]] = {
            "front killed": lambda: kill(self._broker, FRONT),
            "mounter killed": lambda: kill(self._broker, MOUNTER),
            "front and mounter killed": lambda: kill(self._broker, FRONT, MOUNTER),
            "child of the mounter that waits for an operation killed": self._kill_spare,
            "FUSE program killed": partial(self._hit_program, signal.SIGKILL),
            "FUSE program stopped, later killed": partial(self._hit_program, signal.SIGSTOP),
            "proxy killed in the middle of a call": self._kill_proxies,
            "broker ended and started": self._restart,
            "configuration loaded again": self._reload,
            "broken configuration loaded": self._reload_broken,
            "table of mounts damaged while the broker was down": self._damage_table,
            "flood of connections that say nothing": self._flood,
            "container killed with its mounts": self._kill_container,
        }

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        callers = start_callers(CALLERS, seconds, self._broker.socket, self._directory / "callers")
        time.sleep(min(10, seconds / 5))
        self._report.begin = self._holding()
        order: list[str] = []
        while time.monotonic() < end:
            if not order:  # each kind before any comes again
                order = self._chance.sample(sorted(self._faults), len(self._faults))
            kind = order.pop()
            self._faults[kind]()
            self._check_service(kind)
            self._report.faults[kind] += 1
            time.sleep(self._chance.uniform(0, 1))
        (self._switches / "stop").touch()
        for worker in self._workers:
            worker.result(self._report)
        self._report.seen = Seen.together([self._report.seen, *(caller.result() for caller in callers)])
        settle(self._broker)
        self._report.end = self._holding()
        self._report.seen.leaked += [f"in the broker's list: {mount['mountpoint']}" for mount in self._broker.mounts()]
        if errors := self._broker.records("internal error"):
            self._report.seen.errors += [str(error) for error in errors]

    def _holding(self) -> Holding:
        pid = self._broker.process.pid
        return min((holding(pid) for _ in range(10)), key=lambda each: each.pss)

    def _check_service(self, fault: str) -> None:
        """Have a good caller mount and unmount."""

        def call() -> list[str]:
            enter_private_namespace()
            helper = Helper(self._broker.socket)
            mountpoint = self._directory / "probe"
            mountpoint.mkdir(exist_ok=True)
            mounted = helper.mount(mountpoint)
            if mounted.descriptor >= 0:
                os.close(mounted.descriptor)
            unmounted = helper.unmount(mountpoint, "-z")
            return [call.said for call in (mounted, unmounted) if call.status and "not found" not in call.said]

        self._report.seen.errors += [f"after {fault}: {said}" for said in Beside(call).result()]

    def copy_log(self, path: Path) -> None:
        shutil.copyfile(self._broker.log, path)

    # What is done -------------------------------------------------------------------------------------------------

    def _kill_spare(self) -> None:
        """Kill a child that is idle: one with an operation takes that along, by design."""
        mounter = psutil.Process(status_of(self._broker)["mounter"]["pid"])
        wait_until(lambda: self._has_killed_spare(mounter), 60)  # under load few are idle, and not for long

    def _has_killed_spare(self, mounter: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess, IndexError):  # there is none at the moment
            spare = self._chance.choice(mounter.children())
            spare.suspend()  # and so it stays as it is while it is looked at
            wait_until(lambda: spare.status() == psutil.STATUS_STOPPED)
            if is_idle(spare, mounter):
                spare.kill()
                return True
            spare.resume()
        return False

    def _hit_program(self, number: signal.Signals) -> None:
        container = self._chance.choice(self._workers).container
        place = f"/tmp/hit-{secrets.token_hex(4)}"
        container.exec(["mkdir", place])
        started = container.start(["whoamifs", "-f", place])
        wait_until(lambda: container.fuse_mounts(place) or started.poll() is not None, 60)
        if started.poll() is not None:
            said = " ".join(started.communicate()[1].split())
            self._report.seen.errors.append(f"a program could not mount, status {started.returncode}: {said}")
            return
        program = next(pid for pid in container.processes() if place in command_line(pid))
        os.kill(program, number)
        if number == signal.SIGSTOP:
            time.sleep(self._chance.uniform(1, 3))
            self._check_service("a stopped program")
            os.kill(program, signal.SIGKILL)
        began = time.monotonic()
        while container.fuse_mounts(place) and time.monotonic() - began < 3 * REAPED:
            time.sleep(0.05)
        if container.fuse_mounts(place):
            self._report.seen.leaked.append(f"a dead mount stays for {3 * REAPED} s")
        elif time.monotonic() - began > REAPED:
            took = time.monotonic() - began
            self._report.seen.errors.append(f"a dead mount was gone only after {took:.1f} s")
        started.communicate(timeout=10)

    def _kill_proxies(self) -> None:
        """Kill some at random moments; what they had begun must go, at the latest when the descriptor is closed."""

        def call() -> list[str]:
            enter_private_namespace()
            mountpoint = self._directory / "killed"
            mountpoint.mkdir(exist_ok=True)
            for _ in range(10):
                ours, theirs = socket.socketpair()
                command: list[str | Path] = [PROXY, "-o", "subtype=killed", "--", mountpoint]
                environment = {
                    "_FUSE_COMMFD": str(theirs.fileno()),
                    "FUSERMOUNT3PROXY_FDPASSING_SOCKPATH": str(self._broker.socket),
                }
                proxy = subprocess.Popen(
                    command, env=environment, pass_fds=[theirs.fileno()], stderr=subprocess.DEVNULL
                )
                time.sleep(self._chance.uniform(0, 0.02))
                proxy.kill()
                proxy.wait()
                theirs.close()
                _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
                ours.close()
                for descriptor in descriptors:
                    os.close(descriptor)
            give_up = time.monotonic() + 3 * REAPED
            while mounts_on(mountpoint) and time.monotonic() < give_up:
                time.sleep(0.05)
            return mounts_on(mountpoint)

        self._report.seen.leaked += Beside(call).result()

    def _restart(self) -> None:
        self._broker.stop()
        self._broker.start()

    def _reload(self) -> None:
        self._broker.configure(f"{CONFIGURATION}\nuser_allow_other = {self._chance.choice(['true', 'false'])}")
        self._broker.reload()

    def _reload_broken(self) -> None:
        self._broker.configure("user_alow_other = true")
        self._broker.reload()
        self._broker.configure(CONFIGURATION)

    def _damage_table(self) -> None:
        """For a broker of its own: what the table says can't be known without it, so its mounts are nobody's then."""
        with Broker(CONFIGURATION) as other:
            other.stop()
            for file in (other.directory / "state").iterdir():
                file.write_bytes(self._chance.randbytes(8192))
            other.start()
            assert other.records("the table of mounts was damaged")

            def call() -> list[str]:
                enter_private_namespace()
                helper, mountpoint = Helper(other.socket), self._directory / "damaged"
                mountpoint.mkdir(exist_ok=True)
                mounted = helper.mount(mountpoint)
                unmounted = helper.unmount(mountpoint)
                return [call.said for call in (mounted, unmounted) if call.status]

            self._report.seen.errors += Beside(call).result()

    def _flood(self) -> None:
        connections = []
        try:
            for _ in range(200):
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                connection.settimeout(0.2)
                connections.append(connection)
                with suppress(OSError):
                    connection.connect(str(self._broker.socket))
            time.sleep(1)
        finally:
            for connection in connections:
                connection.close()

    def _kill_container(self) -> None:
        before = len(self._broker.mounts())
        with ExitStack() as stack:
            worker = Worker(self._broker, stack, self._switches, None, False)
            wait_until(lambda: worker.container.fuse_mounts(), 30)
            time.sleep(self._chance.uniform(0, 1))
        wait_until(lambda: len(self._broker.mounts()) <= before + 2 * len(self._workers) + CALLERS, 30)


def mounts_on(mountpoint: Path) -> list[str]:
    return [f"of a killed proxy: {mount.mountpoint}" for mount in fuse_mounts() if mount.mountpoint == str(mountpoint)]


def is_idle(spare: psutil.Process, mounter: psutil.Process) -> bool:
    """Whether a child of the mounter waits for an operation: it has the pipe still that it closes when it has one, and
    no socket of its own, such as come with one."""
    with suppress(OSError):
        own, mounters = (
            [str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()] for pid in (spare.pid, mounter.pid)
        )
        sockets = {each for each in own if each.startswith("socket:")}
        return sockets <= set(mounters) and any(each.startswith("pipe:") for each in own)
    return False


def command_line(pid: int) -> list[str]:
    try:
        return list(psutil.Process(pid).cmdline())
    except psutil.Error:
        return []


@contextmanager
def soaking(report: Report) -> Iterator[Soak]:
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        directory = Path(temporary)
        directory.chmod(0o755)
        yield Soak(report, stack, directory)


def soak(seconds: float, seed: int, log: Path | None = None) -> Report:
    """Run for so long; return the report. A copy of the broker's log goes into the file `log`."""
    report = Report(seed, seconds / 60)
    with soaking(report) as running:
        try:
            running.run(seconds)
        finally:
            if log:
                running.copy_log(log)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=20, help="%(default)s")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000), help="of what is done when; random")
    parser.add_argument("--write", action="store_true", help="put the report into docs/reliability.md")
    parser.add_argument("--log", type=Path, help="where to leave the broker's log")
    arguments = parser.parse_args()
    if not PROXY.exists():
        sys.exit(f"{PROXY} is missing: make static")
    print(f"seed {arguments.seed}", flush=True)
    report = soak(60 * arguments.minutes, arguments.seed, arguments.log)
    print(report.markdown())
    if arguments.write:
        REPORT.write(report.markdown())
    sys.exit(0 if report.good() else 1)


if __name__ == "__main__":
    main()
