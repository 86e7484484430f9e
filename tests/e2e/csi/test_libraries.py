"""Our smallest filesystems on libraries other than libfuse, which start their helper differently."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.callers.build import go_programs, rust_programs
from tests.callers.conftest import or_not_run
from tests.e2e.csi.pods import OWN_MOUNTPOINT, consumer, pod, read, starter
from tests.lab.kubelet import Kubelet
from tests.lab.podman import Volume

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.e2e

PROGRAMS = {
    "fuser_0_12": rust_programs,
    "fuser_0_16": rust_programs,
    "fuser_0_18": rust_programs,
    "gofuse": go_programs,
    "bazil": go_programs,
    "jacobsa": go_programs,
}


@pytest.mark.parametrize(("program", "build"), PROGRAMS.items(), ids=PROGRAMS.keys())
def test_a_program(kubelet: Kubelet, program: str, build: Callable[[], Path]) -> None:
    with or_not_run():
        directory = build()
    own = kubelet.images["starter"]
    images = {**kubelet.images, "starter": replace(own, volumes=[*own.volumes, Volume(directory, "/programs")])}
    serving = starter(f"exec /programs/{program} {OWN_MOUNTPOINT}", sidecar=True)
    with Kubelet(kubelet.node, kubelet.driver, kubelet.plugin, images).pod(
        pod([consumer()], init=[serving])
    ) as running:
        assert read(running) == "hello\n"
        running["consumer"].exec(["sh", "-c", "echo written > /data/hello"])
        assert read(running) == "written\n"
