"""What the end-to-end tests share: a broker, containers that use it, and the check that a test leaves nothing behind.

`broker` and `start` are what most tests take: the broker of the session, and a function that starts a container. A
test that needs a broker of its own (configured, restarted, killed) takes `run_broker`. All three look, when the test
has ended, at everything a mount could have left: mounts in each container and on the host, processes and
descriptors of the broker.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import psutil
import pytest

from broker import control
from tests.lab.broker import PROXY, Broker
from tests.lab.podman import FUSE_STAND_IN, Container, Mount, Options, Volume, mountinfo
from tests.lab.programs import whoamifs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

#: Who is not root, where a test needs somebody.
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
    """What the broker holds: descriptors of front and mounter, how many live children, live mounts."""

    front: int
    mounter: int
    children: int
    mounts: tuple[str, ...]

    @classmethod
    def of(cls, broker: Broker) -> Footprint:
        # What `broker.status()` asks, without starting a program for each question.
        control_socket = broker.directory / "control/control.sock"
        status, mounts = (control.ask(control_socket, question) for question in ("status", "mounts"))
        mounter = psutil.Process(status["mounter"]["pid"])
        return cls(
            status["front"]["open_descriptors"],
            mounter.num_fds(),
            sum(is_alive(child.pid) for child in mounter.children()),
            tuple(mount["mountpoint"] for mount in mounts),
        )


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def settle(broker: Broker) -> None:
    """Return when the broker has made all the processes that it keeps ready."""
    last = None
    while (now := Footprint.of(broker)) != last:
        last = now
        time.sleep(0.2)


@contextlib.contextmanager
def nothing_left(broker: Broker, seconds: float = 10) -> Iterator[None]:
    """Check that the broker holds the same after the block as before, that the host has no new FUSE mount, and that
    the broker has met nothing that its authors did not expect."""
    mounts_before = fuse_mounts_of_host()
    with nothing_held(broker, seconds):
        yield
    assert fuse_mounts_of_host() == mounts_before


@contextlib.contextmanager
def nothing_held(broker: Broker, seconds: float = 10) -> Iterator[None]:
    """Check that the broker holds the same after the block as before, and has met nothing unexpected."""
    before = Footprint.of(broker)
    errors = len(broker.records("internal error"))
    yield
    give_up = time.monotonic() + seconds
    while (after := Footprint.of(broker)) != before and time.monotonic() < give_up:
        time.sleep(0.05)  # an operation that was given up ends a moment after its caller
    assert after == before, broker.log.read_text()
    assert broker.records("internal error")[errors:] == []


def fuse_mounts_of_host() -> list[Mount]:
    return [mount for mount in mountinfo() if mount.is_fuse]


@contextlib.contextmanager
def containers(broker: Broker) -> Iterator[Start]:
    """Give the function that starts containers; they end with the block, and must have no FUSE mount by then."""
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
    """The static executable, without which there is nothing to test here."""
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
    """A broker with the default configuration, that other tests use, too."""
    with nothing_left(session_broker):
        yield session_broker


@pytest.fixture(scope="module")
def impatient_broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """A broker with the deadlines that the module wants, by `DEADLINES`."""
    lines = [f"{name} = {seconds}" for name, seconds in request.module.DEADLINES.items()]
    with Broker("\n".join(["[deadlines]", *lines])) as broker:
        settle(broker)
        yield broker


@pytest.fixture
def users(tmp_path: Path) -> Path:
    """A directory of the user's, on the way to which every user may look."""
    let_users_in(tmp_path)
    return make_mountpoint(tmp_path, "user")


def let_users_in(directory: Path) -> None:
    """Let every user look into a directory that pytest has made, with those that it is in: they are root's alone."""
    for path in (directory, *directory.parents[:2]):
        mode = path.stat().st_mode
        if not mode & stat.S_IXOTH:  # else it is somebody else's, or done
            path.chmod(mode | 0o055)


def make_mountpoint(directory: Path, name: str, uid: int = USER) -> Path:
    path = directory / name
    path.mkdir()
    os.chown(path, uid, uid)
    return path


@pytest.fixture
def start(broker: Broker) -> Iterator[Start]:
    """Starts containers that use `broker`."""
    with containers(broker) as start:
        yield start


@pytest.fixture
def run_broker() -> Iterator[RunBroker]:
    """Runs a broker of the test's own. Its socket's directory is there before it, as a volume's source must be.

    When the test has ended it must have no mounts, and when it has been stopped, no process of it may be left.
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
            assert Footprint.of(broker).mounts == ()
            assert broker.records("internal error") == []
    wait_until(lambda: not any(process.is_running() for process in family))
    assert fuse_mounts_of_host() == mounts_before


def wait_until(true: Callable[[], object], seconds: float = 15) -> None:
    """Return when `true()` is. AssertionError after so many seconds."""
    give_up = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.02)


def has_ended_all(container: Container) -> bool:
    """Whether the container's first process is the only one that runs; it need not be one that reaps others."""
    return [pid for pid in container.processes() if is_alive(pid)] == [container.pid]
