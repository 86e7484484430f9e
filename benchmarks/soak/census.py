"""Finds mounts made through the broker that the broker does not list."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from fusermount3_broker.cli import control_client
from tests.lab.broker import Broker
from tests.lab.podman import Mount

#: Seconds after which the broker must list a mount. A mount just made or just removed is missing for a moment.
MOMENT = 3.0


class Found(NamedTuple):
    """A mount of one user of the broker: its id and device as mountinfo has them (proc_pid_mountinfo(5))."""

    whose: str
    id: int
    device: str
    mountpoint: str

    @property
    def number(self) -> int:
        """Return the device as the broker has it: a FUSE filesystem's major number is 0."""
        return int(self.device.partition(":")[2])


class Census:
    """Compares the existing mounts, which `mounts` returns by owner, with the mounts that the broker lists."""

    def __init__(self, broker: Broker, mounts: Callable[[], dict[str, list[Mount]]]) -> None:
        self._broker = broker
        self._mounts = mounts
        self._told: set[Found] = set()

    def unknown(self) -> list[Found]:
        """Return the mounts that the broker lists at no look within `MOMENT`; each mount once.

        Raises NotRunning.
        """
        give_up = time.monotonic() + MOMENT
        found = self._found()
        while True:
            known = {mount["device"] for mount in self.listed()}
            found = {each for each in found & self._found() if each.number not in known}
            if not found or time.monotonic() > give_up:
                break
            time.sleep(0.05)
        new = sorted(found - self._told)
        self._told |= found
        return new

    def _found(self) -> set[Found]:
        everybody = self._mounts().items()
        return {Found(whose, each.id, each.device, each.mountpoint) for whose, mounts in everybody for each in mounts}

    def listed(self) -> list[dict[str, Any]]:
        """Return the broker's list of mounts. Raises NotRunning."""
        listed: list[dict[str, Any]] = control_client.ask(self._broker.directory / "control/control.sock", "mounts")
        return listed
