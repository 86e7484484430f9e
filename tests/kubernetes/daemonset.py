"""The first container of the DaemonSet, run on a node of the lab by Podman and runc, with the DaemonSet's settings."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fusermount3_broker.csi import csi_pb2 as csi
from tests.kubernetes.objects import Object, of_base, the
from tests.lab.broker import PROGRAM
from tests.lab.csi import Plugin
from tests.lab.podman import LIMITS, PREFIX, RUNTIME

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.lab.commands import Argument
    from tests.lab.node import Node

ROOT = Path(__file__).parents[2]
POD = "0b3e7535-f976-405e-8752-cf82b3e9a865"
VOLUMES = Path("pods") / POD / "volumes"
TARGET = VOLUMES / "kubernetes.io~csi/data/mount"

THIS_MACHINE: tuple[Argument, ...] = ("--volume", f"{ROOT}:{ROOT}:ro", "--rootfs", "/:O")
"""In the place of an image: the root of this machine, of which nothing is changed."""


def sources(node: Node) -> dict[str, Path]:
    """Return the directories of the node that stand in for the volumes of the DaemonSet's pod, by volume name."""
    directories = {name: node.directory / name for name in ("plugin", "state", "run", "configuration")}
    for each in directories.values():
        each.mkdir()
    for name, content in the("ConfigMap", of_base())["data"].items():
        (directories["configuration"] / name).write_text(content)
    devices = node.kubelet / "plugins/kubernetes.io/csi/volumeDevices"
    devices.mkdir(parents=True)
    return directories | {"pods": node.kubelet / "pods", "devices": devices}


def command(
    spec: Object, container: Object, volumes: dict[str, Path], name: str, image: Sequence[Argument], program: Argument
) -> list[Argument]:
    """Return the command that runs the container with this image, in which `program` is the broker."""
    context = container["securityContext"]
    assert context == {"privileged": True, "readOnlyRootFilesystem": True} and spec["hostPID"]
    options: list[Argument] = ["--privileged", "--read-only", "--read-only-tmpfs=false", "--pid=host"]
    for mount in container["volumeMounts"]:
        propagation = {"Bidirectional": "rshared"}.get(mount.get("mountPropagation", ""), "rprivate")
        mode = "ro" if mount.get("readOnly") else "rw"
        options += ["--volume", f"{volumes[mount['name']]}:{mount['mountPath']}:{mode},{propagation}"]
    first, *words = [program if word == PROGRAM.name else word for word in container["command"]]
    arguments = [word.replace("$(NODE_NAME)", "node") for word in container["args"]]
    run = ["podman", "run", "--rm", "--name", name, "--network=none", *RUNTIME, *LIMITS]
    return [*run, *options, "--entrypoint", first, *image, *words, *arguments]


@contextlib.contextmanager
def broker_of(node: Node, image: Sequence[Argument] = THIS_MACHINE, program: Argument = PROGRAM) -> Iterator[Plugin]:
    """Run the container on the node, and yield its plugin when that is ready."""
    spec = the("DaemonSet", of_base())["spec"]["template"]["spec"]
    volumes = sources(node)
    name = f"{PREFIX}{secrets.token_hex(4)}"
    log = node.directory / "log"
    with log.open("wb") as output:
        argv = node.command(*command(spec, spec["containers"][0], volumes, name, image, program))
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        plugin = Plugin(volumes["plugin"] / "csi.sock")
        give_up = time.monotonic() + 60
        while not plugin.is_ready():
            assert process.poll() is None and time.monotonic() < give_up, log.read_text()
            time.sleep(0.1)
        yield plugin
    finally:
        node.run(["podman", "stop", "--time", str(spec["terminationGracePeriodSeconds"]), name], check=False)
        status = process.wait(timeout=60)
    assert status == 0, log.read_text()


def publish_and_unpublish(node: Node, plugin: Plugin) -> None:
    """Publish a volume of the pod on the node and unpublish it, and check the results."""
    sockets = node.seen(node.kubelet / VOLUMES / "kubernetes.io~empty-dir/fuse-fd-passing")
    sockets.mkdir(parents=True)
    node.seen(node.kubelet / TARGET).parent.mkdir(parents=True)
    capability = csi.VolumeCapability(
        mount=csi.VolumeCapability.MountVolume(),
        access_mode=csi.VolumeCapability.AccessMode(mode=csi.VolumeCapability.AccessMode.SINGLE_NODE_WRITER),
    )
    request = csi.NodePublishVolumeRequest(
        volume_id="volume",
        target_path=f"/var/lib/kubelet/{TARGET}",
        volume_capability=capability,
        volume_context={"csi.storage.k8s.io/pod.uid": POD},
    )
    plugin.publish(request)
    (placeholder,) = node.mounts(node.kubelet / TARGET)
    assert (placeholder.fstype, placeholder.source) == ("tmpfs", "fusermount3-broker")
    assert [each.name for each in sockets.iterdir()] == ["fuse-csi-ephemeral.sock"]
    plugin.unpublish(request.volume_id, Path(request.target_path))
    assert node.mounts(node.kubelet / TARGET) == []
    assert [*sockets.iterdir(), *node.seen(node.kubelet / TARGET).parent.iterdir()] == []
