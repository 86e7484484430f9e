"""The pods of these tests, as manifests: a starter, in which a FUSE program runs, and consumers."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import yaml

from tests.lab import images, manifests, podman, programs
from tests.lab.broker import PROXY
from tests.lab.kubelet import Image
from tests.lab.pace import SLOWNESS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tests.lab.kubelet import Images, Pod

DRIVER = "csi.fusermount3-proxy.dev"

SOCKETS, VOLUME = "fuse-fd-passing", "data"
"""Names of the volumes in a pod: the one for the socket, and the driver's."""
SOCKET = "fuse-csi-ephemeral.sock"

OWN_MOUNTPOINT, DATA = "/home/user/mnt", "/data"
"""Where the FUSE program mounts, and where the consumers have it."""

SECONDS_TO_SERVE = 20
"""In which a program has mounted, and once more in which it answers; more on a slow machine."""

Container = dict[str, Any]


def lab_images() -> Images:
    """Return the images that these manifests name: they hold our FUSE programs and, except for the consumer's, our
    clients of the broker or ("old") those of meta-fuse-csi-plugin.
    """
    busybox = images.image_tag(images.BUSYBOX)
    filesystems = (programs.whoamifs(), programs.hello_ll(), programs.stopfs())
    own = [podman.Volume(each, f"/usr/bin/{each.name}") for each in filesystems]
    return {
        "consumer": Image(busybox),
        "starter": Image(busybox, [*own, *clients(PROXY)]),
        "old": Image(busybox, [*own, *clients(programs.oldclient())]),
    }


def clients(program: Path) -> list[podman.Volume]:
    """Return the volumes that provide an image with a client of the broker, under each of its names."""
    names = ("fusermount3", "fusermount", "fusermount3-proxy", "fuse-starter")
    return [podman.Volume(program, f"/usr/bin/{name}") for name in names]


def starter(command: str, *, image: str = "starter", sidecar: bool = False, **fields: object) -> Container:
    """A container that runs a FUSE program in a shell. As a sidecar, it has started once the program has mounted."""
    container = {
        "name": "starter",
        "image": image,
        "command": ["sh", "-c", command],
        "env": [{"name": "FUSERMOUNT3PROXY_FDPASSING_SOCKPATH", "value": f"/sockets/{SOCKET}"}],
        "volumeMounts": [{"name": SOCKETS, "mountPath": "/sockets"}],
        "terminationMessagePath": "/dev/fuse",  # libfuse gives up unless it can open something there
        **fields,
    }
    if sidecar:
        wait = ["fusermount3-proxy", "--wait-mounted", OWN_MOUNTPOINT, "--timeout", "20"]
        probe = {"exec": {"command": wait}, "periodSeconds": 1, "failureThreshold": 3}
        container |= {"restartPolicy": "Always", "startupProbe": probe}
    return container


def serve(program: str = "hello_ll") -> str:
    """Return the command of a program that serves at its own mountpoint."""
    return f"exec {program} -f {OWN_MOUNTPOINT}"


COMMANDS = {
    "with a mountpoint": serve(),
    "with a descriptor": "exec fuse-starter -- hello_ll -f {}",
}
"""The ways in which a program takes its filesystem."""


def consumer(
    name: str = "consumer", *, propagation: str = "HostToContainer", mount: Mapping[str, object] | None = None
) -> Container:
    """A container that has the volume, and is idle."""
    volume = {"name": VOLUME, "mountPath": DATA, "mountPropagation": propagation, **(mount or {})}
    return {"name": name, "image": "consumer", "command": ["sleep", "infinity"], "volumeMounts": [volume]}


def pod(
    containers: Sequence[Container],
    *,
    init: Sequence[Container] = (),
    attributes: Mapping[str, str] | None = None,
    read_only: bool = False,
    driver: str = DRIVER,
    directories: Sequence[str] = (),
    **spec: object,
) -> manifests.Pod:
    """A pod with these containers and one inline volume; `directories` are more volumes, `spec` more of its fields."""
    csi = {"driver": driver, "readOnly": read_only, "volumeAttributes": dict(attributes or {})}
    empty = [{"name": name, "emptyDir": {}} for name in (SOCKETS, *directories)]
    volumes = [*empty, {"name": VOLUME, "csi": csi}]
    document = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "pod"},
        "spec": {"initContainers": [*init], "containers": [*containers], "volumes": volumes, **spec},
    }
    return manifests.parse(yaml.safe_dump(document))


def read(pod: Pod, container: str = "consumer", file: str = "hello", at: str = DATA) -> str:
    """Return what a container reads in the volume."""
    return pod[container].exec(["cat", f"{at}/{file}"]).stdout


def wait_for_volume(pod: Pod, container: str = "consumer", at: str = DATA) -> None:
    """Wait until a container has a FUSE filesystem at that path, and its program answers.

    The mount itself comes earlier, and is undone if the program is killed before it has the descriptor.
    """
    wait_for_mount(pod, container, at)
    give_up = time.monotonic() + SLOWNESS * SECONDS_TO_SERVE
    while (said := pod[container].exec(["stat", at], check=False)).returncode != 0:
        pod.check_loop()
        assert time.monotonic() < give_up, f"{pod['starter'].logs()}\n{said}"


def wait_for_mount(pod: Pod, container: str = "consumer", at: str = DATA) -> None:
    """Wait until a container has a FUSE filesystem at that path, whether or not its program ever answers."""
    give_up = time.monotonic() + SLOWNESS * SECONDS_TO_SERVE
    while not pod[container].fuse_mounts(at):
        pod.check_loop()
        assert time.monotonic() < give_up, f"{pod['starter'].logs()}\n{pod[container].mountinfo()}"
        time.sleep(0.02)


def kill(pod: Pod, container: str = "starter") -> None:
    """Kill all processes of a container, as the kernel does when its memory is used up."""
    os.kill(pod[container].pid, 9)
