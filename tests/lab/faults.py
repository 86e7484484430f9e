"""Killing parts of a running broker."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

from broker import control

if TYPE_CHECKING:
    from tests.lab.broker import Broker

#: Of a broker's processes.
Part = str
FRONT, MOUNTER = "front", "mounter"


def status_of(broker: Broker, seconds: float = 20) -> dict[str, Any]:
    """Return the broker's status, as soon as it answers: after a kill that takes a moment."""
    give_up = time.monotonic() + seconds
    while True:
        try:
            answer: dict[str, Any] = control.ask(broker.directory / "control/control.sock", "status")
            return answer
        except control.NotRunning:
            if time.monotonic() > give_up:
                raise
        time.sleep(0.02)


def kill(broker: Broker, *parts: Part) -> None:
    """Kill parts of the broker at once, and return when it serves again."""
    status = status_of(broker)
    for part in parts:
        os.kill(status[part]["pid"], signal.SIGKILL)
    revive(broker)
    status_of(broker)


def revive(broker: Broker) -> None:
    """Start the broker again if it has ended, as systemd does.

    Where the front is the process that was started, its death ends the broker. This has nothing to do where a
    supervisor starts the front again.
    """
    time.sleep(0.05)
    if broker.process.poll() is not None:
        broker.start()
