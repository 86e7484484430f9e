"""Killing parts of a running broker."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import psutil

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


def kill(broker: Broker, *parts: Part, seconds: float = 30) -> None:
    """Kill parts of the broker at once, and return when it serves again, with others in their places."""
    status = status_of(broker)
    killed = [psutil.Process(status[part]["pid"]) for part in parts]
    for process in killed:
        process.kill()
    psutil.wait_procs(killed, timeout=10)
    give_up = time.monotonic() + seconds
    gone = {process.pid for process in killed}
    while (now := status_of(broker)) and any(now.get(part, {}).get("pid") in {None, *gone} for part in parts):
        assert time.monotonic() < give_up, "it is not started again"
        time.sleep(0.02)
