"""Callers that mount and unmount without end, each in a mount namespace of its own, and their observations.

Each keeps one filesystem for as long as it runs, which must not go, and mounts and unmounts others. Its "FUSE program"
only holds the /dev/fuse descriptor: through that the kernel shows whether the filesystem still is mounted.
"""

from __future__ import annotations

import os
import random
import select
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from fusermount3_broker.kernel import syscalls
from tests.lab.broker import PROXY
from tests.lab.load import Beside, Call, Helper
from tests.lab.podman import Mount, mountinfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ResultT = TypeVar("ResultT")
PLACES = 3
#: Seconds in which a mount without a server has to be gone, as docs/reliability.md promises.
REAPED = 5


class Trouble(NamedTuple):
    """A failure, and when the call or look that shows it began and ended, by the monotonic clock."""

    text: str
    begun: float
    ended: float


@dataclass
class Seen:
    """The observations of callers: milliseconds of successful calls, and failures."""

    mounts: list[float] = field(default_factory=list)
    unmounts: list[float] = field(default_factory=list)
    #: Calls that failed.
    errors: list[Trouble] = field(default_factory=list)
    #: Filesystems that should have been mounted and served, and were not.
    lost: list[Trouble] = field(default_factory=list)
    #: Filesystems that were mounted and should not have been, such as one mounted twice.
    leaked: list[Trouble] = field(default_factory=list)

    @classmethod
    def together(cls, all_: Iterable[Seen]) -> Seen:
        total = cls()
        for each in all_:
            for name, values in vars(each).items():
                getattr(total, name).extend(values)
        return total

    def problems(self) -> list[Trouble]:
        return [*self.errors, *self.lost, *self.leaked]


def enter_private_namespace() -> None:
    """Give this process a copy of the mount namespace, which no other process sees."""
    syscalls.unshare(syscalls.CLONE_NEWNS)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


class Caller:
    """One caller, in the process that runs it."""

    def __init__(self, helper: Helper, directory: Path, seed: int) -> None:
        self.seen = Seen()
        self._helper = helper
        self._random = random.Random(seed)
        self._kept = directory / "kept"
        self._places = [directory / str(number) for number in range(PLACES)]
        for place in (self._kept, *self._places):
            place.mkdir(parents=True, exist_ok=True)
        self._other_mounts = len(fuse_mounts())

    def run(self, ended: Callable[[], bool]) -> Seen:
        """Call until `ended()`, then leave nothing."""
        kept = self._mount(self._kept)
        try:
            while not ended():
                place = self._random.choice(self._places)
                descriptor = self._mount(place)
                time.sleep(self._random.uniform(0, 0.05))
                if not self._check(self._kept, kept, "a filesystem that was kept"):
                    os.close(kept)
                    self._settle(self._kept)
                    kept = self._mount(self._kept)
                self._unmount(place, descriptor)
            self._unmount(self._kept, kept)
        finally:
            self._clean()
        return self.seen

    def _mount(self, place: Path) -> int:
        """Return the descriptor; -1 if the call failed, and then its remains are gone."""
        begun = time.monotonic()
        call = self._helper.mount(place)
        if self._note("mount", call, begun, self.seen.mounts):
            self._check(place, call.descriptor, "a filesystem just mounted")
            return call.descriptor
        if call.descriptor >= 0:
            os.close(call.descriptor)
        self._settle(place)
        return -1

    def _check(self, place: Path, descriptor: int, what: str) -> bool:
        """Return whether the descriptor serves the filesystem at `place`, mounted there once."""
        if descriptor < 0:
            return True
        begun = time.monotonic()
        mounts = mounts_at(place)
        if is_there := bool(mounts) and is_connected(descriptor):
            self._check_once(place, what, begun)
        else:
            text = f"{what}: {len(mounts)} mounts, connected: {is_connected(descriptor)}"
            self.seen.lost.append(Trouble(text, begun, time.monotonic()))
        return is_there

    def _check_once(self, place: Path, what: str, begun: float) -> None:
        """Note a filesystem that is mounted twice: as leaked if it stays so."""
        if (number := len(mounts_at(place))) < 2:
            return
        wait_for(lambda: len(mounts_at(place)) < 2)
        lasts = len(mounts_at(place)) > 1
        trouble = Trouble(f"{what}: mounted {number} times", begun, time.monotonic())
        (self.seen.leaked if lasts else self.seen.errors).append(trouble)

    def _unmount(self, place: Path, descriptor: int) -> None:
        if descriptor < 0:
            return
        os.close(descriptor)
        begun = time.monotonic()
        if not self._note("unmount", self._helper.unmount(place), begun, self.seen.unmounts):
            self._settle(place)
        elif mounts_at(place):
            self.seen.leaked.append(Trouble(f"still mounted after unmount: {place.name}", begun, time.monotonic()))
            self._clean(place)

    def _note(self, what: str, call: Call, begun: float, milliseconds: list[float]) -> bool:
        """Note a call that began at `begun`; return whether it succeeded."""
        if call.status or call.said:
            text = f"{what}, after {call.seconds:.1f} s, status {call.status}: {call.said}"
            self.seen.errors.append(Trouble(text, begun, time.monotonic()))
            return False
        milliseconds.append(1000 * call.seconds)
        return True

    def _settle(self, place: Path) -> None:
        """After a failed call, check that its remains are the caller's to unmount, or go by themselves."""
        begun = time.monotonic()
        said = ""
        if mounts_at(place):
            said = self._helper.unmount(place, "-z").said
            wait_for(lambda: not mounts_at(place))
        if mounts_at(place):
            text = f"left at {place.name} by a call that failed, and unmounting says: {said}"
            self.seen.leaked.append(Trouble(text, begun, time.monotonic()))
            self._clean(place)

    def _clean(self, *places: Path) -> None:
        """Unmount without the broker what is still mounted, so that no process walks into it."""
        for place in places or (self._kept, *self._places):
            with suppress(OSError):
                while True:
                    syscalls.umount2(bytes(place), syscalls.MNT_DETACH)


def wait_for(true: Callable[[], object]) -> None:
    """Wait until `true()` holds; at most as long as a dead mount may stay."""
    give_up = time.monotonic() + REAPED
    while not true() and time.monotonic() < give_up:
        time.sleep(0.05)


def fuse_mounts() -> list[Mount]:
    return [mount for mount in mountinfo() if mount.is_fuse]


def mounts_at(place: Path) -> list[Mount]:
    return [mount for mount in fuse_mounts() if mount.mountpoint == str(place)]


def is_connected(descriptor: int) -> bool:
    """Return whether the filesystem that a /dev/fuse descriptor serves is mounted: else polling it is an error."""
    poll = select.poll()
    poll.register(descriptor)
    return not any(event & select.POLLERR for _, event in poll.poll(0))


def start_callers(
    number: int,
    seconds: float,
    socket_path: Path,
    directory: Path,
    *,
    program: Path = PROXY,
    namespace_of: int = 0,
    stop: Path | None = None,
) -> list[Beside[Seen]]:
    """Start so many callers, below `directory`; in the container of process `namespace_of`, or where this process is.

    They end after so many seconds, or when there is a file `stop`.
    """
    end = time.monotonic() + seconds

    def ended() -> bool:
        return time.monotonic() > end or (stop is not None and stop.exists())

    def call(number: int) -> Seen:
        enter_private_namespace()
        return Caller(Helper(socket_path, program), directory / f"caller{number}", number).run(ended)

    def body(number: int) -> Seen:
        return in_container(namespace_of, partial(call, number)) if namespace_of else call(number)

    return [Beside(partial(body, each)) for each in range(number)]


def in_container(pid: int, body: Callable[[], ResultT]) -> ResultT:
    """Return the result of `body` in the mount and pid namespaces of a process.

    Leaves this process between namespaces.
    """
    pidfd = os.pidfd_open(pid)
    syscalls.setns(pidfd, syscalls.CLONE_NEWPID)

    def inside() -> ResultT:
        syscalls.setns(pidfd, syscalls.CLONE_NEWNS)
        return body()

    return Beside(inside).result()


def moments(seconds: float, least: float, most: float, seed: int) -> Iterator[float]:
    """Sleep for random times, again and again for so many seconds; yield the time left after each."""
    chance = random.Random(seed)
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, chance.uniform(least, most)))
        yield end - time.monotonic()
