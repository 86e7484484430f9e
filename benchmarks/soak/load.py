"""The users of the broker during a soak: FUSE programs in containers, and callers beside them."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from tests.e2e.conftest import wait_until
from tests.lab.broker import Broker
from tests.lab.callers import Seen, Trouble, enter_private_namespace, start_callers
from tests.lab.images import BUSYBOX, image_tag
from tests.lab.load import Beside, Call, Helper
from tests.lab.podman import FUSE_STAND_IN, Container, Mount, Options, Volume, mountinfo
from tests.lab.programs import whoamifs

CALLERS = 3
FOR_EVER = 1e9

#: The first process of a container: a shell reaps every process that has lost its parent, as background FUSE programs
#: have. No other process does, and the container has no room for more processes after some thousands.
REAPER = ("sh", "-c", "while :; do sleep 1; done")
KEPT = "/home/user/kept"
#: In a container: keeps one filesystem, mounts and unmounts another, and prints failures, each with the times when it
#: began and ended (/proc/uptime). The remains of a failed call must be the caller's to unmount, or go by themselves.
WORK = """
set -f
kept=/home/user/kept worked=/home/user/worked is_kept=no cycles=0 place=0
begin() { read begun _ < /proc/uptime; }
tell() { kind=$1; shift; read ended _ < /proc/uptime; echo $begun $ended $kind: $*; }
is_mounted() { grep -q " $1 fuse" /proc/self/mounts; }
settle() {
    begin
    said= turns=0
    is_mounted $1 && said=$(fusermount3 -u -z $1 2>&1)
    while is_mounted $1; do
        turns=$((turns + 1))
        if [ $turns -gt 50 ]; then
            tell leaked "$1 stays after a call that failed, and unmounting says: $said"
            return 1
        fi
        sleep 0.1
    done
}
mount_at() {
    mkdir -p $1
    begin
    said=$(whoamifs $1 2>&1)
    status=$?
    [ $status = 0 ] && [ -z "$said" ] && return 0
    tell error "mount, status $status: $said"
    settle $1 && sleep 0.2
    return 1
}
another() { place=$((place + 1)); }
mount_at $kept && is_kept=yes
while [ ! -e /work/stop ]; do
    if mount_at $worked; then
        begin
        grep -q ^uid= $worked/whoami || tell lost "a filesystem just mounted"
        begin
        if said=$(fusermount3 -u $worked 2>&1); then
            cycles=$((cycles + 1))
            is_mounted $worked && tell leaked "still mounted after unmount: $worked"
        else
            tell error "unmount: $said"
            settle $worked
        fi
    fi
    is_mounted $worked && another && worked=/home/user/worked$place
    begin
    if [ $is_kept = yes ] && ! grep -q ^uid= $kept/whoami; then
        tell lost "a filesystem that was kept"
        settle $kept
        is_kept=no
    fi
    if [ $is_kept = no ]; then
        is_mounted $kept && another && kept=/home/user/kept$place
        mount_at $kept && is_kept=yes
    fi
done
if [ $is_kept = yes ]; then
    begin
    said=$(fusermount3 -u $kept 2>&1) || tell error "unmount: $said"
fi
begin
tell cycles $cycles
"""


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

    def result(self) -> tuple[int, Seen]:
        """Wait until it has noticed its stop; return how often it has mounted, and what it has seen."""
        said, error = self._script.communicate(timeout=60)
        cycles, seen = 0, Seen()
        now = time.monotonic()
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME) - now
        for line in said.splitlines():
            times, _, text = line.partition(": ")
            begun, ended, kind = times.split()
            trouble = Trouble(f"in a container: {text}", float(begun) - since_boot, float(ended) - since_boot + 0.01)
            if kind == "cycles":
                cycles = int(text)
            else:
                {"error": seen.errors, "lost": seen.lost, "leaked": seen.leaked}[kind].append(trouble)
        if error:
            seen.errors.append(Trouble(f"in a container: {error}", now, now))
        seen.leaked += [
            Trouble(f"in a container: {each.mountpoint}", now, now) for each in self.container.fuse_mounts()
        ]
        return cycles, seen


class Load:
    """Containers and callers that use the broker until `stop`; all have mounted what they keep."""

    def __init__(self, broker: Broker, stack: ExitStack, directory: Path) -> None:
        self._directory = directory
        self._callers_directory = directory / "callers"
        self._switches = directory / "switches"
        self._switches.mkdir()
        #: Containers that are being killed.
        self._killed: list[Container] = []
        stack.callback(self._remove_killed)
        #: Containers outside the load whose mounts the broker must list.
        self.others: list[Container] = []
        #: A file whose existence ends the load.
        self.stopped = self._switches / "stop"
        kinds: list[tuple[str | None, bool]] = [(None, False), ("1000:1000", False), ("1000:1000", True)]
        self.workers = [Worker(broker, stack, self._switches, *kind) for kind in kinds]
        self._callers = start_callers(CALLERS, FOR_EVER, broker.socket, self._callers_directory, stop=self.stopped)
        for caller in self._callers:
            stack.enter_context(caller)
        for worker in self.workers:
            wait_until(partial(worker.container.fuse_mounts, KEPT), 60)
        for caller in self._callers:
            wait_until(partial(self._keeps, caller.pid), 60)

    def _keeps(self, pid: int) -> bool:
        return any(Path(each.mountpoint).name == "kept" for each in self._mounts_of(pid))

    @contextmanager
    def another_worker(self, broker: Broker) -> Iterator[Worker]:
        """Run one more worker, and kill it at the end."""
        with ExitStack() as stack:
            worker = Worker(broker, stack, self._switches, None, False)
            self._killed.append(worker.container)
            yield worker
        self._killed.remove(worker.container)

    def _remove_killed(self) -> None:
        """Remove the containers that remain because their removal was interrupted."""
        for container in self._killed:
            container.remove()

    def mounts(self) -> dict[str, list[Mount]]:
        """Return the FUSE mounts that the users of the broker have made through it, by user."""
        containers = [*self.others, *(worker.container for worker in self.workers)]
        found = {f"container {each.name}": each.fuse_mounts() for each in containers}
        found.update({f"caller {number}": self._mounts_of(each.pid) for number, each in enumerate(self._callers)})
        return found

    def _mounts_of(self, pid: int) -> list[Mount]:
        """Return the mounts of a caller, which sees the host's, too."""
        try:
            mounts = mountinfo(pid)
        except OSError:
            return []
        return [
            each for each in mounts if each.is_fuse and Path(each.mountpoint).is_relative_to(self._callers_directory)
        ]

    def stop(self) -> tuple[int, Seen]:
        """Stop the load; return how often FUSE programs were mounted in containers, and what all users have seen."""
        self.stopped.touch()
        results = [worker.result() for worker in self.workers]
        seen = [seen for _, seen in results] + [caller.result() for caller in self._callers]
        return sum(cycles for cycles, _ in results), Seen.together(seen)


def probe(socket: Path, mountpoint: Path) -> tuple[Call, Call | None]:
    """Have a well-behaved caller, in a mount namespace of its own, mount and unmount; return both calls.

    Without a mount there is no unmount.
    """

    def call() -> tuple[Call, Call | None]:
        enter_private_namespace()
        helper = Helper(socket)
        mountpoint.mkdir(exist_ok=True)
        mounted = helper.mount(mountpoint)
        if mounted.descriptor >= 0:
            os.close(mounted.descriptor)
        return mounted, None if mounted.status else helper.unmount(mountpoint, "-z")

    with Beside(call) as beside:
        return beside.result()
