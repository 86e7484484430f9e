"""The scenarios in which Pods-as-Volumes is tested by its authors, on a real node, with a program that mounts.

`docs/provisioning.md` lists them. The cases that they lack are elsewhere: a deletion that fails
(`test_volumes_of_claims.py`), an unstaging that fails (`test_unstaging.py`), and what becomes of volumes when
controllers, kubelet, brokers and pods are killed (`long/test_random_faults.py`).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from fusermount3_controller.pod_volumes import PLURAL
from fusermount3_controller.volume_templates import API_VERSION
from tests.cluster import driver, images, installed_controller
from tests.cluster.claimed_volumes import Cluster, claim_spec, storage_class
from tests.cluster.pods import restricted
from tests.kubernetes.objects import PROVISIONERS, PROVISIONING, Object
from tests.lab.images import DEBIAN, image_tag

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.node import ClusterNode

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.usefixtures("prepared")]

NAME, IMAGE = "greets", "docker.io/example/bindfs:1.0"
STAGES = ("volumeValidation", "volumeCreation", "volumeStaging")
_USER = {"runAsUser": 1000, "runAsGroup": 1000}
_GREETS = """
echo 'Hello, world!' > /files/greeting
echo {{ pvc.metadata.name | tobash }} > /files/claim
exec bindfs -f /files {{ mountpoint | tobash }}
"""


@pytest.fixture(scope="module")
def prepared(node_of_session: ClusterNode) -> Iterator[None]:
    images.load_one(node_of_session, IMAGE, images.with_proxy(image_tag(DEBIAN), {}))
    with installed_controller.installed(node_of_session, PROVISIONING):
        yield


def stage(name: str, script: str, image: str = images.SHELL, **more: Any) -> Object:
    """Return a stage, whose script fails if the StorageClass says so."""
    fails = f"echo no luck with {name}; [ {{{{ params.fails | tobash }}}} != {name} ]\n"
    container = {
        "name": "fuse" if name == "volumeStaging" else "run",
        "image": image,
        "command": ["sh", "-ec", fails + script],
        "securityContext": _USER,
    }
    return {"podTemplate": {"spec": {"containers": [{**container, **more}]}}}


def template() -> Object:
    """Return a template of volumes that have a greeting, and the name of their claim."""
    own: dict[str, Any] = {"volumeMounts": [{"name": "files", "mountPath": "/files"}]}
    # libfuse gives up unless it can open something at /dev/fuse: any file will do.
    staging = stage("volumeStaging", _GREETS, IMAGE, terminationMessagePath="/dev/fuse", **own)
    staging["podTemplate"]["spec"]["volumes"] = [{"name": "files", "emptyDir": {}}]
    return {
        "apiVersion": API_VERSION,
        "kind": "VolumeTemplate",
        "metadata": {"name": NAME},
        "spec": {
            "placement": "Shared",
            "provisioningModes": ["Dynamic", "Static"],
            "parameters": {"fails": {"default": "nothing", "pattern": "[a-zA-Z]+"}},
            "volumeValidation": stage("volumeValidation", "true"),
            "volumeCreation": {"capacity": "1Ei", **stage("volumeCreation", "true")},
            "volumeDeletion": stage("volumeDeletion", "true"),
            "volumeUnstaging": stage("volumeUnstaging", "true"),
            "volumeStaging": staging,
        },
    }


def of_class(fails: str = "nothing") -> Object:
    return storage_class(NAME, parameters={"volumeTemplate": NAME, "fails": fails})


def claim(name: str = "data", class_name: str = NAME) -> Object:
    metadata = {"name": name, "namespace": "default"}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": claim_spec(class_name)}


def reader(*claims: str) -> Object:
    """Return a pod that reads the volumes of these claims, and ends."""
    pod = restricted({}, "reader")
    (container,) = pod["spec"]["containers"]
    tests = " && ".join(
        f'[ "$(cat /{each}/greeting)" = "Hello, world!" ] && [ "$(cat /{each}/claim)" = {each} ]' for each in claims
    )
    container |= {
        "command": ["sh", "-c", tests],
        "volumeMounts": [{"name": each, "mountPath": f"/{each}"} for each in claims],
    }
    volumes = [{"name": each, "persistentVolumeClaim": {"claimName": each}} for each in claims]
    return {**pod, "spec": {**pod["spec"], "restartPolicy": "Never", "volumes": volumes}}


def bound(cluster: Cluster, number: int = 1) -> None:
    cluster.wait_until(lambda: [each["status"].get("phase") for each in cluster.items("pvc")] == number * ["Bound"])


def has_read(cluster: Cluster) -> None:
    """Return when the pod has read all volumes. AssertionError if they are not as they should be."""

    def phase() -> str:
        (pod,) = cluster.items("pods")
        return str(pod["status"]["phase"])

    cluster.wait_until(lambda: phase() in ("Succeeded", "Failed"))
    assert phase() == "Succeeded", cluster.description()


def test_a_volume_is_created_used_and_deleted_though_its_class_has_gone(cluster: Cluster) -> None:
    with cluster.created(template()), contextlib.ExitStack() as stack:
        with cluster.created(of_class()):
            stack.enter_context(cluster.created(claim()))
            bound(cluster)
        (volume,) = cluster.items(PLURAL)
        assert volume["status"]["capacity"] == str(1 << 60)
        with cluster.created(reader("data")):
            has_read(cluster)


def test_a_volume_that_exists_is_used(cluster: Cluster) -> None:
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "written"},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "capacity": {"storage": "1Gi"},
            "claimRef": {"namespace": "default", "name": "data"},
            "csi": {"driver": driver.NAME, "volumeHandle": "any", "volumeAttributes": {"volumeTemplate": NAME}},
        },
    }
    asks = claim(class_name="")
    asks["spec"]["volumeName"] = "written"
    with cluster.created(template(), volume, asks):
        bound(cluster)
        with cluster.created(reader("data")):
            has_read(cluster)


def test_a_pod_uses_three_volumes(cluster: Cluster) -> None:
    names = ("data-1", "data-2", "data-3")
    with cluster.created(template(), of_class(), *map(claim, names)):
        bound(cluster, 3)
        with cluster.created(reader(*names)):
            has_read(cluster)


@pytest.mark.parametrize("fails", STAGES)
def test_a_stage_that_fails_is_told_and_all_can_be_deleted(cluster: Cluster, fails: str) -> None:
    """PaV's claims and pods only wait then: here, an event says why, with what the program said."""
    with cluster.created(template(), of_class(fails)), cluster.created(claim()):
        if fails == "volumeStaging":
            bound(cluster)
            with cluster.created(reader("data")):
                cluster.wait_until(lambda: told(cluster, "MountPodFailed", fails))
                (pod,) = cluster.items("pods")
                assert pod["status"]["phase"] == "Pending"
        else:
            cluster.wait_until(lambda: told(cluster, "ProvisioningFailed", fails))
            (waits,) = cluster.items("pvc")
            assert waits["status"]["phase"] == "Pending"


def told(cluster: Cluster, reason: str, stage: str) -> bool:
    return any(f"no luck with {stage}" in each for each in cluster.events(reason))


def test_a_template_that_is_told_to_go_waits_for_its_volumes_and_gets_no_new_ones(cluster: Cluster) -> None:
    kubectl = cluster.node.kubectl
    with cluster.created(template(), of_class()):
        with cluster.created(claim()):
            bound(cluster)
            kubectl("delete", "volumetemplate", NAME, "--wait=false")
            with cluster.created(claim("late")):
                cluster.wait_until(lambda: cluster.events("ProvisioningFailed"))
                assert {each["metadata"]["name"]: each["status"]["phase"] for each in cluster.items("pvc")} == {
                    "data": "Bound",
                    "late": "Pending",
                }
            with cluster.created(reader("data")):
                has_read(cluster)
            kubectl("delete", "storageclass", NAME)
            assert cluster.items("volumetemplates")
        kubectl("wait", "--for=delete", f"volumetemplate/{NAME}", "--timeout=120s")


def test_each_provisioner_can_be_created_and_deleted(cluster: Cluster) -> None:
    for file in PROVISIONERS:
        with cluster.created(*yaml.safe_load_all(file.read_text())):
            assert file.stem in [each["metadata"]["name"] for each in cluster.items("volumetemplates")]
