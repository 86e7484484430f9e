"""The broker is restarted, upgraded or killed while pods run: live mounts stay, and restarted programs are served."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.e2e.conftest import wait_until
from tests.e2e.csi.pods import COMMANDS, DATA, SOCKETS, consumer, kill, pod, read, serve, starter, wait_for_volume
from tests.lab.faults import FRONT, MOUNTER
from tests.lab.faults import kill as kill_parts
from tests.lab.manifests import EmptyDir

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.csi.conftest import RunCluster
    from tests.lab.cluster import Cluster
    from tests.lab.kubelet import Pod

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PLUGIN = "plugin"
TIMINGS = ["onConnect", "eager"]


@pytest.fixture
def cluster(run_cluster: RunCluster) -> Cluster:
    return run_cluster()


def restart(cluster: Cluster) -> None:
    cluster.broker.stop()
    cluster.broker.start()
    cluster.wait_until_ready()


def end_at_once(cluster: Cluster) -> None:
    """Kill all of the broker, as the kernel does when its memory is used up, and start it as its DaemonSet does."""
    supervisor = psutil.Process(cluster.broker.process.pid)
    family = [supervisor, *supervisor.children(recursive=True)]
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    cluster.broker.process.wait(timeout=20)
    psutil.wait_procs(family, timeout=20)
    cluster.broker.start()
    cluster.wait_until_ready()


def end_supervisor(cluster: Cluster) -> None:
    """Kill the supervisor alone, and start another broker, which the remains of the old one must not obstruct."""
    cluster.broker.process.kill()
    cluster.broker.process.wait(timeout=20)
    cluster.broker.start()
    cluster.wait_until_ready()


def comes_back(running: Pod, restarts: int) -> None:
    """Kill the program, and check that its next run serves the consumer."""
    kill(running)
    running.wait_until_restarted("starter", restarts)
    wait_until(lambda: running["consumer"].exec(["cat", f"{DATA}/hello"], check=False).stdout == "hello\n", 30)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize(
    "end", [restart, end_at_once, end_supervisor], ids=["restarted", "killed", "its supervisor killed"]
)
def test_a_pod_notices_nothing(cluster: Cluster, timing: str, end: Callable[[Cluster], None]) -> None:
    spec = pod([starter(serve()), consumer()], attributes={"mountTiming": timing})
    with cluster.kubelet.pod(spec) as running:
        wait_for_volume(running)
        for restarts in (1, 2):
            assert read(running) == "hello\n"
            before = running["consumer"].fuse_mounts(DATA)
            end(cluster)
            assert running["consumer"].fuse_mounts(DATA) == before
            assert read(running) == "hello\n"
            comes_back(running, restarts)


@pytest.mark.parametrize("timing", TIMINGS)
def test_of_two_brokers_the_second_waits_until_the_first_has_ended(cluster: Cluster, timing: str) -> None:
    """As when kubelet starts a killed broker again in a pod that is deleted, beside the one of the next pod."""
    spec = pod([starter(serve()), consumer()], attributes={"mountTiming": timing})
    with cluster.kubelet.pod(spec) as running, cluster.second_broker() as second:
        wait_for_volume(running)
        second.wait_for("another broker uses")
        comes_back(running, 1)
        assert second.records("serving") == []
        cluster.broker.stop()
        second.wait_for("serving")
        cluster.wait_until_ready()
        comes_back(running, 2)


def test_a_broker_waits_for_the_front_of_a_killed_supervisor(cluster: Cluster) -> None:
    """Which may still write its tables; here it is so slow that it takes no notice of the kill."""
    front = cluster.broker.front
    front.suspend()
    try:
        written = cluster.broker.log.stat().st_size
        cluster.broker.process.kill()
        cluster.broker.process.wait(timeout=20)
        cluster.broker.launch()
        cluster.broker.wait_for("another broker uses", since=written)
        time.sleep(4)  # a broker waits for 3 seconds until nobody listens on its sockets
        assert cluster.broker.records("serving", since=written) == []
    finally:
        front.resume()
    cluster.broker.wait_for("serving", since=written)


def test_a_second_broker_gives_up(cluster: Cluster) -> None:
    with cluster.second_broker() as second:
        assert second.process.wait(timeout=60) == 1
        assert f"another broker uses '{second.state}', and has not ended in 10 seconds" in second.log.read_text()
    assert cluster.plugin.is_ready()


def test_a_second_broker_that_waits_ends_at_once_when_it_is_told_to(cluster: Cluster) -> None:
    with cluster.second_broker() as second:
        second.wait_for("another broker uses")
        second.stop()
    assert cluster.plugin.is_ready()


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
def test_a_broker_that_finds_another_fusectl_knows_what_is_mounted(cluster: Cluster, command: str, timing: str) -> None:
    """As where fusectl is mounted nowhere: the inodes in the table are then meaningless.

    What a program serves by a descriptor was mounted in the mount namespace of the earlier broker, which is gone.
    """
    spec = pod([starter(command), consumer()], attributes={"mountTiming": timing})
    with cluster.kubelet.pod(spec) as running:
        wait_for_volume(running)
        before = [(each["device"], each["volume"]) for each in cluster.broker.mounts()]
        cluster.broker.stop()
        with contextlib.closing(sqlite3.connect(cluster.broker.state / "mounts.sqlite")) as table, table:
            table.execute("UPDATE mounts SET connection = connection + 1000000")
        cluster.broker.start()
        cluster.wait_until_ready()
        assert [(each["device"], each["volume"]) for each in cluster.broker.mounts()] == before
        assert len(before) == 1
        comes_back(running, 1)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("part", [FRONT, MOUNTER, PLUGIN])
def test_a_part_that_is_killed_is_started_again(cluster: Cluster, part: str, timing: str) -> None:
    spec = pod([starter(serve()), consumer()], attributes={"mountTiming": timing})
    with cluster.kubelet.pod(spec) as running:
        wait_for_volume(running)
        for restarts in (1, 2):
            kill_parts(cluster.broker, part)
            assert read(running) == "hello\n"
            comes_back(running, restarts)
        assert not running.stats().volume_condition.abnormal


def test_a_program_that_starts_while_there_is_no_broker_waits_for_it(cluster: Cluster) -> None:
    with cluster.kubelet.pod(pod([consumer(), starter(serve())])) as running:
        wait_for_volume(running)
        cluster.broker.stop()
        kill(running)
        running.wait_until_restarted("starter", 1)
        cluster.broker.start()
        wait_until(lambda: running["consumer"].exec(["cat", f"{DATA}/hello"], check=False).stdout == "hello\n", 30)
        assert running.restarts["starter"] == 1, "it has waited, and not failed"


def test_a_pod_may_go_while_there_is_no_broker(cluster: Cluster) -> None:
    """Kubelet repeats its call until there is a broker."""
    with cluster.kubelet.pod(pod([consumer()], init=[starter(serve(), sidecar=True)])) as running:
        cluster.broker.stop()
        running.stop_containers()
        cluster.broker.start()


@pytest.mark.parametrize("timing", TIMINGS)
def test_a_reboot_leaves_nothing_stale(cluster: Cluster, timing: str) -> None:
    """A reboot keeps kubelet's directories and the broker's table, but no mount and no process."""
    spec = pod([starter(serve()), consumer()], attributes={"mountTiming": timing})
    with cluster.kubelet.new_pod(spec) as running, cluster.kubelet.new_pod(spec) as other:
        for each in (running, other):
            each.set_up()
            wait_for_volume(each)
            each.stop_containers()
        cluster.broker.stop()
        for each in (running, other):
            cluster.node.unmount(each.target())
        (running.volume_path(EmptyDir(SOCKETS)) / "of the pod").touch()
        cluster.broker.start()
        cluster.wait_until_ready()
        # Kubelet starts one of the pods again, and removes the other.
        other.tear_down()
        running.set_up_volume(running.csi_volume())
        running.start_sandbox()
        running.start_containers()
        wait_for_volume(running)
        assert read(running) == "hello\n"
