"""Fixtures for all tests of the callers: the brokers, one container of each for each kit, and the results."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, NoReturn, Protocol

import pytest

from tests.callers.build import NotReachable
from tests.callers.machines import Machine, check_nothing_left
from tests.callers.table import Seen
from tests.e2e.conftest import nothing_left as nothing_left_by
from tests.e2e.conftest import settle
from tests.lab.broker import PROXY, Broker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.callers.callers import Caller, Kit

CONFIGURATIONS = {False: "", True: "user_allow_other = true"}
"""The shipped configuration, and the settings that some callers need."""


class MachineFor(Protocol):
    """Return the container of this caller; `devices` provide a /dev/fuse."""

    def __call__(self, caller: Caller, devices: tuple[str, ...], *, user_allow_other: bool = False) -> Machine: ...


class Machines:
    """The running containers. An unreachable kit or server is requested only once."""

    def __init__(self, brokers: dict[bool, Broker]) -> None:
        """Take the brokers, keyed by their `user_allow_other` setting."""
        self._brokers = brokers
        self._machines: dict[tuple[Kit, tuple[str, ...], bool], Machine] = {}
        self._missing: dict[Kit | str, NotReachable] = {}

    def get(self, caller: Caller, devices: tuple[str, ...], *, user_allow_other: bool) -> Machine:
        """Return the container for this caller, with the server that it needs. Raises NotReachable."""
        key = (caller.kit, devices, user_allow_other)
        with self._once(caller.kit):
            if key not in self._machines:
                self._machines[key] = Machine(self._brokers[user_allow_other], caller.kit, devices)
        with self._once(caller.service):
            self._machines[key].service(caller.service)
        return self._machines[key]

    @contextlib.contextmanager
    def _once(self, wanted: Kit | str) -> Iterator[None]:
        if wanted in self._missing:
            raise self._missing[wanted]
        try:
            yield
        except NotReachable as error:
            self._missing[wanted] = error
            raise

    def discard(self, machine: Machine) -> None:
        """Remove a container that a test has not left as it was."""
        self._machines = {key: other for key, other in self._machines.items() if other is not machine}
        machine.close()

    def close(self) -> None:
        for machine in list(self._machines.values()):
            self.discard(machine)


@pytest.fixture(scope="session")
def machines() -> Iterator[Machines]:
    if not PROXY.exists():
        pytest.fail(f"{PROXY} is missing: run 'make static'")
    with contextlib.ExitStack() as stack:
        brokers = {each: stack.enter_context(Broker(text)) for each, text in CONFIGURATIONS.items()}
        for broker in brokers.values():
            settle(broker)
            stack.enter_context(nothing_left_by(broker))
        machines = Machines(brokers)
        yield machines
        machines.close()


@pytest.fixture
def machine_for(machines: Machines) -> Iterator[MachineFor]:
    """Return containers, and check that the test leaves them as they were. If a download fails, the test is not run,
    which in CI is a failure."""
    used: list[Machine] = []

    def machine_for(caller: Caller, devices: tuple[str, ...], *, user_allow_other: bool = False) -> Machine:
        with or_not_run():
            used.append(machines.get(caller, devices, user_allow_other=user_allow_other))
        return used[-1]

    yield machine_for
    for machine in used:
        try:
            check_nothing_left(machine)
        except AssertionError:
            left = [machine.container.fuse_mounts(), [str(pid) for pid in machine.processes()]]
            machines.discard(machine)
            pytest.fail(f"left behind: {left}")


def not_run(reason: str) -> NoReturn:
    """Skip the test as not run. In CI every test must run, so there it fails."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"not run: {reason}")
    pytest.skip(f"not run: {reason}")


@contextlib.contextmanager
def or_not_run() -> Iterator[None]:
    """If a download fails in the block, the test is not run, which in CI is a failure."""
    try:
        yield
    except NotReachable as error:
        not_run(str(error))


@pytest.fixture(scope="session")
def seen() -> Seen:
    """The results of the tests, by caller."""
    return Seen()
