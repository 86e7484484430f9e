"""Calls of the proxy, one after the other, and what they took."""

import os
import random
import time
from pathlib import Path
from typing import NamedTuple

from tests.lab.broker import Broker
from tests.lab.callers import enter_private_namespace
from tests.lab.load import Beside, Call, Helper


class Sample(NamedTuple):
    """Milliseconds of successful calls, and the messages of the others."""

    mounts: list[float]
    unmounts: list[float]
    errors: list[str]

    @classmethod
    def empty(cls) -> "Sample":
        return cls([], [], [])

    def extend(self, other: "Sample") -> None:
        self.mounts.extend(other.mounts)
        self.unmounts.extend(other.unmounts)
        self.errors.extend(other.errors)


def note(call: Call, milliseconds: list[float], errors: list[str]) -> None:
    if call.status:
        errors.append(call.said)
    else:
        milliseconds.append(1000 * call.seconds)


def mount_and_unmount(helper: Helper, mountpoint: Path, sample: Sample) -> None:
    """Call the proxy twice, as a FUSE program does."""
    mounted = helper.mount(mountpoint)
    note(mounted, sample.mounts, sample.errors)
    if mounted.descriptor >= 0:
        os.close(mounted.descriptor)
    if mounted.status == 0:
        note(helper.unmount(mountpoint), sample.unmounts, sample.errors)


def call_until(end: float, socket_path: Path, mountpoint: Path, pause: float = 0.0) -> Sample:
    """Mount and unmount in a separate mount namespace, as a container would, until the monotonic time `end`.

    Before each call it waits for `pause` seconds on average, and for no fixed time: else it would always meet the same
    point of the tenth of a second in which other processes have their share of the processors.
    """
    enter_private_namespace()
    helper = Helper(socket_path)
    sample = Sample.empty()
    while time.monotonic() < end:
        mount_and_unmount(helper, mountpoint, sample)
        time.sleep(random.uniform(0, 2 * pause))
    return sample


def caller(broker: Broker, mountpoint: Path, end: float, pause: float = 0.0) -> Beside[Sample]:
    mountpoint.mkdir(exist_ok=True)
    return Beside(lambda: call_until(end, broker.socket, mountpoint, pause))
