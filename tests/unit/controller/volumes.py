"""Claims, classes and PodVolumes for the tests of provisioning, as the API server has them."""

from __future__ import annotations

from typing import Any

from fusermount3_controller import claims, pod_volumes
from fusermount3_controller.pod_volumes import PodVolume
from fusermount3_controller.served_volumes import Known
from fusermount3_controller.volume_templates import parse
from tests.unit.controller.samples import Manifest, shared

DRIVER = "csi.fusermount3-proxy.dev"


def run(*args: str, **container: Any) -> Manifest:
    """Return the pod template of a stage."""
    tool = {"name": "tool", "image": "example/tool:1.0", "args": list(args), **container}
    return {"podTemplate": {"spec": {"containers": [tool]}}}


def dynamic(**spec: Any) -> Manifest:
    """Return a template that creates and deletes volumes, whose spec has these fields."""
    given = {
        "provisioningModes": ["Dynamic"],
        "volumeCreation": run("mb", "{{ defaultHandle }}"),
        "volumeDeletion": run("rb", "{{ handle }}"),
    }
    return shared(**(given | spec))


def storage_class(**fields: Any) -> Manifest:
    parameters = {"volumeTemplate": "s3", "bucket": "photos"}
    return {
        "metadata": {"name": "s3"},
        "provisioner": DRIVER,
        "parameters": parameters,
        "reclaimPolicy": "Delete",
    } | fields


def claim(uid: str = "1", annotations: dict[str, str] | None = None, **spec: Any) -> Manifest:
    """Return a claim whose volume is ours to create."""
    given = {"volume.kubernetes.io/storage-provisioner": DRIVER, **(annotations or {})}
    requests = {"requests": {"storage": "1Gi"}}
    asked = {
        "storageClassName": "s3",
        "accessModes": ["ReadWriteMany"],
        "volumeMode": "Filesystem",
        "resources": requests,
    }
    metadata = {"name": "data", "namespace": "team", "uid": uid, "annotations": given}
    return {"metadata": metadata, "spec": asked | spec, "status": {"phase": "Pending"}}


def known(**spec: Any) -> Known:
    manifest = dynamic(**spec)
    manifest["metadata"]["generation"] = 3
    return Known({"s3": parse(manifest)})


def manifest_of(template: Known, asked: Manifest | None = None, **fields: Any) -> Manifest:
    """Return the PodVolume of a claim, as the API server has it."""
    result = claims.pod_volume(asked or claim(), storage_class(**fields), template)
    result["metadata"] |= {"uid": "uid of volume", "resourceVersion": "1"}
    return result


def volume(asked: Manifest | None = None, policy: str = "Delete", **spec: Any) -> PodVolume:
    return pod_volumes.parse(manifest_of(known(**spec), asked, reclaimPolicy=policy))
