"""Callers that mount and unmount without end, each in a mount namespace of its own, and what they see of it.

Each keeps one filesystem for as long as it runs, which must not go, and mounts and unmounts others. Its "FUSE program"
only holds the /dev/fuse descriptor: the kernel tells through that whether the filesystem still is mounted.
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
from typing import TYPE_CHECKING, TypeVar

from broker import syscalls
from tests.lab.broker import PROXY
from tests.lab.load import Beside, Call, Helper
from tests.lab.podman import Mount, mountinfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ResultT = TypeVar("ResultT")
PLACES = 3


@dataclass
class Seen:
    """What callers have seen: milliseconds of calls that went well, and in words what did not go well."""

    mounts: list[float] = field(default_factory=list)
    unmounts: list[float] = field(default_factory=list)
    #: Calls that failed.
    errors: list[str] = field(default_factory=list)
    #: Filesystems that were to be mounted and served, and were not.
    lost: list[str] = field(default_factory=list)
    #: Filesystems that were mounted and should not have been, such as one twice.
    leaked: list[str] = field(default_factory=list)

    @classmethod
    def together(cls, all_: Iterable[Seen]) -> Seen:
        total = cls()
        for each in all_:
            for name, values in vars(each).items():
                getattr(total, name).extend(values)
        return total

    def problems(self) -> list[str]:
        return [*self.errors, *self.lost, *self.leaked]


def enter_private_namespace() -> None:
    """Have a copy of the mount namespace for this process, of which nobody else sees anything."""
    syscalls.unshare(syscalls.CLONE_NEWNS)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


class Caller:
    """One of them, in the process that runs it."""

    def __init__(self, helper: Helper, directory: Path, seed: int) -> None:
        self.seen = Seen()
        self._helper = helper
        self._random = random.Random(seed)
        self._kept = directory / "kept"
        self._places = [directory / str(number) for number in range(PLACES)]
        for place in (self._kept, *self._places):
            place.mkdir(parents=True, exist_ok=True)
        self._other_mounts = len(fuse_mounts())

    def run(self, end: float) -> Seen:
        """Call until the monotonic time `end`, then leave nothing."""
        kept = self._mount(self._kept)
        try:
            while time.monotonic() < end:
                place = self._random.choice(self._places)
                descriptor = self._mount(place)
                time.sleep(self._random.uniform(0, 0.05))
                self._check(self._kept, kept, "a filesystem that was kept")
                self._unmount(place, descriptor)
            self._unmount(self._kept, kept)
        finally:
            self._clean()
        return self.seen

    def _mount(self, place: Path) -> int:
        call = self._helper.mount(place)
        self._note("mount", call, self.seen.mounts)
        if call.status == 0:
            self._check(place, call.descriptor, "a filesystem just mounted")
        return call.descriptor

    def _check(self, place: Path, descriptor: int, what: str) -> None:
        """Look whether the descriptor serves what is mounted at `place`, once."""
        if descriptor < 0:
            return
        mounts = mounts_at(place)
        if not mounts or not is_connected(descriptor):
            self.seen.lost.append(f"{what}: {len(mounts)} mounts, connected: {is_connected(descriptor)}")
        if len(mounts) > 1:
            self.seen.leaked.append(f"{what}: mounted {len(mounts)} times")

    def _unmount(self, place: Path, descriptor: int) -> None:
        if descriptor < 0:
            return
        os.close(descriptor)
        self._note("unmount", self._helper.unmount(place), self.seen.unmounts)
        if mounts_at(place):
            self.seen.leaked.append(f"still mounted after unmount: {place.name}")
            self._clean(place)

    def _note(self, what: str, call: Call, milliseconds: list[float]) -> None:
        if call.status or call.said:
            self.seen.errors.append(f"{what}, after {call.seconds:.1f} s, status {call.status}: {call.said}")
        else:
            milliseconds.append(1000 * call.seconds)

    def _clean(self, *places: Path) -> None:
        """Take away without the broker what is still mounted, so that nobody walks into it."""
        for place in places or (self._kept, *self._places):
            with suppress(OSError):
                while True:
                    syscalls.umount2(bytes(place), syscalls.MNT_DETACH)


def fuse_mounts() -> list[Mount]:
    return [mount for mount in mountinfo() if mount.is_fuse]


def mounts_at(place: Path) -> list[Mount]:
    return [mount for mount in fuse_mounts() if mount.mountpoint == str(place)]


def is_connected(descriptor: int) -> bool:
    """Whether the filesystem that a /dev/fuse descriptor serves is mounted: else polling it is an error."""
    poll = select.poll()
    poll.register(descriptor)
    return not any(event & select.POLLERR for _, event in poll.poll(0))


def start_callers(
    number: int, seconds: float, socket_path: Path, directory: Path, *, program: Path = PROXY, namespace_of: int = 0
) -> list[Beside[Seen]]:
    """Start so many, below `directory`; in the container of process `namespace_of`, or where this process is."""
    end = time.monotonic() + seconds

    def call(number: int) -> Seen:
        enter_private_namespace()
        return Caller(Helper(socket_path, program), directory / f"caller{number}", number).run(end)

    def body(number: int) -> Seen:
        return in_container(namespace_of, partial(call, number)) if namespace_of else call(number)

    return [Beside(partial(body, each)) for each in range(number)]


def in_container(pid: int, body: Callable[[], ResultT]) -> ResultT:
    """Return what `body` does in the mount and pid namespaces of a process; leaves this process between namespaces."""
    pidfd = os.pidfd_open(pid)
    syscalls.setns(pidfd, syscalls.CLONE_NEWPID)

    def inside() -> ResultT:
        syscalls.setns(pidfd, syscalls.CLONE_NEWNS)
        return body()

    return Beside(inside).result()


def moments(seconds: float, least: float, most: float, seed: int) -> Iterator[float]:
    """Sleep a random while, again and again for so many seconds; yield how much time is left each time."""
    chance = random.Random(seed)
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, chance.uniform(least, most)))
        yield end - time.monotonic()
