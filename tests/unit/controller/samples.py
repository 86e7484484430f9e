"""Manifests for the tests of the controller: a template and a pod that are as small as they can be."""

from __future__ import annotations

import copy
from typing import Any

Manifest = dict[str, Any]

_TEMPLATE: Manifest = {
    "apiVersion": "fusermount3-proxy.dev/v1alpha1",
    "kind": "VolumeTemplate",
    "metadata": {"name": "s3"},
    "spec": {
        "placement": "Sidecar",
        "parameters": {"bucket": {"required": True, "pattern": "[a-z0-9.-]{3,63}"}, "prefix": {}},
        "volumeStaging": {
            "podTemplate": {
                "spec": {
                    "containers": [
                        {
                            "name": "fuse",
                            "image": "example/s3fs:1.0",
                            "args": ["s3fs", "{{ params.bucket }}", "{{ mountpoint }}"],
                        }
                    ]
                }
            }
        },
    },
}


def template(placement: str = "Sidecar", name: str = "s3", **container: Any) -> Manifest:
    """Return a template whose container also has these fields."""
    result = copy.deepcopy(_TEMPLATE)
    result["metadata"]["name"] = name
    result["spec"]["placement"] = placement
    pod_of(result)["containers"][0] |= container
    return result


def shared(name: str = "s3", **spec: Any) -> Manifest:
    """Return a template for shared volumes, also inline ones, whose spec has these fields."""
    result = template("Shared", name)
    result["spec"] |= {"allowInline": True, **spec}
    return result


def volume(name: str = "photos", template: str = "s3", **attributes: str) -> Manifest:
    """Return a PersistentVolume that names a template."""
    given = {"volumeTemplate": template, "bucket": "photos", **attributes}
    csi = {"driver": "csi.fusermount3-proxy.dev", "volumeHandle": name, "volumeAttributes": given}
    return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": {"csi": csi}}


def claim(name: str = "photos", **spec: str) -> Manifest:
    metadata = {"name": name, "namespace": "team"}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def pod_of(template: Manifest) -> Manifest:
    """Return the spec of the pod template."""
    result: Manifest = template["spec"]["volumeStaging"]["podTemplate"]["spec"]
    return result


def pod(*volumes: Manifest, **spec: Any) -> Manifest:
    """Return a pod with these volumes, each of which is at /NAME of its container."""
    mounts = [{"name": each["name"], "mountPath": f"/{each['name']}"} for each in volumes]
    container = {"name": "app", "image": "busybox:1.37", "volumeMounts": mounts}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "app", "namespace": "team"},
        "spec": {"containers": [container], "volumes": list(volumes), **spec},
    }


def inline(name: str = "data", template: str = "s3", **attributes: str) -> Manifest:
    """Return an inline volume that names a template."""
    given = {"volumeTemplate": template, **({"bucket": "photos"} | attributes)}
    return {"name": name, "csi": {"driver": "csi.fusermount3-proxy.dev", "volumeAttributes": given}}


def claimed(name: str = "data", claim: str = "photos") -> Manifest:
    return {"name": name, "persistentVolumeClaim": {"claimName": claim}}


def review(pod: Manifest) -> Manifest:
    """Return what the API server asks before it creates the pod."""
    request = {"uid": "1", "operation": "CREATE", "namespace": "team", "dryRun": False, "object": pod}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
