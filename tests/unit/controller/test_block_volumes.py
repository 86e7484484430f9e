"""Block volumes: their key is the node plugin's, their mount pod says their size, and nobody mounts them."""

from __future__ import annotations

import kubernetes_validate
import pytest

from fusermount3_broker.csi import volume_requests
from fusermount3_controller import claims, mount_pods, shared_volumes
from fusermount3_controller.faults import Invalid
from fusermount3_controller.injection import inject
from fusermount3_controller.mount_pod_steps import CreatePod, DeleteAttachment, DeletePod, steps
from fusermount3_controller.served_volumes import Known
from fusermount3_controller.volume_templates import parse
from fusermount3_controller.wanted_mount_pods import wanted
from tests.unit.controller import volumes
from tests.unit.controller.cluster import NOW, found, known, mount_of, serving, user
from tests.unit.controller.samples import Manifest, pod_of, shared, template, volume
from tests.unit.csi.test_volume_requests import SETTINGS, block_request

PROVISIONED = {"pv.kubernetes.io/provisioned-by": "csi.fusermount3-proxy.dev"}


def disk(**spec: object) -> Manifest:
    """Return a PersistentVolume that is a device."""
    result = volume()
    result["spec"] |= {"volumeMode": "Block", "capacity": {"storage": "1Mi"}, **spec}
    return result


def cluster(of_volume: Manifest) -> Known:
    allowed = {"volumeModes": ["Filesystem", "Block"]}
    return known(volumeValidation=allowed)._replace(volumes={"photos": of_volume})


def shown(of_volume: Manifest) -> Manifest:
    """Return the volumeAttributes of the mount pod."""
    made = mount_pods.manifest(mount_of([user()], cluster(of_volume)), 0, "uid")
    (own,) = [each["csi"] for each in made["spec"]["volumes"] if "csi" in each]
    attributes: Manifest = own["volumeAttributes"]
    return attributes


def test_the_key_is_that_of_the_node_plugin_whatever_kubelet_does_not_tell_it() -> None:
    """Of a block volume, kubelet tells neither mountOptions nor fsGroup."""
    asked = block_request(volumeTemplate="s3", bucket="photos")
    asked.volume_id = "photos"
    keys = volume_requests.publish(asked, SETTINGS).borrows.decode().split()
    # Those of a volume that is there may be changed.
    edited = disk(mountOptions=["ro"])
    edited["metadata"]["annotations"] = PROVISIONED
    for each in (disk(), edited):
        mount = mount_of([user(), user("other", securityContext={"fsGroup": 1000})], cluster(each))
        assert mount.shared.key in keys
        assert {one.name for one in mount.users} == {"app", "other"}
        attachment = mount_pods.attachment(mount)["spec"]
        assert (attachment["mountOptions"], attachment["workloadFSGroup"]) == ("", "")


def test_its_mount_pod_says_how_large_the_device_must_be() -> None:
    assert shown(disk())["shareCapacity"] == str(1 << 20)
    assert "shareCapacity" not in shown(disk(volumeMode="Filesystem"))
    assert "shareCapacity" not in shown(disk(capacity={}))


@pytest.mark.parametrize("options", [{"spec": {"mountOptions": ["ro"]}}, {"attributes": {"mountOptions": "ro"}}])
def test_nobody_mounts_it_so_options_are_refused(options: Manifest) -> None:
    given = disk(**options.get("spec", {}))
    given["spec"]["csi"]["volumeAttributes"] |= options.get("attributes", {})
    with pytest.raises(Invalid, match=r"PersistentVolume photos: spec.mountOptions: a volume with volumeMode Block"):
        shared_volumes.of_new_pod(user(), cluster(given))
    assert not wanted([user()], cluster(given)).mounts
    given["spec"]["volumeMode"] = "Filesystem"
    assert shared_volumes.of_new_pod(user(), cluster(given))


@pytest.mark.parametrize(
    "fields",
    [
        {"mountOptions": ["ro"]},
        {"parameters": {"volumeTemplate": "s3", "bucket": "photos", "mountOptions": "ro"}},
    ],
)
def test_a_class_with_mount_options_has_no_block_volumes(fields: Manifest) -> None:
    allows = volumes.known(volumeValidation={"volumeModes": ["Filesystem", "Block"]})
    of_class = volumes.storage_class(**fields)
    with pytest.raises(Invalid, match="StorageClass s3: mountOptions: a volume with volumeMode Block is not mounted"):
        claims.pod_volume(volumes.claim(volumeMode="Block"), of_class, allows)
    assert claims.pod_volume(volumes.claim(), of_class, allows)
    made = claims.pod_volume(volumes.claim(volumeMode="Block"), volumes.storage_class(), allows)
    assert made["spec"]["volumeMode"] == "Block"


def test_its_mount_pod_is_as_the_template_has_it_in_a_namespace_that_says_what_it_may() -> None:
    """Nothing is filled in that would contradict its privileges, and nobody waits for it to mount."""
    manifest = shared(volumeValidation={"volumeModes": ["Filesystem", "Block"]})
    context = {"privileged": True}
    pod_of(manifest)["containers"][0]["securityContext"] = context
    manifest["spec"]["volumeStaging"]["namespace"] = "fuse-devices"
    privileged = cluster(disk())._replace(templates={"s3": parse(manifest)})
    mount = mount_of([user()], privileged)
    made = mount_pods.manifest(mount, 0, "uid")
    kubernetes_validate.validate(made, "1.30", strict=True)
    assert (made["metadata"]["namespace"], made["spec"]["securityContext"]) == ("fuse-devices", {})
    (container,) = made["spec"]["containers"]
    assert container["securityContext"] == context
    assert "startupProbe" not in container
    assert "lifecycle" in container, "it waits until nobody has the device"
    assert mount_pods.attachment(mount)["spec"]["mountPodNamespace"] == "fuse-devices"
    filesystem = privileged._replace(volumes={"photos": volume()})
    (container,) = mount_pods.shown(mount_of([user()], filesystem).shared)["spec"]["containers"]
    assert "startupProbe" in container


def test_its_mount_pods_are_found_where_they_are_though_the_template_has_changed() -> None:
    """Who has the device of the template as it was keeps it, and nobody else's pod counts."""
    manifest = shared()
    manifest["spec"]["volumeStaging"]["namespace"] = "fuse-devices"
    before = known()._replace(templates={"s3": parse(manifest)})
    mount = mount_of([user()], before)
    attachment = mount_pods.attachment(mount)
    pod = serving(mount)
    changes = (CreatePod, DeletePod, DeleteAttachment)
    assert not any(isinstance(step, changes) for step in steps(wanted([user()], before), found(pod), [attachment], NOW))
    todo = steps(wanted([user()], known(2)), found(pod), [attachment], NOW)
    assert [type(step) for step in todo if isinstance(step, changes)] == [CreatePod], "for the template as it is now"
    pod["metadata"]["namespace"] = "fuse-mounts"
    todo = steps(wanted([user()], before), found(pod), [attachment], NOW)
    assert [type(step) for step in todo if isinstance(step, changes)] == [CreatePod]


def test_a_sidecar_offers_none() -> None:
    sidecar = cluster(disk())._replace(templates={"s3": parse(template())})
    with pytest.raises(
        Invalid, match=r"PersistentVolume photos: spec.volumeMode: must be Filesystem: the template 's3'"
    ):
        inject(user(), sidecar)
