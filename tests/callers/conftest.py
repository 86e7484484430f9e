"""One broker, one container for each kit, and what was seen, for all the tests of the callers."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Protocol

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

# fuser asks for allow_other with auto_unmount.
CONFIGURATION = "user_allow_other = true"


class MachineFor(Protocol):
    """Give the container of this caller; `devices` put something at /dev/fuse."""

    def __call__(self, caller: Caller, devices: tuple[str, ...]) -> Machine: ...


class Machines:
    """The running containers. What can't be had, a kit or a server, is asked for once."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._machines: dict[tuple[Kit, tuple[str, ...]], Machine] = {}
        self._missing: dict[Kit | str, NotReachable] = {}

    def get(self, caller: Caller, devices: tuple[str, ...]) -> Machine:
        """Raises NotReachable."""
        key = (caller.kit, devices)
        with self._once(caller.kit):
            if key not in self._machines:
                self._machines[key] = Machine(self._broker, caller.kit, devices)
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
        """End a container that is not as it was."""
        self._machines = {key: other for key, other in self._machines.items() if other is not machine}
        machine.close()

    def close(self) -> None:
        for machine in list(self._machines.values()):
            self.discard(machine)


@pytest.fixture(scope="session")
def machines() -> Iterator[Machines]:
    if not PROXY.exists():
        pytest.fail(f"{PROXY} is missing: run 'make static'")
    with Broker(CONFIGURATION) as broker:
        settle(broker)
        with nothing_left_by(broker):
            machines = Machines(broker)
            yield machines
            machines.close()


@pytest.fixture
def machine_for(machines: Machines) -> Iterator[MachineFor]:
    """Gives containers, and sees that the test leaves them as they were. Where something can't be downloaded, the test
    is not run, which in CI is a failure."""
    used: list[Machine] = []

    def machine_for(caller: Caller, devices: tuple[str, ...]) -> Machine:
        try:
            used.append(machines.get(caller, devices))
        except NotReachable as error:
            not_run(str(error))
        return used[-1]

    yield machine_for
    for machine in used:
        try:
            check_nothing_left(machine)
        except AssertionError:
            left = [machine.container.fuse_mounts(), [str(pid) for pid in machine.processes()]]
            machines.discard(machine)
            pytest.fail(f"left behind: {left}")


def not_run(reason: str) -> None:
    """End the test: it was not run. In CI everything has to run."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"not run: {reason}")
    pytest.skip(f"not run: {reason}")


@pytest.fixture(scope="session")
def seen() -> Seen:
    """What the tests have seen of the callers."""
    return Seen()
