"""Block volumes for claims, on a real node: files as loop devices, by the objects of docs/block-volumes.md.

The page's share is a directory of the node.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from fusermount3_controller.mount_pods import ATTACHMENTS
from fusermount3_controller.pod_volumes import PLURAL
from tests.cluster import driver, images, installed_controller
from tests.cluster.claimed_volumes import Cluster
from tests.cluster.commands import execute
from tests.cluster.pods import Pod
from tests.cluster.shared_volumes import MOUNTS
from tests.e2e.documented import block, blocks
from tests.kubernetes.objects import KUSTOMIZATION, PACKAGING, PROVISIONING, Object, objects, the
from tests.lab import loop
from tests.lab.commands import run
from tests.lab.images import SSHFS, image_tag

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cluster.node import ClusterNode

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.usefixtures("prepared")]

PREPARED, PATCH, SHARE, STORAGE, POD = (
    each.text for each in blocks() if (each.page, each.language) == ("block-volumes.md", "yaml")
)
TEMPLATE = PACKAGING / "provisioners/disks.yaml"
DEVICES, TEAM = "fuse-devices", "team"
DIRECTORY = "/var/lib/disks"
IMAGE = "docker.io/example/disks:1.0"


@pytest.fixture(scope="module")
def prepared(node_of_session: ClusterNode) -> Iterator[None]:
    """What administrators prepare, the template, its class, and a namespace of users."""
    node = node_of_session
    # util-linux is in this image, too.
    images.load_one(node, IMAGE, images.with_proxy(image_tag(SSHFS), {}))
    directory = node.seen(DIRECTORY)
    directory.mkdir()
    directory.chmod(0o777)
    share = objects(SHARE)
    for each in share:
        if each["kind"] == "PersistentVolume":
            assert each["spec"].pop("nfs")
            each["spec"]["hostPath"] = {"path": DIRECTORY}
    team = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": TEAM}}
    created = [*objects(PREPARED), team, *share, the("StorageClass", objects(STORAGE))]
    with contextlib.ExitStack() as stack:
        stack.enter_context(installed_controller.installed(node, PROVISIONING))
        stack.enter_context(Cluster(node).created(*created))
        node.kubectl("create", f"--filename={TEMPLATE}")
        stack.enter_context(trusting(node))
        yield
    directory.rmdir()


@contextlib.contextmanager
def trusting(node: ClusterNode) -> Iterator[None]:
    """Have the driver use what pods in the namespace of the page offer."""
    command = block(driver.PAGE, "kubectl apply --kustomize").text
    with driver.kustomization() as directory:
        file = directory / KUSTOMIZATION
        file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | yaml.safe_load(PATCH)))
        execute(node, command, directory)
    try:
        yield
    finally:
        driver.install(node)


@pytest.fixture
def cluster(node: ClusterNode) -> Iterator[Cluster]:
    result = Cluster(node)
    result.forget_events()
    yield result
    result.wait_until(lambda: is_clean(result))
    assert list(node.seen(DIRECTORY).iterdir()) == []


def is_clean(cluster: Cluster) -> bool:
    """Return whether nothing is left of volumes but the share."""
    of_template = [each for each in cluster.items("pv") if "csi" in each["spec"]]
    kinds = (*((kind,) for kind in (PLURAL, ATTACHMENTS)), *(("pods", f"-n{name}") for name in (MOUNTS, DEVICES)))
    return not of_template and not any(cluster.items(*words) for words in kinds) and not backing_files()


def backing_files() -> list[str]:
    """Return the names of the files that loop devices of this machine have, of those that these tests make.

    Of a container that has ended, only the name is left of the path.
    """
    listed = run(["losetup", "--all", "--noheadings", "--output", "BACK-FILE"]).stdout.splitlines()
    names = [each.strip().rpartition("/")[2] for each in listed]
    return [name for name in names if name.startswith("pvc-")]


def claim(size: str = "1Mi", **spec: Any) -> Object:
    result = the("PersistentVolumeClaim", objects(STORAGE))
    result["spec"] |= {"resources": {"requests": {"storage": size}}, **spec}
    return result


def test_a_claim_gets_a_device_that_its_pods_use_and_that_goes_with_it(cluster: Cluster) -> None:
    """Its size is that which the program says that made it, in whole sectors: what the claim asks for is none."""
    node = cluster.node
    with cluster.created(claim("1000001")):
        with cluster.created(*objects(POD)):
            app = Pod(node, "app", TEAM)
            app.wait_until_ready()
            assert app.execute("blockdev", "--getsize64", "/dev/disk").stdout == "1003520\n"
            assert app.execute("stat", "-c", "%U %a", "/dev/disk").stdout == "root 600\n"
            app.execute("sh", "-c", "printf hello | dd of=/dev/disk conv=fsync")
            (file,) = node.seen(DIRECTORY).iterdir()
            assert file.read_bytes()[:5] == b"hello"
            (mount_pod,) = cluster.items("pods", f"-n{DEVICES}")
            (own,) = [each["csi"] for each in mount_pod["spec"]["volumes"] if "csi" in each]
            assert own["volumeAttributes"]["shareCapacity"] == "1003520"
            assert len(backing_files()) == 1
        # The mount pod has taken its device apart, and another one makes another.
        cluster.wait_until(lambda: not cluster.items("pods", f"-n{DEVICES}"))
        assert backing_files() == []
        with cluster.created(*objects(POD)):
            app.wait_until_ready()
            assert app.execute("head", "-c", "5", "/dev/disk").stdout == "hello"


def test_a_program_that_begins_again_offers_the_device_that_its_pods_have(cluster: Cluster) -> None:
    node = cluster.node
    with cluster.created(claim()), cluster.created(*objects(POD)):
        app = Pod(node, "app", TEAM)
        app.wait_until_ready()
        (found,) = cluster.items("pods", f"-n{DEVICES}")
        mount_pod = Pod(node, found["metadata"]["name"], DEVICES)
        mount_pod.kill("fuse")
        mount_pod.wait_until_restarted("fuse", 1)
        app.execute("sh", "-c", "printf hello | dd of=/dev/disk conv=fsync")
        (file,) = node.seen(DIRECTORY).iterdir()
        assert file.read_bytes()[:5] == b"hello"
        assert len(backing_files()) == 1, "two devices of one file would each have a cache of it"


def static(file: Path, template: str, capacity: str) -> list[Object]:
    """Return a PersistentVolume that is this file, and its claim, which is the page's."""
    asked = claim(capacity, storageClassName="", volumeName="static")
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "static"},
        "spec": {
            "accessModes": asked["spec"]["accessModes"],
            "capacity": {"storage": capacity},
            "claimRef": {key: asked["metadata"][key] for key in ("namespace", "name")},
            "csi": {
                "driver": driver.NAME,
                "volumeHandle": file.name,
                "volumeAttributes": {"volumeTemplate": template},
            },
            "volumeMode": "Block",
        },
    }
    return [volume, asked]


def test_a_device_of_another_size_is_not_taken(cluster: Cluster) -> None:
    with contextlib.ExitStack() as stack:
        file = cluster.node.seen(DIRECTORY) / "pvc-small"
        with file.open("wb") as made:
            made.truncate(loop.SIZE)
        stack.callback(file.unlink)
        stack.callback(cluster.wait_until, lambda: is_clean(cluster))
        stack.enter_context(cluster.created(*static(file, "disks", "2Mi")))
        stack.enter_context(cluster.created(*objects(POD)))
        said = f"the device has {loop.SIZE} bytes, and the volume must have {2 * loop.SIZE}"
        cluster.wait_until(lambda: any(said in each for each in cluster.events("MountPodFailed")))


def test_a_node_that_a_pod_has_only_made_is_a_key_to_nothing(cluster: Cluster) -> None:
    """The program is root with CAP_MKNOD, as by containerd's defaults, and in the namespace that the driver trusts."""
    forges = yaml.safe_load(TEMPLATE.read_text())
    forges["metadata"]["name"] = "forges"
    forges["spec"] = {
        "placement": "Shared",
        "volumeValidation": {"volumeModes": ["Block"]},
        "volumeStaging": {
            "namespace": DEVICES,
            "podTemplate": {
                "spec": {
                    "containers": [
                        {
                            "name": "fuse",
                            "image": "example/disks:1.0",
                            "command": ["sh", "-ec", "mknod /disk b 7 0; exec fusermount3-proxy --offer-device /disk"],
                            "securityContext": {"runAsUser": 0},
                        }
                    ]
                }
            },
        },
    }
    file = cluster.node.seen(DIRECTORY) / "pvc-none"
    with cluster.created(forges), cluster.created(*static(file, "forges", "1Mi")), cluster.created(*objects(POD)):
        said = "can't open /disk: Operation not permitted"
        cluster.wait_until(lambda: any(said in each for each in cluster.events("MountPodFailed")))
        assert the("Pod", cluster.items("pods", f"-n{TEAM}"))["status"]["phase"] == "Pending"
        published = cluster.node.seen("/var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices/publish/static")
        assert not published.exists() or not any(each.is_block_device() for each in published.iterdir())


def test_a_class_with_mount_options_says_that_nobody_mounts_a_device(cluster: Cluster) -> None:
    of_class = the("StorageClass", objects(STORAGE)) | {"mountOptions": ["ro"]}
    of_class["metadata"]["name"] = "options"
    with cluster.created(of_class, claim(storageClassName="options")):
        cluster.wait_until(lambda: cluster.events("ProvisioningFailed"))
        said = "StorageClass options: mountOptions: a volume with volumeMode Block is not mounted"
        assert any(said in each for each in cluster.events("ProvisioningFailed"))
