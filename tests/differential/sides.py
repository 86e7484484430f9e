"""Both sides: the workers, their root filesystems, and the brokers that serve the proxy.

The root filesystems come from the lab's cache and are unpacked once a session. A `Pair` runs a case on both sides at
the same time and returns both observations.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.differential import worker
from tests.differential.model import POLICIES, Case, Observation, Policy
from tests.lab.broker import PROXY, Broker
from tests.lab.commands import run
from tests.lab.images import DebianRecipe, rootfs

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Genuine:
    """A release of Debian, and the release of its fusermount3."""

    suite: str
    release: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.suite}-{self.release[0]}.{self.release[1]}"


GENUINE = (Genuine("bookworm", (3, 14)), Genuine("trixie", (3, 17)), Genuine("sid", (3, 18)))
TARGET = GENUINE[-1]
"""The release whose behaviour is the proxy's."""


def recipe(genuine: Genuine) -> DebianRecipe:
    return DebianRecipe(f"fuse3-{genuine.suite}", ("passwd", "fuse3"), genuine.suite)


def unpack(genuine: Genuine, directory: Path) -> None:
    """Unpack the root filesystem of this release of Debian into `directory`, without files that no program needs."""
    tree = directory / genuine.suite
    tree.mkdir()
    left_out = [f"--exclude=./{path}" for path in ("dev/*", "usr/share", "usr/sbin", "var")]
    run(["tar", "--extract", "--file", rootfs(recipe(genuine)), "--directory", tree, *left_out], timeout=300)
    found = run(["chroot", tree, "/usr/bin/fusermount3", "-V"]).stdout.split()[-1]
    wanted = ".".join(str(number) for number in genuine.release)
    assert found.startswith(f"{wanted}."), f"{genuine.suite} has fusermount3 {found}, the cases are of {wanted}"


SCRATCH = "scratch"


@dataclass(frozen=True)
class Place:
    """A directory with unpacked root filesystems, and a running broker for each policy."""

    directory: Path
    brokers: dict[Policy, Broker]


@contextlib.contextmanager
def prepared(directory: Path) -> Iterator[Place]:
    """Run the brokers, and yield the place."""
    (directory / SCRATCH).mkdir()
    with contextlib.ExitStack() as stack:
        yield Place(directory, {each: stack.enter_context(Broker(POLICIES[each].broker_toml)) for each in Policy})


#: Seconds that a case may take, far more than the worker allows it.
PATIENCE = 60.0


class Worker:
    """A running worker; it ends with the `with` block, and all its mounts with it."""

    def __init__(self, place: Place, genuine: Genuine, helper: Path | None) -> None:
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(PATIENCE)
        with theirs:
            places = [place.directory / genuine.suite, place.directory / SCRATCH, helper or ""]
            sockets = [f"{policy.value}={broker.socket.parent}" for policy, broker in place.brokers.items()]
            words = [str(theirs.fileno()), *places, *sockets]
            self._process = subprocess.Popen(
                [sys.executable, "-m", worker.__name__, *words],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=REPOSITORY,
            )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._channel.close()
        self._process.wait(timeout=60)

    def begin(self, case: Case) -> None:
        worker.send(self._channel, case)

    def finish(self) -> Observation:
        answer = worker.receive(self._channel)
        assert isinstance(answer, Observation), answer or "the worker has ended"
        return answer


class Pair:
    """The workers for the genuine helper and for the proxy."""

    def __init__(self, genuine: Genuine, left: Worker, right: Worker) -> None:
        self.genuine = genuine
        self._workers = (left, right)

    def observe(self, case: Case) -> tuple[Observation, Observation]:
        """Run `case` on both sides; return the observation of the genuine helper and that of the proxy."""
        for each in self._workers:
            each.begin(case)
        answers = [_answer(each) for each in self._workers]
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        left, right = answers
        assert isinstance(left, Observation)
        assert isinstance(right, Observation)
        return left, right


def _answer(side: Worker) -> Observation | AssertionError:
    """Return what `finish` returns or raises: both answers must be read, or the next read would return an old one."""
    try:
        return side.finish()
    except AssertionError as error:
        return error


@contextlib.contextmanager
def pair(place: Place, genuine: Genuine) -> Iterator[Pair]:
    """Start the workers of both sides, and yield them."""
    with Worker(place, genuine, None) as left, Worker(place, genuine, PROXY) as right:
        yield Pair(genuine, left, right)
