"""What a pod plants where the broker works is not followed, changed or removed; no pod can use another pod's socket."""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc
import pytest

from tests.e2e.conftest import wait_until
from tests.e2e.csi.pods import (
    OWN_MOUNTPOINT,
    SOCKET,
    SOCKETS,
    consumer,
    pod,
    read,
    serve,
    starter,
    wait_for_volume,
)
from tests.lab.broker import PROXY
from tests.lab.commands import run
from tests.lab.csi import CsiError
from tests.lab.kubelet import Kubelet
from tests.lab.manifests import EmptyDir
from tests.lab.podman import Volume

if TYPE_CHECKING:
    from pathlib import Path

    from tests.lab.cluster import Cluster

pytestmark = pytest.mark.e2e


BIND = "import socket, sys; socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).bind(sys.argv[1])"

#: Shell scripts, run in the directory where the socket will be; $1 is its name, $2 a directory outside the pod.
PLANTED = {
    "a symbolic link to a file": 'ln -s "$2/file" "$1"',
    "a symbolic link to nothing": 'ln -s "$2/new" "$1"',
    "a symbolic link to a directory": 'ln -s "$2" "$1"',
    "a named pipe": 'mkfifo "$1"',
    "a directory": 'mkdir -p "$1/with"',
    "a file": 'echo content > "$1"',
    "a hard link": 'ln "$2/file" "$1"',
    "a socket": f"{sys.executable} -c '{BIND}' \"$1\"",
}
planted = pytest.mark.parametrize("script", PLANTED.values(), ids=PLANTED.keys())


def plant(script: str, path: Path, outside: Path) -> None:
    run(["sh", "-c", f'cd "$3" && {script}', "sh", path.name, outside, path.parent])


def put_in_place(planted: Path, path: Path) -> bool:
    """Give the planted entry the name of the socket; return whether it got it before the broker made another."""
    with contextlib.suppress(FileNotFoundError):
        path.rename(path.with_name("aside"))
    try:
        planted.rename(path)
    except NotADirectoryError:
        return False
    return True


def look(path: Path) -> list[tuple[object, ...]]:
    """Return all data that a change of a file, or of a directory's content, would alter."""
    found: list[tuple[object, ...]] = []
    for each in [path, *sorted(path.rglob("*"))]:
        status = each.lstat()
        marks = tuple((name, os.getxattr(each, name, follow_symlinks=False)) for name in attributes(each))
        found.append((each, status.st_ino, status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, marks))
    return found


def attributes(path: Path) -> list[str]:
    return os.listxattr(path, follow_symlinks=False)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory outside the pod's control."""
    (tmp_path / "file").write_text("of the host")
    return tmp_path


@planted
def test_what_a_pod_plants_at_the_name_of_its_socket_is_left_alone(
    kubelet: Kubelet, outside: Path, script: str
) -> None:
    with kubelet.new_pod(pod([consumer(), starter(serve())])) as running:
        running.set_up_volume(EmptyDir(SOCKETS))
        path = running.volume_path(EmptyDir(SOCKETS)) / SOCKET
        plant(script, path, outside)
        before = (look(path), look(outside))
        with pytest.raises(CsiError) as failed:
            running.publish(running.csi_volume())
        assert failed.value.code == grpc.StatusCode.FAILED_PRECONDITION
        assert SOCKET in failed.value.text
        assert (look(path), look(outside)) == before
        assert kubelet.node.mounts(running.directory) == []
        kubelet.plugin.unpublish(running.handle(running.csi_volume()), running.target())
        assert (look(path), look(outside)) == before

        path.rename(path.with_name("aside"))
        running.set_up_volume(running.csi_volume())
        running.start_sandbox()
        running.start_containers()
        wait_for_volume(running)
        assert read(running) == "hello\n"


@planted
def test_what_a_pod_puts_in_the_place_of_its_socket_is_left_alone(kubelet: Kubelet, outside: Path, script: str) -> None:
    with kubelet.pod(pod([consumer()], init=[starter(serve(), sidecar=True)])) as running:
        path = running.volume_path(EmptyDir(SOCKETS)) / SOCKET
        plant(script, path.with_name("planted"), outside)
        wait_until(lambda: put_in_place(path.with_name("planted"), path))
        before = (look(path), look(outside))
        calls = len(running.calls)
        wait_until(lambda: len(running.calls) > calls + 5)
        assert read(running) == "hello\n"
        running.stop_containers()
        running.tear_down_volume(running.csi_volume())
        assert (look(path), look(outside)) == before


def test_a_directory_for_sockets_that_is_a_symbolic_link_is_not_followed(kubelet: Kubelet, outside: Path) -> None:
    with kubelet.new_pod(pod([consumer()])) as running:
        place = running.volume_path(EmptyDir(SOCKETS))
        place.parent.mkdir(parents=True)
        place.symlink_to(outside)
        before = look(outside)
        with pytest.raises(CsiError):
            running.publish(running.csi_volume())
        assert look(outside) == before
        kubelet.plugin.unpublish(running.handle(running.csi_volume()), running.target())
        assert look(outside) == before
        place.unlink()
        place.mkdir()


@pytest.mark.parametrize("name", ["../escape", "a/b", ".", "..", "", "n" * 256])
def test_a_name_that_is_none_is_refused(kubelet: Kubelet, name: str) -> None:
    with kubelet.new_pod(pod([consumer()], attributes={"fdPassingSocketName": name})) as running:
        running.set_up_volume(EmptyDir(SOCKETS))
        with pytest.raises(CsiError) as failed:
            running.publish(running.csi_volume())
        assert failed.value.code == grpc.StatusCode.INVALID_ARGUMENT
        assert "fdPassingSocketName" in failed.value.text


def test_a_pod_can_use_no_socket_but_its_own(cluster: Cluster) -> None:
    kubelet = cluster.kubelet
    victim = str(uuid.uuid4())
    sockets = kubelet.directory_of(victim) / "volumes/kubernetes.io~empty-dir" / SOCKETS
    own = kubelet.images["starter"]
    spying = replace(own, volumes=[*own.volumes, Volume(sockets, "/victim", "rw")])
    knowing = Kubelet(kubelet.node, kubelet.driver, kubelet.plugin, {**kubelet.images, "spy": spying})
    command = f"FUSERMOUNT3PROXY_FDPASSING_SOCKPATH=/victim/{SOCKET} hello_ll -f {OWN_MOUNTPOINT}; sleep infinity"
    with kubelet.pod(pod([consumer()]), victim) as one, knowing.pod(pod([starter(command, image="spy")])) as two:
        wait_until(lambda: "not a container of the pod of this volume" in two["starter"].logs())
        assert one["consumer"].fuse_mounts() == []
        assert two["starter"].fuse_mounts() == []
        mounted = [mount for mount in kubelet.node.mounts() if mount.is_fuse]
        assert mounted == []


def test_not_even_root_of_the_node_can_use_the_socket_of_a_pod(cluster: Cluster, tmp_path: Path) -> None:
    with cluster.kubelet.pod(pod([consumer()])) as running:
        socket = running.volume_path(EmptyDir(SOCKETS)) / SOCKET
        (tmp_path / "socket").symlink_to(socket)
        (tmp_path / "fuse-starter").symlink_to(PROXY)
        environment = f"FUSERMOUNT3PROXY_FDPASSING_SOCKPATH={tmp_path}/socket"
        said = cluster.node.run(["env", environment, tmp_path / "fuse-starter", "--", "true", "{}"], check=False)
        assert said.returncode != 0
        assert "the broker can't see which pod the caller is in" in said.stderr
        assert [mount for mount in cluster.node.mounts() if mount.is_fuse] == []
