"""Volumes that are mounted before any container starts: readers wait for the program, and no container needs mount
propagation.

A container runtime inspects what it mounts, and so waits, too. Therefore the program comes first in these pods, and the
containers that use the volume start when it serves.
"""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import wait_until
from tests.e2e.csi.pods import COMMANDS, DATA, OWN_MOUNTPOINT, SOCKETS, consumer, kill, pod, read, serve, starter
from tests.lab.manifests import EmptyDir

if TYPE_CHECKING:
    from tests.lab.kubelet import Kubelet, Pod
    from tests.lab.manifests import Pod as Spec

pytestmark = pytest.mark.e2e

EAGER = {"mountTiming": "eager"}
WHEN_TOLD = "while ! [ -e /sockets/go ]; do sleep 0.05; done; "


def eager(command: str, **spec: object) -> Spec:
    """A pod whose consumer has no mount propagation."""
    return pod([starter(command), consumer(propagation="None")], attributes=EAGER, **spec)  # type: ignore[arg-type]


def tell(running: Pod) -> None:
    """Let the program that runs WHEN_TOLD begin."""
    (running.volume_path(EmptyDir(SOCKETS)) / "go").touch()


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
def test_who_comes_before_the_program_serves_waits(kubelet: Kubelet, command: str) -> None:
    with kubelet.new_pod(eager(WHEN_TOLD + command)) as running, ThreadPoolExecutor() as beside:
        setting_up = beside.submit(running.set_up)
        wait_until(lambda: any(mount.is_fuse for mount in kubelet.node.mounts(running.directory)))
        read_on_the_node = beside.submit(kubelet.node.run, ["cat", running.target() / "hello"])
        try:
            with pytest.raises(TimeoutError):
                read_on_the_node.result(2)
            assert not setting_up.done()
        finally:
            tell(running)
        assert read_on_the_node.result(60).stdout == "hello\n"
        setting_up.result(60)
        assert read(running) == "hello\n"


def test_the_program_has_its_own_mountpoint(kubelet: Kubelet) -> None:
    with kubelet.pod(eager(serve())) as running:
        assert read(running) == "hello\n"
        (own,) = running["starter"].fuse_mounts(OWN_MOUNTPOINT)
        (data,) = running["consumer"].fuse_mounts(DATA)
        assert own.device == data.device
        assert running["starter"].exec(["cat", f"{OWN_MOUNTPOINT}/hello"]).stdout == "hello\n"


def test_a_read_only_volume(kubelet: Kubelet) -> None:
    with kubelet.pod(eager(serve(), read_only=True)) as running:
        assert read(running) == "hello\n"
        said = running["consumer"].exec(["sh", "-c", f"echo > {DATA}/hello"], check=False)
        assert "Read-only file system" in said.stderr


def test_a_program_that_is_a_plain_user(kubelet: Kubelet) -> None:
    with kubelet.pod(eager(serve(), securityContext={"runAsUser": 1000, "runAsGroup": 1000})) as running:
        assert read(running) == "hello\n"


def test_a_program_that_was_killed_comes_back_for_who_has_the_dead_mount(kubelet: Kubelet) -> None:
    with kubelet.pod(eager(serve())) as running:
        for restarts in (1, 2, 3):
            assert read(running) == "hello\n"
            kill(running)
            running.wait_until_restarted("starter", restarts)
            wait_for_content(running)


def test_a_container_that_started_when_nothing_was_mounted_gets_the_next_filesystem(kubelet: Kubelet) -> None:
    """It has no propagation. Here an administrator has unmounted the volume."""
    command = f"mkdir /sockets/once || {WHEN_TOLD}{serve()}"
    with kubelet.pod(pod([starter(command), consumer(propagation="None")], attributes=EAGER)) as running:
        assert read(running) == "hello\n"
        kill(running)
        running.wait_until_restarted("starter", 1)
        while any(mount.is_fuse for mount in kubelet.node.mounts(running.target())):
            kubelet.node.run(["umount", "--lazy", running.target()])
        kill(running, "consumer")
        running.wait_until_restarted("consumer", 1)
        assert running["consumer"].exec(["ls", "-A", DATA]).stdout == ""
        tell(running)
        wait_until(lambda: running["consumer"].exec(["cat", f"{DATA}/hello"], check=False).stdout == "hello\n")


def wait_for_content(running: Pod, seconds: float = 20) -> None:
    """Wait until the consumer reads the program's content; until then it may only get ENOTCONN or ECONNABORTED."""
    give_up = time.monotonic() + seconds
    while (said := running["consumer"].exec(["cat", f"{DATA}/hello"], check=False)).stdout != "hello\n":
        assert "Transport endpoint is not connected" in said.stderr or "connection abort" in said.stderr
        assert time.monotonic() < give_up


def test_a_volume_goes_while_somebody_waits_for_a_program_that_never_came(kubelet: Kubelet) -> None:
    with kubelet.new_pod(eager(serve())) as running, ThreadPoolExecutor() as beside:
        running.set_up_volumes()
        reader = beside.submit(kubelet.node.run, ["cat", running.target() / "hello"], check=False)
        with pytest.raises(TimeoutError):
            reader.result(1)
        assert running.stats().volume_condition.abnormal
        running.tear_down()
        assert re.search("not connected|connection abort", reader.result(60).stderr)
