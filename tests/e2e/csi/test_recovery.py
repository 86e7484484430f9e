"""Containers that start again on a volume whose program is gone, in the first place that of the program itself.

A container runtime fails on a dead filesystem. So the broker puts a tombstone in its place, on which containers can
start; for who reads, that is as dead.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import wait_until
from tests.e2e.csi.conftest import CONFIGURATION
from tests.e2e.csi.pods import DATA, SOCKETS, VOLUME, consumer, kill, pod, read, serve, starter, wait_for_volume
from tests.e2e.csi.test_killed_programs import CONTENT, MAY_BE_SAID, Reader, reads, serves
from tests.e2e.csi.test_processes import kill as kill_process

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.csi.conftest import RunCluster
    from tests.e2e.csi.pods import Container
    from tests.lab.kubelet import Kubelet, Pod

pytestmark = [pytest.mark.e2e, pytest.mark.long]

GONE = "Transport endpoint is not connected"
TYPE = "fuse.tombstone"
WITHOUT_MOUNTPOINT = "exec fuse-starter -- hello_ll -f {}"
#: A program that serves only when the test lets it.
WHEN_LET = f"until [ -e /sockets/go ]; do sleep 0.1; done; {serve()}"


@pytest.fixture
def kubelet(run_cluster: RunCluster) -> Kubelet:
    """Return the kubelet of a node whose broker removes dead mounts, as it does unless it is configured otherwise."""
    kubelet = run_cluster(f"dead_mounts_seconds = 2\n{CONFIGURATION}").kubelet
    kubelet.binds_as_containerd = True
    return kubelet


def with_volume(container: Container, propagation: str = "HostToContainer") -> Container:
    """Return the container of a program with the volume that it serves."""
    volume = {"name": VOLUME, "mountPath": DATA, "mountPropagation": propagation}
    return {**container, "volumeMounts": [*container["volumeMounts"], volume]}


def has_tombstone(running: Pod) -> bool:
    """Return whether there is a tombstone at the target."""
    running.check_loop()
    return [mount.fstype for mount in running.node.mounts(running.target())][-1:] == [TYPE]


def go(running: Pod) -> Path:
    """Return the path of the file that lets the program serve."""
    (sockets,) = [volume for volume in running.spec.volumes if volume.name == SOCKETS]
    return running.node.seen(running.volume_path(sockets)) / "go"


@pytest.mark.parametrize("propagation", ["HostToContainer", "None"])
@pytest.mark.parametrize("command", [serve(), WITHOUT_MOUNTPOINT], ids=["mountpoint", "descriptor"])
def test_a_program_whose_own_container_has_the_volume_comes_back(
    kubelet: Kubelet, command: str, propagation: str
) -> None:
    """Again and again; who reads all the time sees no empty directory."""
    with kubelet.pod(pod([consumer(), with_volume(starter(command), propagation)])) as running:
        wait_for_volume(running)
        reader = Reader(running, "consumer")
        for restarts in (1, 2, 3):
            kill(running)
            running.wait_until_restarted("starter", restarts)
            wait_until(lambda: serves(running, "consumer"), 30)
            wait_until(lambda: serves(running, "starter"), 30)
        seen: Counter[str] = reader.result()
        assert seen[CONTENT] > 0
        assert [said for said in seen if said != CONTENT and not MAY_BE_SAID.fullmatch(said)] == []


@pytest.mark.parametrize("timing", ["onConnect", "eager"])
@pytest.mark.parametrize("propagation", ["HostToContainer", "None"])
def test_a_container_starts_again_while_the_program_is_away(kubelet: Kubelet, timing: str, propagation: str) -> None:
    """It reads an error, and what the program serves as soon as that has come back. So do containers that have been
    there all the time."""
    stays, dies = consumer("stays", propagation=propagation), consumer("dies", propagation=propagation)
    serving = starter(WHEN_LET, sidecar=True)
    with kubelet.new_pod(pod([stays, dies], init=[serving], attributes={"mountTiming": timing})) as running:
        running.set_up_volumes()
        go(running).touch()
        running.start_sandbox()
        running.start_containers()
        assert serves(running, "dies")
        started = running["stays"].pid
        go(running).unlink()
        kill(running)
        wait_until(lambda: has_tombstone(running), 30)
        kill(running, "dies")
        running.wait_until_restarted("dies", 1)
        for name in ("stays", "dies"):
            said = running[name].exec(["ls", DATA], check=False)
            assert GONE in said.stderr, said
        assert [mount.fstype for mount in running["dies"].fuse_mounts(DATA)] == [TYPE]
        go(running).touch()
        for name in ("stays", "dies"):
            wait_until(lambda name=name: serves(running, name), 30)  # type: ignore[misc]
            assert read(running, name) == "hello\n"
        assert running["stays"].pid == started
        assert running.restarts["dies"] == 1


@pytest.mark.parametrize("process", ["front", "broker"])
def test_a_later_broker_knows_what_containers_have(run_cluster: RunCluster, process: str) -> None:
    """The one that saw the program end is killed before the next program mounts.

    A broker takes fusectl along where that is mounted nowhere, and with it what identifies the dead filesystem.
    """
    cluster = run_cluster(f"dead_mounts_seconds = 2\n{CONFIGURATION}")
    cluster.kubelet.binds_as_containerd = True
    container = consumer("stays", propagation="None")
    spec = pod([container], init=[starter(WHEN_LET, sidecar=True)])
    with cluster.kubelet.new_pod(spec) as running:
        running.set_up_volumes()
        go(running).touch()
        running.start_sandbox()
        running.start_containers()
        assert serves(running, "stays")
        go(running).unlink()
        kill(running)
        wait_until(lambda: has_tombstone(running), 30)
        kill_process(cluster, process)
        go(running).touch()
        wait_until(lambda: serves(running, "stays"), 30)


def test_a_part_of_the_volume_is_restored_although_there_was_a_tombstone(kubelet: Kubelet) -> None:
    """Containers with a subPath have the dead filesystem, which is no longer at the target when the program is back."""
    part = consumer("part", propagation="None", mount={"subPath": "files"})
    command = f"until [ -e /sockets/go ]; do sleep 0.1; done; {serve('whoamifs')}"
    with kubelet.new_pod(pod([consumer(), part], init=[starter(command, sidecar=True)])) as running:
        running.set_up_volumes()
        go(running).touch()
        running.start_sandbox()
        running.start_containers()
        started = running["part"].pid
        for number in (1, 2):
            go(running).unlink()
            kill(running)
            wait_until(lambda: has_tombstone(running), 30)
            go(running).touch()
            write = ["sh", "-c", f"echo {number} > {DATA}/new"]
            wait_until(lambda: running["part"].exec(write, check=False).returncode == 0, 30)  # noqa: B023
            assert read(running, "consumer", "files/new") == f"{number}\n"
            (bind,) = kubelet.node.seen(running.directory / "volume-subpaths").glob("*/part/*")
            wait_until(lambda: reads(bind / "new", f"{number}\n"))  # noqa: B023
        assert running["part"].pid == started
