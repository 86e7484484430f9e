"""FUSE programs that stop answering: kubelet's calls end in time, and the pod can still be removed."""

from __future__ import annotations

import contextlib
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import wait_until
from tests.e2e.csi.pods import DATA, OWN_MOUNTPOINT, SOCKETS, consumer, kill, pod, starter, wait_for_mount
from tests.lab.manifests import EmptyDir

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.kubelet import Kubelet, Pod
    from tests.lab.manifests import Pod as Spec

pytestmark = [pytest.mark.e2e, pytest.mark.long]

IN_TIME = 15
"""Seconds; kubelet waits 120 for a call. The deadline of an operation is 3 here, and there are some in a row."""

#: Options of stopfs, the command that then hangs on it, and whether stopfs then answers nothing at all.
HANGS = {
    "getattr": ("silent_at=getattr", "stat .", False),
    "getattr, stopped": ("stop_at=getattr", "stat .", True),
    "lookup": ("silent_at=lookup", "cat file", False),
    "init": ("silent_at=init", "stat .", True),
    "writeback": ("writeback,silent_at=write", "dd if=/dev/zero of=file bs=4k count=100", False),
}


def hanging(options: str, timing: str) -> Spec:
    # stopfs must not be the first process, which can't be stopped from within its pid namespace.
    return pod([starter(f"stopfs -f -o {options} {OWN_MOUNTPOINT}; true")], attributes={"mountTiming": timing})


@contextlib.contextmanager
def used(running: Pod, use: str) -> Iterator[None]:
    """Have a process on the node use the volume as soon as its program has mounted it, and hang on it."""
    wait_for_mount(running, "starter", OWN_MOUNTPOINT)
    wait_until(lambda: any(mount.is_fuse for mount in running.node.mounts(running.target())))  # it comes second
    command = running.node.command("sh", "-c", f'cd "$1" && {use}', "sh", running.target())
    user = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(1)
    assert user.poll() is None, "it does not hang"
    yield
    user.wait(timeout=IN_TIME)


@pytest.mark.parametrize(("options", "use", "answers_nothing"), HANGS.values(), ids=HANGS.keys())
@pytest.mark.parametrize("timing", ["onConnect", "eager"])
def test_kubelet_is_never_held_up(kubelet: Kubelet, options: str, use: str, answers_nothing: bool, timing: str) -> None:
    with kubelet.pod(hanging(options, timing)) as running, used(running, use):
        begun = time.monotonic()
        condition = running.stats(patience=IN_TIME).volume_condition
        assert time.monotonic() - begun < IN_TIME
        assert condition.abnormal == answers_nothing, condition.message
        running.publish(running.csi_volume())
        running.stop_loop()
        # Containers are gone before a volume is, unless one couldn't be killed: here the program still runs.
        running.kubelet.plugin.unpublish(running.handle(running.csi_volume()), running.target(), IN_TIME)
        assert running.node.mounts(running.target()) == []
        running.stop_containers()


@pytest.mark.parametrize("timing", ["onConnect", "eager"])
def test_a_pod_with_a_hung_program_goes(kubelet: Kubelet, timing: str) -> None:
    with kubelet.pod(hanging("stop_at=getattr", timing)) as running, used(running, "stat ."):
        running.tear_down()


def test_a_program_that_is_asked_for_a_part_and_hangs_holds_up_nobody_else(kubelet: Kubelet) -> None:
    """A part of the dead filesystem has to be replaced in one container, all of it in the other."""
    again = f"test -e /sockets/again && stopfs -f -o silent_at=lookup {OWN_MOUNTPOINT}"
    serving = starter(f"{again}; exec whoamifs -f {OWN_MOUNTPOINT}", sidecar=True)
    part = consumer("part", mount={"subPath": "files"})
    with kubelet.pod(pod([consumer(propagation="None"), part], init=[serving])) as running:
        (running.node.seen(running.volume_path(EmptyDir(SOCKETS))) / "again").touch()
        (dead,) = running["consumer"].fuse_mounts(DATA)
        kill(running)
        wait_until(lambda: running["consumer"].fuse_mounts(DATA)[-1].device != dead.device)
        time.sleep(1)
        assert [mount.device for mount in running["part"].fuse_mounts(DATA)] == [dead.device]
        begun = time.monotonic()
        running.publish(running.csi_volume())
        assert time.monotonic() - begun < IN_TIME
        running.tear_down()
