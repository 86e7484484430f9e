"""A caller changes its mountpoint as fast as it can while the broker inspects it and mounts there.

By default each race is run a few hundred times, with many thousand changes; RACES=10000 runs each ten thousand times.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fusermount3_broker.kernel import syscalls
from tests.e2e.conftest import USER, make_mountpoint
from tests.e2e.hostile import (
    COMMIT,
    O_PATH,
    Client,
    check_service,
    fuse_mounts,
    in_private_namespace,
    mount_request,
    unmount,
    unmount_request,
    wait_for_mounts,
)
from tests.lab.commands import run
from tests.lab.forked import ending_afterwards
from tests.lab.podman import mountinfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.lab.broker import Broker

pytestmark = [pytest.mark.e2e, pytest.mark.long]

REQUESTS = int(os.environ.get("RACES", "300"))
RENAME_EXCHANGE = 2
_libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def own(users: Path) -> Path:
    """A mountpoint that belongs to the user."""
    return make_mountpoint(users, "own")


class Racer:
    """A process that repeats an action until the `with` block ends; `times` counts the repetitions so far."""

    def __init__(self, change: Callable[[], object]) -> None:
        self._change = change
        self._times = mmap.mmap(-1, 8)

    @property
    def times(self) -> int:
        return int.from_bytes(self._times[:8], "little")

    def __enter__(self) -> Racer:
        self._pid = os.fork()
        if self._pid == 0:
            with ending_afterwards():
                while True:
                    self._change()
                    self._times[:8] = (self.times + 1).to_bytes(8, "little")
        return self

    def __exit__(self, *exception: object) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        os.kill(self._pid, signal.SIGSTOP)
        os.waitpid(self._pid, os.WUNTRACED)
        yield
        os.kill(self._pid, signal.SIGCONT)


def exchange(one: Path, other: Path) -> None:
    _libc.renameat2(syscalls.AT_FDCWD, bytes(one), syscalls.AT_FDCWD, bytes(other), RENAME_EXCHANGE)


def with_roots_directory(own: Path) -> Callable[[], object]:
    roots = own.with_name("roots")
    roots.mkdir()
    return lambda: exchange(own, roots)


def with_a_link_to_roots_directory(own: Path) -> Callable[[], object]:
    roots = own.parent.with_name("roots")
    roots.mkdir()
    link = own.with_name("link")
    link.symlink_to(roots)
    return lambda: exchange(own, link)


def with_nothing(own: Path) -> Callable[[], object]:
    aside = own.with_name("aside")

    def away_and_back() -> None:
        own.rename(aside)
        aside.rename(own)

    return away_and_back


def with_a_new_one(own: Path) -> Callable[[], object]:
    fresh = own.with_name("fresh")

    def again() -> None:
        fresh.mkdir(exist_ok=True)
        os.chown(fresh, USER, USER)  # before it gets the name: a process that pins it sees the user's directory
        with contextlib.suppress(OSError):  # busy, while something is mounted there
            fresh.rename(own)

    return again


def pin(own: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError):
        return os.open(own, O_PATH)
    return None


@pytest.mark.parametrize(
    "change",
    [with_roots_directory, with_a_link_to_roots_directory, with_nothing, with_a_new_one],
    ids=lambda change: change.__name__,
)
def test_a_mountpoint_that_is_exchanged_all_the_time_is_that_which_was_pinned(
    change: Callable[[Path], Callable[[], object]], broker: Broker, own: Path
) -> None:
    """It does not matter which directory has its name by then."""

    def body() -> None:
        mounted = refused = 0
        with Racer(elsewhere(change(own))) as racer:
            while mounted + refused < REQUESTS or not mounted or racer.times < REQUESTS:
                pinned = pin(own)
                if pinned is None:
                    continue
                target = os.fstat(pinned)
                may = stat.S_ISDIR(target.st_mode) and target.st_uid == USER
                with Client(broker, USER) as client:
                    client.send(mount_request(own), pinned)
                    reply = client.reply()
                    assert reply is not None
                    if reply.errno:
                        refused += 1
                        continue
                    mounted += 1
                    assert may, "mounted on what is not the user's"
                    with racer.stopped():
                        places = [mount.mountpoint for mount in fuse_mounts()]
                        client.socket.close()
                        wait_for_mounts([])
                        # A directory that was removed no longer leads to a place.
                        found = [Path(place).stat() for place in places if not place.endswith("//deleted")]
                        assert [(each.st_ino, each.st_uid) for each in found] == [(target.st_ino, USER)] * len(found)
        print(f"{racer.times} changes, {mounted} mounted, {refused} refused")

    in_private_namespace(body)


def test_a_mountpoint_that_is_covered_and_uncovered_all_the_time_is_never_mounted_over_what_covers_it(
    broker: Broker, own: Path
) -> None:
    def cover() -> None:
        with contextlib.suppress(OSError):  # the user's filesystem is mounted there, and root may not enter it
            syscalls.mount(b"cover", bytes(own), b"tmpfs", 0, b"uid=%d" % USER)
        with contextlib.suppress(OSError):
            syscalls.umount2(bytes(own), syscalls.MNT_DETACH)

    def body() -> None:
        mounted = refused = 0
        pinned = os.open(own, O_PATH)
        _, below = syscalls.statx_mount(pinned)
        with Racer(cover) as racer:
            while mounted + refused < REQUESTS or racer.times < REQUESTS:
                with Client(broker, USER) as client:
                    client.send(mount_request(own), os.dup(pinned))
                    reply = client.reply()
                    assert reply is not None
                    if reply.errno:
                        refused += 1
                        continue
                    mounted += 1
                    with racer.stopped():
                        assert all(mount.parent == below for mount in fuse_mounts())
                take_away_what_stays(broker, own, racer)
        os.close(pinned)
        with contextlib.suppress(OSError):
            while True:
                syscalls.umount2(bytes(own), syscalls.MNT_DETACH)
        print(f"{racer.times} covers, {mounted} mounted, {refused} refused")

    in_private_namespace(body)


def take_away_what_stays(broker: Broker, own: Path, racer: Racer) -> None:
    """Wait for the rollback. If the mount was covered whenever the broker looked, it stays, and the broker knows it."""
    give_up = time.monotonic() + 10
    while any(mount.source != "cover" for mount in fuse_mounts()):
        if time.monotonic() > give_up:
            with racer.stopped():
                assert [mount["mountpoint"] for mount in broker.mounts()] == [str(own)]
                while mountinfo()[-1].source == "cover":
                    syscalls.umount2(bytes(own), syscalls.MNT_DETACH)
                unmount(broker, own, uid=USER)


def test_an_entry_that_is_exchanged_all_the_time_is_unmounted_lazily_only_if_it_was_looked_at(
    broker: Broker, own: Path
) -> None:
    """The names are exchanged in a mount namespace where nothing is mounted on them."""
    roots = own.with_name("roots")
    roots.mkdir()

    def body() -> None:
        run(["mount", "-t", "tmpfs", "roots", roots])
        (kept,) = [mount.id for mount in mountinfo() if mount.source == "roots"]
        unmounted = 0
        with Racer(elsewhere(lambda: exchange(own, roots))) as racer:
            while unmounted < REQUESTS or racer.times < REQUESTS:
                with racer.stopped():
                    place = next(each for each in (own, roots) if each.stat().st_uid == USER)
                    mount_and_keep(broker, place)
                with Client(broker, USER) as client:
                    client.send(unmount_request(own, lazy=True), os.open(own.parent, O_PATH))
                    client.reply()
                assert kept in [mount.id for mount in mountinfo()]
                unmounted += 1
                with racer.stopped():
                    for mount in fuse_mounts():
                        syscalls.umount2(os.fsencode(mount.mountpoint), syscalls.MNT_DETACH)
        print(f"{racer.times} exchanges")
        run(["umount", "--lazy", next(mount.mountpoint for mount in mountinfo() if mount.id == kept)])

    in_private_namespace(body)


def elsewhere(change: Callable[[], object]) -> Callable[[], object]:
    """Return a function for `change` in a mount namespace of its own, where nothing of this one is mounted now."""
    moved = False

    def act() -> None:
        nonlocal moved
        if not moved:
            syscalls.unshare(syscalls.CLONE_NEWNS)
            moved = True
        change()

    return act


def mount_and_keep(broker: Broker, place: Path) -> None:
    with Client(broker, USER) as client:
        client.send(mount_request(place), os.open(place, O_PATH))
        reply = client.reply()
        assert reply is not None
        assert reply.errno == 0, reply.text
        client.send(COMMIT)
        assert client.reply() is None


def test_the_broker_serves_others_afterwards(broker: Broker, own: Path) -> None:
    in_private_namespace(lambda: check_service(broker, own))
