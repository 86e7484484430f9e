"""Killing parts of a running broker, or all of it."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from fusermount3_broker.cli import control_client

if TYPE_CHECKING:
    import random

    from tests.lab.broker import Broker

#: The name of one of a broker's processes.
Part = str
FRONT, MOUNTER = "front", "mounter"


def status_of(broker: Broker, seconds: float = 20) -> dict[str, Any]:
    """Return the broker's status as soon as it answers, which takes a moment after a kill.

    Raises NotRunning, at once if the supervisor has ended.
    """
    give_up = time.monotonic() + seconds
    while True:
        try:
            answer: dict[str, Any] = control_client.ask(broker.directory / "control/control.sock", "status")
            return answer
        except control_client.NotRunning:
            if time.monotonic() > give_up or broker.process.poll() is not None:
                raise
        time.sleep(0.02)


def kill(broker: Broker, *parts: Part, seconds: float = 30) -> None:
    """Kill parts of the broker at once, and return when it serves again with new processes in their places."""
    wait_for_others(broker, *kill_now(broker, *parts), seconds=seconds)


def kill_now(broker: Broker, *parts: Part) -> list[tuple[Part, int]]:
    """Kill parts of the broker at once; return them with their pids."""
    status = status_of(broker)
    killed = [psutil.Process(status[part]["pid"]) for part in parts]
    for process in killed:
        process.kill()
    psutil.wait_procs(killed, timeout=10)
    return [(part, process.pid) for part, process in zip(parts, killed, strict=True)]


def wait_for_others(broker: Broker, *killed: tuple[Part, int], seconds: float = 30) -> None:
    """Return when the broker serves with new processes in the places of these."""
    give_up = time.monotonic() + seconds
    gone = {None, *(pid for _, pid in killed)}
    while (now := status_of(broker, seconds)) and any(now.get(part, {}).get("pid") in gone for part, _ in killed):
        assert time.monotonic() < give_up, "it is not started again"
        time.sleep(0.02)


def kill_starting_fronts(broker: Broker, number: int, chance: random.Random, seconds: float = 30) -> None:
    """Kill the front and so many of its successors, each while it starts; return when one serves.

    NotRunning if the supervisor has ended because of that.
    """
    (killed,) = kill_now(broker, FRONT)
    seen = {*children_of(broker.process.pid), killed[1]}
    give_up = time.monotonic() + seconds
    for _ in range(number):
        while not (new := [pid for pid in children_of(broker.process.pid) if pid not in seen]):
            assert time.monotonic() < give_up, "no front was started"
            if broker.process.poll() is not None:
                break
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.1))  # it takes longer before it serves
        for pid in new:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        seen.update(new)
    wait_for_others(broker, killed, seconds=seconds)


def kill_all(broker: Broker) -> None:
    """Kill all processes of the broker together, as systemd does with a service; return when its own are gone.

    A child of the mounter may stay for as long as a caller's filesystem keeps it.
    """
    supervisor = psutil.Process(broker.process.pid)
    parts = supervisor.children()
    with suppress(psutil.NoSuchProcess):
        for part in (supervisor, *parts):  # so that none is forked that would be missed
            part.suspend()
        wait_until_stopped([supervisor, *parts])
    everybody = [supervisor, *supervisor.children(recursive=True)]
    for process in everybody:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    broker.process.wait(timeout=10)
    _, alive = psutil.wait_procs(parts, timeout=10)
    assert not alive, f"not killed: {alive}"


def wait_until_stopped(processes: list[psutil.Process], seconds: float = 1) -> None:
    """Return when these processes are stopped, or ended; after so many seconds in any case."""
    give_up = time.monotonic() + seconds
    while not all(is_stopped(process) for process in processes) and time.monotonic() < give_up:
        time.sleep(0.0005)


def is_stopped(process: psutil.Process) -> bool:
    """Return whether the process is stopped, or has ended."""
    try:
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def children_of(pid: int) -> list[int]:
    """Return the pids of the children of a process; none if it has ended (proc_pid_task(5), children)."""
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def kill_at_once(processes: list[psutil.Process]) -> None:
    """Kill these processes, and return when they have ended."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=20)
