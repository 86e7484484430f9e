"""Volumes that are created for claims, on a real node: buckets of a real S3 server, made by rclone, mounted by s3fs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import yaml

from fusermount3_controller.pod_volumes import ABANDON, PLURAL
from tests.callers import s3
from tests.cluster import configuration, driver, installed_controller
from tests.cluster.claimed_volumes import ENDPOINT, TEMPLATE, Cluster, claim, claim_spec, storage_class, user
from tests.cluster.pods import Pod
from tests.cluster.shared_volumes import MOUNTS

if TYPE_CHECKING:
    pass

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.usefixtures("buckets_for_claims"),
]

_USER = {"runAsUser": 1000}
_CREATE, _DELETE, _FUSE = (
    {"podTemplate": {"spec": {"containers": [{**container, "image": "busybox:1.37", "securityContext": _USER}]}}}
    for container in (
        {"name": "creates", "command": ["true"]},
        {
            "name": "deletes",
            # The pods of a volume are numbered, and the first one creates it.
            "command": ["sh", "-c", 'case $POD in *-[12]) echo "no luck"; exit 1; esac'],
            "env": [{"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        },
        {"name": "fuse", "command": ["serves-nobody", "{{ mountpoint }}"]},
    )
)
UNLUCKY = {
    "apiVersion": "fusermount3-proxy.dev/v1alpha1",
    "kind": "VolumeTemplate",
    "metadata": {"name": "unlucky"},
    "spec": {
        "placement": "Shared",
        "provisioningModes": ["Dynamic"],
        "volumeCreation": _CREATE,
        "volumeDeletion": _DELETE,
        "volumeStaging": _FUSE,
    },
}
"""A template whose volumes are nothing; to delete one fails twice."""


def test_a_claim_gets_a_bucket_that_its_pods_use_and_that_goes_with_it(cluster: Cluster) -> None:
    with cluster.created(claim("s3")):
        name = cluster.bound()["metadata"]["name"]
        assert name in cluster.buckets()
        with cluster.created(user()):
            app = Pod(cluster.node, "app")
            app.wait_until_ready()
            app.execute("sh", "-c", "echo hello > /data/hello")
            assert app.execute("cat", "/data/hello").stdout == "hello\n"
        shown = cluster.node.kubectl("get", "pvol").stdout.splitlines()
        assert shown[0].split() == ["NAME", "TEMPLATE", "PHASE", "NAMESPACE", "CLAIM", "HANDLE", "MESSAGE", "AGE"]
        assert shown[1].split()[:6] == [name, "s3", "Created", "default", "data", name]
    cluster.wait_until(cluster.is_clean)
    assert name not in cluster.buckets()
    assert any(name in each for each in cluster.events("VolumeDeleted"))


def test_what_is_to_be_kept_stays_on_the_server(cluster: Cluster) -> None:
    with cluster.created(claim("kept")):
        name = cluster.bound()["metadata"]["name"]
    cluster.wait_until(lambda: cluster.items("pv")[0]["status"]["phase"] == "Released")
    assert not cluster.items("pods", f"--namespace={MOUNTS}")
    cluster.node.kubectl("delete", "pv", name, "--timeout=60s")
    cluster.wait_until(cluster.is_clean)
    assert name in cluster.buckets()


def test_a_creation_that_fails_is_told_and_can_be_abandoned(cluster: Cluster) -> None:
    """The server can't be reached, so nothing can be deleted there, either: only people can say that it is nothing."""
    with cluster.created(claim("nobody")):
        cluster.wait_until(lambda: any("trying again" in each for each in cluster.events("ProvisioningFailed")))
        cluster.wait_until(lambda: cluster.events("VolumeFailedDelete"))
        (volume,) = cluster.items(PLURAL)
        assert volume["status"]["phase"] == "Undoing"
    name = volume["metadata"]["name"]
    assert cluster.items(PLURAL)
    cluster.node.kubectl("annotate", PLURAL, name, f"{ABANDON}=")
    cluster.wait_until(cluster.is_clean)
    assert cluster.events("VolumeAbandoned")


def test_a_pod_can_have_a_volume_of_its_own(cluster: Cluster) -> None:
    """A generic ephemeral volume, whose class waits for the pod."""
    with cluster.created(user({"ephemeral": {"volumeClaimTemplate": {"spec": claim_spec("waits")}}})):
        app = Pod(cluster.node, "app")
        app.wait_until_ready()
        app.execute("sh", "-c", "echo hello > /data/hello")
        (volume,) = cluster.items(PLURAL)
        assert volume["spec"]["nodeName"] == configuration.NAME
    cluster.wait_until(cluster.is_clean)
    assert volume["metadata"]["name"] not in cluster.buckets()


def test_a_bucket_that_exists_is_used_and_stays(cluster: Cluster) -> None:
    attributes = {"volumeTemplate": "s3", "endpoint": ENDPOINT}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "static"},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "capacity": {"storage": "1Gi"},
            "csi": {"driver": driver.NAME, "volumeHandle": s3.BUCKET, "volumeAttributes": attributes},
            "claimRef": {"namespace": "default", "name": "data"},
        },
    }
    asks = claim("")
    asks["spec"]["volumeName"] = "static"
    with cluster.created(volume, asks), cluster.created(user()):
        app = Pod(cluster.node, "app")
        app.wait_until_ready()
        assert app.execute("cat", "/data/hello").stdout == "hello\n"
    assert s3.BUCKET in cluster.buckets()


def test_a_volume_is_deleted_though_its_class_and_template_are_to_go(cluster: Cluster) -> None:
    """The class goes at once; the template says that it has a volume, and goes with it."""
    kubectl = cluster.node.kubectl
    template = yaml.safe_load(TEMPLATE.read_text())
    template["metadata"]["name"] = "goes"
    of_it = storage_class("goes", parameters={"volumeTemplate": "goes", "endpoint": ENDPOINT})
    with cluster.created(template, of_it, claim("goes")):
        name = cluster.bound()["metadata"]["name"]
        kubectl("delete", "storageclass", "goes")
        kubectl("delete", "volumetemplate", "goes", "--wait=false")
        cluster.wait_until(lambda: cluster.events("VolumeTemplateHasVolumes"))
        (told,) = cluster.events("VolumeTemplateHasVolumes")
        assert told == "it has 1 volume, and goes when the last one is deleted"
        assert name in cluster.buckets()
        kubectl("delete", "pvc", "data")
        kubectl("wait", "--for=delete", "volumetemplate/goes", "--timeout=120s")
    assert name not in cluster.buckets()


def test_a_deletion_that_fails_is_told_and_tried_again(cluster: Cluster) -> None:
    """It fails twice; nobody has to do anything."""
    with cluster.created(UNLUCKY, storage_class("unlucky", parameters={"volumeTemplate": "unlucky"})):
        with cluster.created(claim("unlucky")):
            cluster.bound()
        cluster.wait_until(lambda: not cluster.items(PLURAL))
    told = [each for each in cluster.events("VolumeFailedDelete") if "no luck" in each]
    assert sorted(each.partition(": ")[2] for each in told) == [
        f"Error, status 1: no luck; trying again in {seconds} s" for seconds in (10, 5)
    ]


def test_a_claim_gets_its_volume_though_both_controllers_are_killed(cluster: Cluster) -> None:
    with cluster.created(claim("s3")):
        cluster.wait_until(lambda: cluster.items(PLURAL))
        installed_controller.kill(cluster.node)
        name = cluster.bound()["metadata"]["name"]
        assert name in cluster.buckets()
    cluster.wait_until(cluster.is_clean)
    assert name not in cluster.buckets()
    installed_controller.wait_until_ready(cluster.node)
