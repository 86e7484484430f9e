"""Volumes for claims that are as large as these, on a real node: filesystems in files of another volume, and memory.

The volume with the files is a directory of the node.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from fusermount3_controller import quantities
from fusermount3_controller.mount_pods import ATTACHMENTS
from fusermount3_controller.pod_volumes import PLURAL
from tests.cluster import images, installed_controller
from tests.cluster.claimed_volumes import Cluster, claim, storage_class, user
from tests.cluster.pods import Pod
from tests.cluster.shared_volumes import MOUNTS
from tests.kubernetes.objects import PACKAGING, PROVISIONING, Object
from tests.lab.images import DEBIAN, image_tag

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cluster.node import ClusterNode

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.usefixtures("prepared")]

TEMPLATES = ("ext4", "memory")
DIRECTORY = "/var/lib/files"
ONCE = {"accessModes": ["ReadWriteOncePod"]}


@pytest.fixture(scope="module")
def prepared(node_of_session: ClusterNode) -> Iterator[None]:
    """The controller, the templates and their classes, and the claim with the files."""
    node = node_of_session
    tag = images.with_proxy(image_tag(DEBIAN), {})
    for name in ("ext4", "bindfs"):
        images.load_one(node, f"docker.io/example/{name}:1.0", tag)
    directory(node).mkdir()
    directory(node).chmod(0o777)
    classes = [
        storage_class(name, parameters={"volumeTemplate": name}, allowVolumeExpansion=name == "ext4")
        for name in TEMPLATES
    ]
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: directory(node).rmdir())
        stack.enter_context(installed_controller.installed(node, PROVISIONING))
        stack.enter_context(Cluster(node).created(*files(), *classes))
        for name in TEMPLATES:
            node.kubectl("create", f"--filename={PACKAGING}/provisioners/{name}.yaml")
        yield


def directory(node: ClusterNode) -> Path:
    return node.seen(DIRECTORY)


def files() -> list[Object]:
    """Return the volume with the files, and its claim."""
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "files"},
        "spec": {
            **common,
            "capacity": {"storage": "1Gi"},
            "claimRef": {"namespace": MOUNTS, "name": "files"},
            "hostPath": {"path": DIRECTORY},
        },
    }
    asks = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "files", "namespace": MOUNTS},
        "spec": {**common, "resources": {"requests": {"storage": "1Gi"}}, "volumeName": "files"},
    }
    return [volume, asks]


@pytest.fixture
def cluster(node: ClusterNode) -> Iterator[Cluster]:
    result = Cluster(node)
    result.forget_events()
    yield result
    result.wait_until(lambda: is_clean(result))
    assert list(directory(node).iterdir()) == []


def is_clean(cluster: Cluster) -> bool:
    """Return whether nothing is left of volumes but the one with the files."""
    left = [*cluster.items(PLURAL), *cluster.items(ATTACHMENTS), *cluster.items("pods", f"-n{MOUNTS}")]
    return not left and len(cluster.items("pv")) == 1


def sized(of_class: str, size: str) -> Object:
    result = claim(of_class)
    result["spec"] |= {**ONCE, "resources": {"requests": {"storage": size}}}
    return result


def has_capacity(cluster: Cluster, size: int) -> bool:
    """Return whether the volume of the claim `data` has so many bytes."""
    volumes = [each["spec"] for each in cluster.items("pv") if each["spec"]["claimRef"]["name"] == "data"]
    return [quantities.size(each["capacity"]["storage"]) for each in volumes] == [size]


def written(app: Pod, megabytes: int) -> tuple[bool, str]:
    """Write a file of so many MiB; return whether all of it could be, and what was said."""
    done = app.execute("dd", "if=/dev/zero", "of=/data/file", "bs=1M", f"count={megabytes}", check=False)
    return done.returncode == 0, done.stderr


def test_a_filesystem_in_a_file_is_as_large_as_its_claim_and_grows_with_it(cluster: Cluster) -> None:
    with cluster.created(sized("ext4", "32Mi")):
        app = Pod(cluster.node, "app")
        with cluster.created(user()):
            app.wait_until_ready()
            app.execute("sh", "-c", "echo hello > /data/hello")
            assert app.execute("stat", "-c", "%u", "/data/hello").stdout == "1000\n"
            good, said = written(app, 40)
            assert not good and "No space left on device" in said
            app.execute("rm", "/data/file")
        cluster.wait_until(lambda: not cluster.items("pods", f"-n{MOUNTS}"))
        larger = '{"spec": {"resources": {"requests": {"storage": "64Mi"}}}}'
        cluster.node.kubectl("patch", "pvc", "data", f"--patch={larger}")
        cluster.wait_until(lambda: has_capacity(cluster, 64 << 20))
        with cluster.created(user()):
            app.wait_until_ready()
            assert app.execute("cat", "/data/hello").stdout == "hello\n"
            assert written(app, 40)[0]
            (file,) = directory(cluster.node).iterdir()
            assert file.stat().st_size == 64 << 20


def test_its_program_can_be_killed(cluster: Cluster) -> None:
    """The next one repairs what that has left, in the same pod, which still has the file."""
    with cluster.created(sized("ext4", "32Mi")), cluster.created(user()):
        app = Pod(cluster.node, "app")
        app.wait_until_ready()
        app.execute("sh", "-c", "echo hello > /data/hello; sync /data/hello")
        (found,) = cluster.items("pods", f"-n{MOUNTS}")
        mount_pod = Pod(cluster.node, found["metadata"]["name"], MOUNTS)
        mount_pod.kill("fuse")
        mount_pod.wait_until_restarted("fuse", 1)
        cluster.wait_until(lambda: app.execute("cat", "/data/hello", check=False).stdout == "hello\n")


def test_memory_is_as_large_as_its_claim_and_empty_when_nobody_uses_it(cluster: Cluster) -> None:
    with cluster.created(sized("memory", "16Mi")):
        app = Pod(cluster.node, "app")
        with cluster.created(user()):
            app.wait_until_ready()
            assert written(app, 8)[0]
            good, said = written(app, 24)
            assert not good and "No space left on device" in said
        cluster.wait_until(lambda: not cluster.items("pods", f"-n{MOUNTS}"))
        with cluster.created(user()):
            app.wait_until_ready()
            assert app.execute("ls", "-A", "/data").stdout == ""
