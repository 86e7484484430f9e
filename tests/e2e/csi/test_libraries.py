"""Our smallest filesystems on libraries other than libfuse, which start their helper differently."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.callers.build import go_programs, rust_programs
from tests.callers.conftest import or_not_run
from tests.e2e.conftest import wait_until
from tests.e2e.csi.pods import DATA, OWN_MOUNTPOINT, consumer, pod, read, starter
from tests.lab.kubelet import Kubelet
from tests.lab.podman import Volume

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.lab.kubelet import Pod

pytestmark = pytest.mark.e2e

LOOKS = 3
"""How often the broker looks at the containers before the last one has ended, once a second."""
PATIENCE = 20
"""Seconds in which a program ends whose filesystem nobody has any more; then it is killed."""

PROGRAMS: dict[str, Callable[[], Path]] = {
    "fuser_0_12": rust_programs,
    "fuser_0_16": rust_programs,
    "fuser_0_18": rust_programs,
    "gofuse": go_programs,
    "bazil": go_programs,
    "jacobsa": go_programs,
}


THAT_WAIT = ("gofuse", "bazil", "jacobsa")
"""Those that unmount when they are told to end, and end when the kernel has ended the filesystem."""


@contextlib.contextmanager
def served(kubelet: Kubelet, program: str) -> Iterator[Pod]:
    """Run a pod with a sidecar that serves, and a consumer."""
    with or_not_run():
        directory = PROGRAMS[program]()
    own = kubelet.images["starter"]
    images = {**kubelet.images, "starter": replace(own, volumes=[*own.volumes, Volume(directory, "/programs")])}
    serving = starter(f"exec /programs/{program} {OWN_MOUNTPOINT}", sidecar=True)
    with Kubelet(kubelet.node, kubelet.driver, kubelet.plugin, images).pod(
        pod([consumer()], init=[serving])
    ) as running:
        yield running


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program(kubelet: Kubelet, program: str) -> None:
    with served(kubelet, program) as running:
        assert read(running) == "hello\n"
        running["consumer"].exec(["sh", "-c", "echo written > /data/hello"])
        assert read(running) == "written\n"


@pytest.mark.parametrize("program", THAT_WAIT)
def test_a_sidecar_that_waits_for_the_end_of_its_filesystem_ends_after_the_last_container_that_has_it(
    kubelet: Kubelet, program: str
) -> None:
    with served(kubelet, program) as running:
        running.stop_loop()  # nothing is restarted any more
        os.kill(running["starter"].pid, signal.SIGTERM)
        wait_until(lambda: not running["starter"].fuse_mounts(OWN_MOUNTPOINT))
        for number in range(LOOKS):
            running["consumer"].exec(["sh", "-c", f"echo {number} > {DATA}/hello"])
            assert read(running) == f"{number}\n"
            time.sleep(1)
        running["consumer"].remove()
        assert running["starter"].stop(PATIENCE) == 0
