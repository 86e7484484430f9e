"""docs/block-volumes.md: its objects are valid, its claim gets a disk, and its pod has a mount pod for that.

tests/cluster/test_block_volumes.py has them on a node.
"""

from __future__ import annotations

import yaml

from fusermount3_controller import claims, pod_volumes
from fusermount3_controller.offline import rendered
from fusermount3_controller.served_volumes import Known
from fusermount3_controller.volume_templates import parse
from tests.e2e.documented import blocks
from tests.kubernetes.objects import BASE, CONTROLLER, PROVISIONERS, objects, the, validate

PREPARED, PATCH, SHARE, STORAGE, POD = (
    each.text for each in blocks() if (each.page, each.language) == ("block-volumes.md", "yaml")
)
(DISKS,) = (yaml.safe_load(path.read_text()) for path in PROVISIONERS if path.stem == "disks")


def test_its_objects_are_valid() -> None:
    for each in objects("\n---\n".join((PREPARED, SHARE, STORAGE, POD))):
        validate(each)


def test_the_controller_may_create_the_mount_pods_of_the_template() -> None:
    binding, namespace = (the(kind, objects(PREPARED)) for kind in ("RoleBinding", "Namespace"))
    ours = [each for each in objects((CONTROLLER / "rbac.yaml").read_text()) if each["kind"] == "RoleBinding"]
    (same,) = [each for each in ours if each["metadata"]["namespace"] == "fuse-mounts"]
    assert (binding["roleRef"], binding["subjects"]) == (same["roleRef"], same["subjects"])
    where = DISKS["spec"]["volumeStaging"]["namespace"]
    assert binding["metadata"]["namespace"] == namespace["metadata"]["name"] == where
    ((patch,),) = (yaml.safe_load(each["patch"]) for each in yaml.safe_load(PATCH)["patches"])
    assert patch["value"] == f"--mount-namespaces=fuse-mounts,{where}"
    daemon = the("DaemonSet", objects((BASE / "daemonset.yaml").read_text()))
    assert daemon["spec"]["template"]["spec"]["containers"][0]["name"] == "broker", "the first one gets the option"


def test_the_claim_gets_a_disk_and_its_pod_a_mount_pod() -> None:
    storage_class, claim = (the(kind, objects(STORAGE)) for kind in ("StorageClass", "PersistentVolumeClaim"))
    claim["metadata"]["uid"] = "1"
    volume = pod_volumes.parse(claims.pod_volume(claim, storage_class, Known({"disks": parse(DISKS)})))
    created = volume._replace(status=volume.status._replace(handle=pod_volumes.handle(volume), capacity=1 << 30))
    persistent = pod_volumes.persistent_volume(created)
    claim["spec"]["volumeName"] = persistent["metadata"]["name"]
    (pod,) = objects(POD)
    result, faults = rendered([("page", each) for each in (DISKS, persistent, claim, pod)], {})
    assert faults == []
    same, mount_pod = result
    assert same == pod
    (own,) = [each["csi"] for each in mount_pod["spec"]["volumes"] if "csi" in each]
    assert own["volumeAttributes"]["shareCapacity"] == str(1 << 30)
