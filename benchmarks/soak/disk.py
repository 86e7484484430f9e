"""Faults of the broker's disk: it is full for a while, also when the broker has to start."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from benchmarks.soak.report import NO_SPACE, REFUSED, Ordeal
from benchmarks.soak.scene import Scene
from tests.lab.broker import PROGRAM
from tests.lab.commands import run
from tests.lab.faults import FRONT, kill_now, wait_for_others

ResultT = TypeVar("ResultT")
#: Seconds after which the broker is healthy again once there is space.
HEALS = 10.0
#: Seconds after which a refusal must be visible in the broker's health.
TELLS = 3.0


def full(scene: Scene) -> None:
    """For a random few seconds mounts may be refused, and then health must report it; nothing else may fail."""
    _while_full(scene, lambda: _use(scene, scene.chance.uniform(2, 5)))


def full_and_front_killed(scene: Scene) -> None:
    """The next front has to begin without space, or to wait for it; callers wait for that."""

    def kill_front() -> list[tuple[str, int]]:
        killed = kill_now(scene.broker, FRONT)
        time.sleep(scene.chance.uniform(0.5, 3))
        return killed

    wait_for_others(scene.broker, *_while_full(scene, kill_front))


def full_and_all_killed(scene: Scene) -> None:
    """The next broker has to begin without space, or to wait for it; systemd restarts it repeatedly."""

    def kill_all() -> None:
        scene.kill_all()
        scene.broker.launch()
        time.sleep(scene.chance.uniform(0.5, 3))

    _while_full(scene, kill_all)


def _while_full(scene: Scene, during: Callable[[], ResultT]) -> ResultT:
    """Return the result of `during()`, called while the disk is full; note if the broker does not get healthy again."""
    # A broker that has just begun has no room in its files that it could use instead.
    scene.broker.stop()
    scene.broker.start()
    ordeal = Ordeal(REFUSED, NO_SPACE, time.monotonic())
    scene.report.ordeals.append(ordeal)
    try:
        scene.disk.fill()
        result = during()
    finally:
        scene.disk.free()
    freed = time.monotonic()
    if scene.broker.process.poll() is not None:
        scene.start_again()
    while not is_healthy(scene) and time.monotonic() - freed < HEALS:
        time.sleep(0.1)
    ordeal.ended = time.monotonic()
    if not is_healthy(scene):
        scene.error(f"health is not ok {HEALS:g} s after there is space again", freed)
    return result


def _use(scene: Scene, seconds: float) -> None:
    """Mount and unmount for so many seconds; a refused caller must find the refusal in the broker's health."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        begun = time.monotonic()
        mounted, _ = scene.probe("while the disk is full")
        if mounted.status and NO_SPACE.search(mounted.said):
            while is_healthy(scene) and time.monotonic() - begun < TELLS:
                time.sleep(0.1)
            if is_healthy(scene):
                scene.error("health is ok although mounts are refused because the disk is full", begun)
                return
        time.sleep(0.1)


def is_healthy(scene: Scene) -> bool:
    """Return whether `fusermount3-broker health` reports a healthy broker, and nothing else."""
    command: list[str | Path] = [PROGRAM, "health", "--config", scene.broker.config]
    said = run(command, check=False)
    return said.returncode == 0 and said.stdout.strip() == "ok"
