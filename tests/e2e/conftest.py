"""Fixtures of the end-to-end tests: a broker, containers that use it, and the check that a test leaves nothing behind.

Most tests use `broker`, the broker of the session, and `start`, a function that starts a container. A test that needs
its own broker (configured, restarted, killed) uses `run_broker`. When the test has ended, all three check everything
that a mount could have left: mounts in each container and on the host, processes and descriptors of the broker.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import psutil
import pytest

from fusermount3_broker.cli import control_client
from tests.lab.broker import PROXY, Broker
from tests.lab.pace import SLOWNESS
from tests.lab.podman import FUSE_STAND_IN, Container, Mount, Options, Volume, mountinfo
from tests.lab.programs import whoamifs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

T = TypeVar("T")

#: The uid of the unprivileged user of the tests.
USER = 1000


class Start(Protocol):
    """Start a container in which FUSE programs find the proxy. `options` are those of `podman.Options`."""

    def __call__(
        self,
        image: str,
        *,
        command: tuple[str, ...] = Container.DEFAULT_COMMAND,
        user: str | None = None,
        user_namespace: bool = False,
        read_only: bool = False,
        volumes: tuple[Volume, ...] = (),
        extra: tuple[str, ...] = (),
    ) -> Container: ...


class RunBroker(Protocol):
    """Run a broker until the test ends; `configuration` is TOML."""

    def __call__(self, configuration: str = "") -> Broker: ...


@dataclass(frozen=True)
class Footprint:
    """Resources of the broker: open descriptors of front and mounter, number of live children, live mounts."""

    front: int
    mounter: int
    children: int
    mounts: tuple[str, ...]

    @classmethod
    def of(cls, broker: Broker) -> Footprint:
        # The same queries as `broker.status()`, without starting a program for each.
        control_socket = broker.directory / "control/control.sock"
        status, mounts = (control_client.ask(control_socket, question) for question in ("status", "mounts"))
        mounter = psutil.Process(status["mounter"]["pid"])
        return cls(
            status["front"]["open_descriptors"],
            mounter.num_fds(),
            sum(is_alive(child.pid) for child in mounter.children()),
            tuple(mount["mountpoint"] for mount in mounts),
        )


def has_no_mounts(broker: Broker) -> bool:
    """Test whether the broker knows of no mount. A filesystem ends a moment after its last mount has disappeared."""
    return Footprint.of(broker).mounts == ()


def is_idle(broker: Broker) -> bool:
    """Test whether no child of the mounter works for anybody."""
    return not broker.status()["children"]["working"]


def is_alive(pid: int) -> bool:
    """Test whether the process exists and is no zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def states(processes: list[psutil.Process]) -> list[str]:
    """Return the states of those processes that still exist."""
    found: list[str] = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(process.status())
    return found


def settle(broker: Broker) -> None:
    """Wait until the broker has forked all the processes that it keeps ready."""
    settled(lambda: Footprint.of(broker))


def settled(look: Callable[[], T]) -> T:
    """Return what `look` returns as soon as it is the same for a while."""
    last = None
    while (now := look()) != last:
        last = now
        time.sleep(0.2)
    return now


@contextlib.contextmanager
def nothing_left(broker: Broker, seconds: float = 10) -> Iterator[None]:
    """Check that the block changes neither the resources of the broker nor the FUSE mounts of the host, and that the
    broker logs no internal error."""
    mounts_before = fuse_mounts_of_host()
    with nothing_held(broker, seconds):
        yield
    assert fuse_mounts_of_host() == mounts_before


@contextlib.contextmanager
def nothing_held(broker: Broker, seconds: float = 10) -> Iterator[None]:
    """Check that the block leaves the resources of the broker unchanged, and that the broker logs no internal error."""
    before = Footprint.of(broker)
    errors = len(broker.records("internal error"))
    yield
    give_up = time.monotonic() + SLOWNESS * seconds
    while (after := Footprint.of(broker)) != before and time.monotonic() < give_up:
        time.sleep(0.05)  # an abandoned operation ends a moment after its caller
    assert after == before, broker.log.read_text()
    assert broker.records("internal error")[errors:] == []


def fuse_mounts_of_host() -> list[Mount]:
    return [mount for mount in mountinfo() if mount.is_fuse]


@contextlib.contextmanager
def containers(broker: Broker) -> Iterator[Start]:
    """Yield a function that starts containers; they end with the block, and must have no FUSE mount by then."""
    with contextlib.ExitStack() as stack:
        started: list[Container] = []

        def start(
            image: str,
            *,
            command: tuple[str, ...] = Container.DEFAULT_COMMAND,
            user: str | None = None,
            user_namespace: bool = False,
            read_only: bool = False,
            volumes: tuple[Volume, ...] = (),
            extra: tuple[str, ...] = (),
        ) -> Container:
            options = Options(
                user=user,
                user_namespace=user_namespace,
                read_only=read_only,
                volumes=[FUSE_STAND_IN, *broker.volumes(), Volume(whoamifs(), "/usr/bin/whoamifs"), *volumes],
                extra=extra,
            )
            container = stack.enter_context(Container(image, command, options))
            started.append(container)
            return container

        yield start
        assert [mount for container in started for mount in container.fuse_mounts()] == []


@pytest.fixture(scope="session", autouse=True)
def proxy() -> Path:
    """The static executable of the proxy, which all these tests need."""
    if not PROXY.exists():
        pytest.fail(f"{PROXY} is missing: run 'make static'")
    return PROXY


@pytest.fixture(scope="session")
def session_broker() -> Iterator[Broker]:
    with Broker() as broker:
        settle(broker)
        yield broker


@pytest.fixture
def broker(session_broker: Broker) -> Iterator[Broker]:
    """A broker with the default configuration, shared with other tests."""
    with nothing_left(session_broker):
        yield session_broker


@pytest.fixture(scope="module")
def impatient_broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """A broker with the deadlines in `DEADLINES` of the test module."""
    lines = [f"{name} = {seconds}" for name, seconds in request.module.DEADLINES.items()]
    with Broker("\n".join(["[deadlines]", *lines])) as broker:
        settle(broker)
        yield broker


@pytest.fixture
def users(tmp_path: Path) -> Path:
    """A directory that `USER` owns; every user may search its parents."""
    let_users_in(tmp_path)
    return make_mountpoint(tmp_path, "user")


#: Directories of pytest's above each test's: with pytest-xdist, each of its processes has one, too.
_PYTESTS_OWN = 3 if "PYTEST_XDIST_WORKER" in os.environ else 2


def let_users_in(directory: Path) -> None:
    """Let every user read a directory made by pytest and its parents, which only root may read otherwise."""
    for path in (directory, *directory.parents[:_PYTESTS_OWN]):
        mode = path.stat().st_mode
        if not mode & stat.S_IXOTH:  # otherwise it isn't pytest's, or is done
            path.chmod(mode | 0o055)


def make_mountpoint(directory: Path, name: str, uid: int = USER) -> Path:
    path = directory / name
    path.mkdir()
    os.chown(path, uid, uid)
    return path


@pytest.fixture
def start(broker: Broker) -> Iterator[Start]:
    """A function that starts containers that use `broker`."""
    with containers(broker) as start:
        yield start


@pytest.fixture
def run_broker() -> Iterator[RunBroker]:
    """A function that runs a broker for this test only.

    The directory of its socket exists before it starts, as the source of a volume must. When the test has ended, the
    broker must have no mounts; after it has stopped, none of its processes may remain.
    """
    mounts_before = fuse_mounts_of_host()
    brokers: list[Broker] = []
    family: list[psutil.Process] = []
    with contextlib.ExitStack() as stack:

        def run_broker(configuration: str = "") -> Broker:
            broker = Broker(configuration)
            broker.socket.parent.mkdir()
            brokers.append(stack.enter_context(broker))
            return broker

        yield run_broker
        for broker in brokers:
            family += psutil.Process(broker.process.pid).children(recursive=True)
            wait_until(partial(has_no_mounts, broker))
            assert broker.records("internal error") == []
    wait_until(lambda: not any(process.is_running() for process in family))
    assert fuse_mounts_of_host() == mounts_before


def wait_until(true: Callable[[], object], seconds: float = 15) -> None:
    """Wait until `true()` returns a true value. Raises AssertionError after `seconds`, or more on a slow machine."""
    give_up = time.monotonic() + SLOWNESS * seconds
    while not true():
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.02)


def has_ended_all(container: Container) -> bool:
    """Test whether only the container's first process runs; zombies don't count, because it need not reap."""
    return [pid for pid in container.processes() if is_alive(pid)] == [container.pid]
