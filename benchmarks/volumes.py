"""The cost of a volume: publishing one, and the descriptor of its filesystem for the FUSE program in the pod.

    .venv/bin/python -m benchmarks.volumes [--volumes 200]

Kubelet's calls are real gRPC calls; the FUSE program is a process in the cgroup of a pod. It gets its descriptor by
the protocol, measured from connect(2) on, and by the proxy, measured from exec on, in turn with the proxy without a
volume. Prints each number beside its bound, and ends with status 1 if one is missed. Everything happens in separate
mount namespaces; nothing is left.
"""

import argparse
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.bounds import Report
from benchmarks.results import percentile
from fusermount3_broker.csi import csi_pb2 as csi
from fusermount3_proxy import wire
from fusermount3_proxy.wire import CommitRequest, VolumeRequest
from tests.e2e.conftest import settle
from tests.lab.broker import PROXY
from tests.lab.callers import enter_private_namespace
from tests.lab.cluster import Cluster
from tests.lab.csi import PATIENCE
from tests.lab.kubelet import Pod
from tests.lab.load import Beside, Helper
from tests.lab.manifests import CsiVolume, EmptyDir
from tests.lab.manifests import Pod as Spec

DRIVER = "csi.fusermount3-proxy.dev"
SOCKETS = "fuse-fd-passing"
#: The shipped configuration, except that one caller may have as many mounts and requests as are measured here.
CONFIGURATION = "[limits]\nmounts = 0\nrequests_per_second = 0\nconcurrent = 0"
PUBLISH_BOUND, DESCRIPTOR_BOUND = 10.0, 6.0  # milliseconds, of the p50
#: Seconds before each call of a program.
PAUSE = 0.1


def spec(volumes: int) -> Spec:
    """Return a pod with so many volumes, which have their sockets in one directory."""
    of_driver = [
        CsiVolume(name, name, DRIVER, attributes={"fdPassingSocketName": name})
        for name in (f"volume-{number}" for number in range(volumes))
    ]
    return Spec("pod", "default", "default", (EmptyDir(SOCKETS), *of_driver), (), (), None, (), host_users=True)


def publish_all(report: Report, pod: Pod) -> None:
    """Publish the volumes one after the other, and again, over one connection, whose setup is not measured."""
    with pod.kubelet.plugin.connected() as call:
        taken: dict[str, list[float]] = {"publish": [], "publish again": []}
        for milliseconds in taken.values():
            for volume in pod.spec.csi_volumes():
                pod.volume_path(volume).parent.mkdir(parents=True, exist_ok=True)
                request = pod.publish_request(volume)
                begun = time.perf_counter()
                call("Node/NodePublishVolume", request, csi.NodePublishVolumeResponse, PATIENCE)
                milliseconds.append(1000 * (time.perf_counter() - begun))
    report.at_most("publish, p50", percentile(taken["publish"], 50), PUBLISH_BOUND, "ms")
    report.say("publish, p99", f"{percentile(taken['publish'], 99):.2f} ms")
    report.say("publish again (as kubelet does all the time), p50", f"{percentile(taken['publish again'], 50):.2f} ms")


def unpublish_all(report: Report, pod: Pod) -> None:
    with pod.kubelet.plugin.connected() as call:
        taken = []
        for volume in pod.spec.csi_volumes():
            request = csi.NodeUnpublishVolumeRequest(
                volume_id=pod.handle(volume), target_path=str(pod.volume_path(volume))
            )
            begun = time.perf_counter()
            call("Node/NodeUnpublishVolume", request, csi.NodeUnpublishVolumeResponse, PATIENCE)
            taken.append(1000 * (time.perf_counter() - begun))
    report.say("unpublish, with a dead filesystem on it, p50", f"{percentile(taken, 50):.2f} ms")


@contextmanager
def in_the_pod(pod: Pod, mountpoint: Path) -> Iterator[None]:
    """Run as a process of the pod that sees the mountpoint and has the sockets in its working directory."""
    pod.enter()
    os.chdir(pod.volume_path(EmptyDir(SOCKETS)))
    enter_private_namespace()
    mountpoint.mkdir()
    yield


def connect_to_descriptor(name: str) -> tuple[float, int]:
    """Request the filesystem of a volume by the protocol; return the milliseconds, and the descriptor.

    Wait first, until the broker has forked its spare process: the programs of pods don't come one after the other.
    """
    time.sleep(PAUSE)
    begun = time.perf_counter()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(name)
        connection.send(wire.encode_request(VolumeRequest(b"subtype=bench")))
        data, descriptors, _, _ = socket.recv_fds(connection, wire.MAX_MESSAGE, 1)
        took = 1000 * (time.perf_counter() - begun)
        reply = wire.decode_reply(data)
        assert reply.errno == 0, reply.text
        connection.send(wire.encode_request(CommitRequest()))
        connection.recv(1)
    return took, descriptors[0]


def descriptors(pod: Pod, mountpoint: Path, in_place: Path) -> dict[str, list[float]]:
    """Mount half of the volumes by the protocol, and again in place of the dead mounts; the other half by the proxy.

    The proxy is called in turn for the broker's socket `in_place`. Returns milliseconds.
    """
    taken: dict[str, list[float]] = {
        "new": [],
        "in place of a dead one": [],
        "proxy": [],
        "proxy, without a volume": [],
    }
    names = [volume.name for volume in pod.spec.csi_volumes()]
    with in_the_pod(pod, mountpoint):
        for name in names[::2]:
            for kind in ("new", "in place of a dead one"):
                milliseconds, descriptor = connect_to_descriptor(name)
                os.close(descriptor)
                taken[kind].append(milliseconds)
        for name in names[1::2]:
            short = mountpoint.with_name(name)  # the path itself is too long for an address
            short.symlink_to(pod.volume_path(EmptyDir(SOCKETS)) / name)
            for kind, at in (("proxy", short), ("proxy, without a volume", in_place)):
                time.sleep(PAUSE)
                helper = Helper(at)
                call = helper.mount(mountpoint)
                assert call.status == 0, call.said
                taken[kind].append(1000 * call.seconds)
                assert helper.unmount(mountpoint).status == 0
                os.close(call.descriptor)
                helper.close()
    return taken


def hundred_at_once(report: Report, cluster: Cluster) -> None:
    """Publish and unpublish a hundred volumes of as many pods at once, each by a call over its own connection."""
    pods = [Pod(cluster.kubelet, spec(1)) for _ in range(100)]
    for pod in pods:
        pod.make_directories()
        pod.set_up_volume(EmptyDir(SOCKETS))
    with ThreadPoolExecutor(len(pods)) as kubelet:
        begun = time.perf_counter()
        for result in [kubelet.submit(pod.publish, pod.csi_volume()) for pod in pods]:
            result.result()
        published = time.perf_counter()
        for result in [kubelet.submit(pod.unpublish, pod.csi_volume()) for pod in pods]:
            result.result()
        done = time.perf_counter()
    report.say("100 published at once", f"{published - begun:.2f} s")
    report.say("100 unpublished at once", f"{done - published:.2f} s")
    for pod in pods:
        pod.tear_down()
    report.at_most("mounts and directories left", len(cluster.kubelet.left()), 0, "")


def measure(report: Report, cluster: Cluster, directory: Path, volumes: int) -> None:
    settle(cluster.broker)
    report.title(f"{volumes} volumes, one after the other")
    with cluster.kubelet.new_pod(spec(volumes)) as pod:
        pod.set_up_volume(EmptyDir(SOCKETS))
        publish_all(report, pod)
        taken = Beside(partial(descriptors, pod, directory / "mnt", cluster.broker.socket)).result()
        new, again = taken["new"], taken["in place of a dead one"]
        report.at_most("connect to descriptor, p50", percentile(new, 50), DESCRIPTOR_BOUND, "ms")
        report.say("connect to descriptor, p99", f"{percentile(new, 99):.2f} ms")
        report.say("the same in place of a dead one, p50", f"{percentile(again, 50):.2f} ms")
        proxy, other = percentile(taken["proxy"], 50), percentile(taken["proxy, without a volume"], 50)
        report.say("the proxy, exec to descriptor, p50", f"{proxy:.2f} ms")
        report.say("the same without a volume, p50", f"{other:.2f} ms")
        unpublish_all(report, pod)
    report.title("A hundred at once")
    hundred_at_once(report, cluster)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--volumes", type=int, default=200, help="one after the other (%(default)s)")
    arguments = parser.parse_args()
    if not PROXY.exists():
        sys.exit(f"{PROXY} is missing: make static")
    missed = run(arguments.volumes)
    for each in missed:
        print(f"MISSED {each}")
    sys.exit(1 if missed else 0)


def run(volumes: int) -> list[str]:
    """Measure with so many volumes; return the bounds that were missed."""
    report = Report()
    with tempfile.TemporaryDirectory() as directory, Cluster(DRIVER, {}, CONFIGURATION) as cluster:
        measure(report, cluster, Path(directory), volumes)
    return report.missed


if __name__ == "__main__":
    main()
