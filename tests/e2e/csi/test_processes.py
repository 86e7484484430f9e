"""Broker processes are killed while volumes are published, and a pod sends arbitrary data to the socket of a volume."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import xattr

from fusermount3_broker.csi import csi_pb2 as csi
from fusermount3_broker.kernel import ownership_marks
from fusermount3_proxy import wire
from fusermount3_proxy.wire import VolumeRequest
from tests.e2e.conftest import is_idle, wait_until
from tests.e2e.csi.pods import DRIVER
from tests.e2e.csi.test_broker_restarts import end_supervisor
from tests.e2e.hostile import COMMIT, PATIENCE, Client, slow
from tests.lab import cgroups
from tests.lab.cluster import Cluster
from tests.lab.csi import CsiError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.podman import Mount

pytestmark = pytest.mark.e2e

CONFIGURATION = "[deadlines]\noperation = 3\ncommit = 2"
SOCKET = "fuse-csi-ephemeral.sock"
VOLUME = wire.encode_request(VolumeRequest(b"subtype=test"))

# Connects in the pod's cgroup, hands over the connection, and lives until the test is done with it.
CONNECT = """
import os, socket, sys
way, cgroup, directory, kind = sys.argv[1:]
with open(cgroup + "/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
os.chdir(directory)
with socket.socket(fileno=int(way)) as way, socket.socket(socket.AF_UNIX, int(kind)) as connection:
    connection.connect("fuse-csi-ephemeral.sock")
    socket.send_fds(way, [b"connected"], [connection.fileno()])
    connection.close()
    way.recv(1)
"""


class PodClient(Client):
    """A connection made by a process in the pod and held by the test."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.devices: list[int] = []
        self.socket.settimeout(PATIENCE)

    def take(self, request: bytes = VOLUME) -> int:
        """Request a mount; return the /dev/fuse descriptor. The mount is not confirmed."""
        self.send(request)
        reply = self.reply()
        assert reply is not None
        assert reply.errno == 0, reply.text
        return self.devices[-1]

    def commit(self) -> int:
        """Confirm the mount; return the descriptor, which the caller has to close."""
        self.send(COMMIT)
        assert self.reply() is None
        return self.devices.pop()


class Pod:
    """A pod without containers: kubelet's directories, and a cgroup for the processes that connect for the test."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.uid = str(uuid.uuid4())
        node = cluster.node
        volumes = node.kubelet / "pods" / self.uid / "volumes"
        self.sockets = volumes / "kubernetes.io~empty-dir/fuse-fd-passing"
        self.target = volumes / "kubernetes.io~csi/data/mount"
        for path in (self.sockets, self.target.parent):
            node.seen(path).mkdir(parents=True)
        node.seen(self.sockets).chmod(0o777)
        self.cgroup = cgroups.make(node.cgroups.pod(self.uid))

    def publish(self, **attributes: str) -> None:
        capability = csi.VolumeCapability(
            mount=csi.VolumeCapability.MountVolume(),
            access_mode=csi.VolumeCapability.AccessMode(mode=csi.VolumeCapability.AccessMode.SINGLE_NODE_WRITER),
        )
        request = csi.NodePublishVolumeRequest(
            volume_id=f"csi-{self.uid}",
            target_path=str(self.target),
            volume_capability=capability,
            volume_context={"csi.storage.k8s.io/pod.uid": self.uid, **attributes},
        )
        self.cluster.plugin.publish(request)

    def unpublish(self) -> None:
        self.cluster.plugin.unpublish(f"csi-{self.uid}", self.target)

    @contextlib.contextmanager
    def connected(self, kind: socket.SocketKind = socket.SOCK_SEQPACKET) -> Iterator[PodClient]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        directory = self.cluster.node.seen(self.sockets)
        with ours:
            with theirs:
                arguments = [str(theirs.fileno()), str(self.cgroup), str(directory), str(int(kind))]
                caller = subprocess.Popen([sys.executable, "-c", CONNECT, *arguments], pass_fds=[theirs.fileno()])
            ours.settimeout(PATIENCE)
            _, (connection,), _, _ = socket.recv_fds(ours, 100, 1)
            client = PodClient(socket.socket(fileno=connection))
            with client:
                yield client
        assert caller.wait(PATIENCE) == 0

    def mount(self) -> int:
        """Mount on the volume in the regular way; return the /dev/fuse descriptor."""
        with self.connected() as client:
            client.take()
            return client.commit()

    def filesystems(self) -> list[Mount]:
        """Return the FUSE filesystems at the target, the topmost last."""
        return [mount for mount in self.cluster.node.mounts(self.target) if mount.is_fuse]

    def remove(self) -> None:
        self.unpublish()
        assert self.cluster.node.mounts(self.target) == []
        wait_until(lambda: not list(self.cluster.node.seen(self.sockets).iterdir()))
        assert not self.cluster.node.seen(self.target).exists()
        self.cgroup.rmdir()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A cluster whose broker may be killed."""
    with Cluster(DRIVER, {}, CONFIGURATION) as cluster:
        yield cluster
        assert cluster.broker.records("internal error") == []
        assert cluster.broker.status()["volumes"] == 0


@pytest.fixture
def pod(cluster: Cluster) -> Iterator[Pod]:
    pod = Pod(cluster)
    yield pod
    pod.remove()


def has_request(device: int) -> bool:
    """Return whether a request waits for the FUSE program: the first one does, until it is read."""
    return bool(select.select([device], [], [], 0)[0])


def kill(cluster: Cluster, process: str) -> None:
    """Kill one process of the broker, or all of them, and wait until the broker has recovered."""
    broker = cluster.broker
    restored = len(broker.records("serving"))
    if process == "broker":
        for each in (broker.process.pid, broker.front.pid, broker.mounter.pid):
            os.kill(each, signal.SIGKILL)
        broker.process.wait()
        broker.start()
    else:
        before = broker.status()[process]["pid"]
        os.kill(before, signal.SIGKILL)
        if process == "front":
            broker.wait_for("serving", restored + 1)
        wait_until(lambda: broker.status().get(process, {}).get("pid", before) != before)
    cluster.wait_until_ready()


# A mount on a volume


def test_a_volume_is_mounted_for_who_has_no_mountpoint(pod: Pod) -> None:
    pod.publish()
    with pod.connected() as client:
        device = client.take()
        (filesystem,) = pod.filesystems()
        assert filesystem.fstype == "fuse.test"
        assert has_request(device)
        os.close(client.commit())
    (mount,) = pod.cluster.broker.mounts()
    assert (mount["volume"], mount["mountpoint"], mount["type"]) == (
        str(pod.target.relative_to(pod.cluster.node.kubelet)),
        "",
        "fuse.test",
    )


def test_a_mount_that_is_not_confirmed_is_taken_away(pod: Pod) -> None:
    pod.publish()
    with pod.connected() as client:
        client.take()
        assert len(pod.filesystems()) == 1
    wait_until(lambda: pod.filesystems() == [])


def test_a_second_program_is_refused_while_one_serves(pod: Pod) -> None:
    pod.publish()
    device = pod.mount()
    with pod.connected() as client:
        client.send(VOLUME)
        assert client.refused() == (errno.EBUSY, "failed to mount on the volume: Device or resource busy")
    os.close(device)
    os.close(pod.mount())


def test_a_socket_that_nobody_has_any_more_is_made_again(pod: Pod) -> None:
    """A child of the mounter that outlived its front could leave such a socket."""
    pod.publish()
    stale = pod.cluster.node.seen(pod.sockets) / SOCKET
    stale.unlink()
    directory = os.open(stale.parent, os.O_PATH)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"/proc/self/fd/{directory}/{SOCKET}")
    os.close(directory)
    stale.chmod(0o666)
    xattr.set(stale, ownership_marks.MARK, b"1")
    pod.publish()
    os.close(pod.mount())


def test_what_needs_a_volume_is_refused_where_there_is_none(cluster: Cluster) -> None:
    with Client(cluster.broker) as client:
        client.send(VOLUME)
        number, text = client.refused()
    assert number == errno.EOPNOTSUPP
    assert "not the socket of a volume" in text


def test_a_volume_that_goes_while_a_program_mounts_is_gone(pod: Pod) -> None:
    pod.publish()
    with pod.connected() as client:
        client.take()
        pod.unpublish()
        assert pod.cluster.node.mounts(pod.target) == []
        client.send(COMMIT)
        assert client.reply() is None
    assert pod.cluster.node.mounts(pod.target) == []
    wait_until(lambda: pod.cluster.broker.mounts() == [])


def replace_dead(cluster: Cluster) -> None:
    """Have the broker replace dead mounts from now on, as it does unless it is configured otherwise."""
    cluster.broker.configure(f"dead_mounts_seconds = 1\n{CONFIGURATION}")
    cluster.broker.reload()


def has_tombstone(pod: Pod) -> bool:
    """Return whether there is nothing but a tombstone at the target."""
    return [mount.fstype for mount in pod.filesystems()] == ["fuse.tombstone"]


def test_a_tombstone_is_at_the_target_when_the_filesystem_is_dead(cluster: Cluster, pod: Pod) -> None:
    """A process that reads the volume then gets an error, and does not see an apparently empty volume."""
    replace_dead(cluster)
    pod.publish()
    os.close(pod.mount())
    (dead,) = pod.filesystems()
    (record,) = cluster.broker.wait_for("put a tombstone in the place of a dead mount")
    assert record["device"] == int(dead.device.partition(":")[2])
    (there,) = pod.filesystems()
    assert there.fstype == "fuse.tombstone"
    wait_until(lambda: cluster.broker.mounts() == [])  # nobody has the dead one any more
    assert cluster.node.seen(pod.target).stat().st_uid == 0
    with pytest.raises(OSError, match="Transport endpoint is not connected"):
        next(cluster.node.seen(pod.target).iterdir(), None)
    begun = len(cluster.broker.records())
    for _ in range(3):  # the broker examines the mounts
        time.sleep(1)
        assert pod.filesystems() == [there]
    assert len(cluster.broker.records()) == begun


def test_a_dead_filesystem_that_somebody_still_has_is_shown(cluster: Cluster, pod: Pod) -> None:
    replace_dead(cluster)
    pod.publish()
    device = pod.mount()
    held = os.open(cluster.node.seen(pod.target), os.O_PATH)
    os.close(device)
    wait_until(lambda: has_tombstone(pod))
    (mount,) = cluster.broker.mounts()
    assert (mount["state"], mount["volume"]) == ("dead", str(pod.target.relative_to(cluster.node.kubelet)))
    os.close(held)
    wait_until(lambda: cluster.broker.mounts() == [])


@pytest.mark.parametrize("process", ["front", "mounter", "broker"])
def test_a_tombstone_stays_whoever_is_killed(pod: Pod, process: str) -> None:
    replace_dead(pod.cluster)
    pod.publish()
    os.close(pod.mount())
    wait_until(lambda: has_tombstone(pod))
    before = pod.filesystems()
    kill(pod.cluster, process)
    pod.publish()
    assert pod.filesystems() == before
    device = pod.mount()
    assert [mount.fstype for mount in pod.filesystems()] == ["fuse.tombstone", "fuse.test"]
    os.close(device)
    wait_until(lambda: has_tombstone(pod))


@pytest.mark.parametrize("process", ["front", "mounter", "broker"])
def test_a_filesystem_gets_its_tombstone_whoever_was_killed_meanwhile(pod: Pod, process: str) -> None:
    replace_dead(pod.cluster)
    pod.publish()
    os.close(pod.mount())
    kill(pod.cluster, process)
    wait_until(lambda: has_tombstone(pod))


# Old clients


@pytest.mark.parametrize("timing", ["onConnect", "eager"])
def test_an_old_client_gets_its_descriptor_without_a_word(pod: Pod, timing: str) -> None:
    pod.publish(oldClients="true", mountTiming=timing)
    for _ in range(2):  # once its program has ended, the client returns
        with pod.connected(socket.SOCK_STREAM) as client:
            message, (device,), _, _ = socket.recv_fds(client.socket, 1000, 4)
            assert json.loads(message) == {"volumeName": f"csi-{pod.uid}"}
            assert client.socket.recv(1) == b""
        assert has_request(device)
        (mount,) = [each for each in pod.cluster.broker.mounts() if each["state"] != "dead"][-1:]
        assert mount["command"].startswith("python")
        os.close(device)


@pytest.mark.parametrize("timing", ["onConnect", "eager"])
def test_an_old_client_mounts_on_a_tombstone(pod: Pod, timing: str) -> None:
    replace_dead(pod.cluster)
    pod.publish(oldClients="true", mountTiming=timing)
    for expected in (["fuse"], ["fuse.tombstone", "fuse"], ["fuse.tombstone", "fuse"]):
        with pod.connected(socket.SOCK_STREAM) as client:
            _, (device,), _, _ = socket.recv_fds(client.socket, 1000, 4)
        assert has_request(device)
        assert [mount.fstype for mount in pod.filesystems()] == expected
        os.close(device)
        wait_until(lambda: has_tombstone(pod))


# Eager volumes


def test_the_filesystem_of_an_eager_volume_is_for_the_first_who_takes_it(pod: Pod) -> None:
    pod.publish(mountTiming="eager")
    (before,) = pod.filesystems()
    assert [mount["state"] for mount in pod.cluster.broker.mounts()] == ["live"]
    with pod.connected() as client:
        client.take()
    wait_until(lambda: is_idle(pod.cluster.broker))  # the broker has taken it back
    with pod.connected() as client:
        assert has_request(client.take())
        device = client.commit()
    assert pod.filesystems() == [before]
    with pod.connected() as client:
        client.send(VOLUME)
        assert client.refused()[0] == errno.EBUSY
    os.close(device)
    with pod.connected() as client:
        assert has_request(client.take()), "another one, in place of the dead one"
        os.close(client.commit())


def test_what_somebody_has_begun_to_serve_is_nobody_elses(pod: Pod) -> None:
    pod.publish(mountTiming="eager")
    with pod.connected() as client:
        assert len(os.read(client.take(), 100_000)) > 0
    wait_until(lambda: is_idle(pod.cluster.broker))  # the broker has taken it back
    with pod.connected() as client:
        assert has_request(client.take())
        os.close(client.commit())


def test_what_nobody_served_is_mounted_again_by_the_next_front(pod: Pod) -> None:
    pod.publish(mountTiming="eager")
    kill(pod.cluster, "front")
    pod.publish(mountTiming="eager")  # when the call returns, the volume is mounted
    with pod.connected() as client:
        assert has_request(client.take())
        os.close(client.commit())


# Killed processes


def test_a_caller_who_commits_keeps_the_mount_of_a_front_that_was_killed(pod: Pod) -> None:
    pod.publish()
    broker = pod.cluster.broker
    with pod.connected() as client:
        client.take()
        wait_until(broker.mounts)  # the child reports to the front after the caller
        broker.front.kill()
        device = client.commit()
    assert [mount.fstype for mount in pod.filesystems()] == ["fuse.test"]
    (mount,) = broker.mounts()
    assert mount["volume"] == str(pod.target.relative_to(pod.cluster.node.kubelet))
    os.close(device)


def test_a_caller_who_goes_away_leaves_nothing_of_it(pod: Pod) -> None:
    pod.publish()
    with pod.connected() as client:
        client.take()
        pod.cluster.broker.front.kill()
    wait_until(lambda: pod.filesystems() == [])


@pytest.mark.parametrize("process", ["front", "mounter", "plugin", "broker"])
def test_volumes_are_served_on_whoever_is_killed(pod: Pod, process: str) -> None:
    pod.publish()
    device = pod.mount()
    (alive,) = pod.filesystems()
    kill(pod.cluster, process)
    assert pod.filesystems() == [alive], "a live mount is its program's"
    pod.publish()
    os.close(device)
    device = pod.mount()
    assert pod.filesystems()[-1] != alive
    os.close(device)


@pytest.mark.parametrize("milliseconds", [0, 1, 2, 4, 8, 16])
@pytest.mark.parametrize("call", ["publish", "unpublish"])
def test_nothing_is_left_whenever_the_broker_is_killed(cluster: Cluster, call: str, milliseconds: int) -> None:
    """Kubelet repeats its call or removes the pod; either is possible after each step."""
    for timing in ("onConnect", "eager"):
        pod = Pod(cluster)
        if call == "unpublish":
            pod.publish(mountTiming=timing)
        asking = threading.Thread(target=_try, args=(pod, call, timing))
        asking.start()
        time.sleep(milliseconds / 1000)
        kill(cluster, "broker")
        asking.join(PATIENCE)
        if call == "publish" and timing == "onConnect":
            pod.publish(mountTiming=timing)
            os.close(pod.mount())
        pod.remove()


def _try(pod: Pod, call: str, timing: str) -> None:
    """Make a call during which the broker may be killed."""
    with contextlib.suppress(CsiError):
        if call == "publish":
            pod.publish(mountTiming=timing)
        else:
            pod.unpublish()


@pytest.mark.parametrize(
    ("call", "step"), [("publish", "setxattr"), ("publish", "move_mount"), ("unpublish", "umount2")]
)
def test_the_next_broker_waits_for_no_child_of_one_whose_supervisor_was_killed(
    cluster: Cluster, tmp_path: Path, call: str, step: str
) -> None:
    pod = Pod(cluster)
    if call == "unpublish":
        pod.publish()
    log = tmp_path / "strace"
    with slow(cluster.broker, step, PATIENCE, log):
        asking = threading.Thread(target=_try, args=(pod, call, "onConnect"))
        asking.start()
        wait_until(lambda: f"{step}(" in log.read_text())
        end_supervisor(cluster)
        pod.publish()
        os.close(pod.mount())
        pod.unpublish()
    asking.join(PATIENCE)
    pod.remove()


def test_a_hundred_volumes_come_and_go_at_once(cluster: Cluster) -> None:
    pods = [Pod(cluster) for _ in range(100)]
    with ThreadPoolExecutor(len(pods)) as kubelet:
        list(kubelet.map(Pod.publish, pods))
        assert cluster.broker.status()["volumes"] == len(pods)
        assert len(cluster.node.mounts()) == len(pods)
        list(kubelet.map(Pod.remove, pods))
    assert cluster.node.mounts() == []


def test_a_burst_waits_for_a_mounter_that_is_stopped(cluster: Cluster) -> None:
    pods = [Pod(cluster) for _ in range(64)]
    mounter = cluster.broker.mounter
    stopped = [mounter, *mounter.children(recursive=True)]
    with ThreadPoolExecutor(len(pods)) as kubelet:
        for each in stopped:
            each.suspend()
        try:
            publishing = [kubelet.submit(pod.publish) for pod in pods]
            time.sleep(0.5)
            assert not any(call.done() for call in publishing)
        finally:
            for each in stopped:
                each.resume()
        for call in publishing:
            call.result(PATIENCE)
        list(kubelet.map(Pod.remove, pods))


def test_kubelet_is_answered_by_the_next_front(pod: Pod) -> None:
    """The front that kubelet called is killed before it answers."""
    front = pod.cluster.broker.front
    front.suspend()
    asking = threading.Thread(target=pod.publish)
    asking.start()
    asking.join(0.5)
    assert asking.is_alive()
    front.kill()
    asking.join(PATIENCE)
    assert not asking.is_alive()
    os.close(pod.mount())
