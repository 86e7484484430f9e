"""Pods, mount pods and attachments for the tests of shared volumes, as the API server has them."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

from fusermount3_controller import mount_pods
from fusermount3_controller.mount_pods import Existing, MountPod
from fusermount3_controller.served_volumes import Known
from fusermount3_controller.volume_templates import parse
from fusermount3_controller.wanted_mount_pods import wanted
from tests.unit.controller.samples import Manifest, claim, claimed, inline, pod, shared, volume

if TYPE_CHECKING:
    from collections.abc import Iterable

NOW = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)
BOUND: Manifest = {
    "claims": {("team", "photos"): claim(volumeName="photos")},
    "volumes": {"photos": volume()},
}


def at(seconds: float) -> str:
    """Return the time so many seconds after `NOW`."""
    return (NOW + datetime.timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def known(generation: int = 1, **spec: Any) -> Known:
    """Return a cluster with a template of this generation, and a claim `photos` that is bound."""
    manifest = shared(**spec)
    manifest["metadata"]["generation"] = generation
    return Known({"s3": parse(manifest)}, **BOUND)


def user(name: str = "app", since: float = 0, node: str = "n1", phase: str = "Running", **spec: Any) -> Manifest:
    """Return a pod on a node that uses the claim."""
    result = pod(claimed(), nodeName=node, **spec)
    result["metadata"] |= {"name": name, "uid": f"uid of {name}", "creationTimestamp": at(since)}
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": at(since)}
    result["status"] = {"phase": phase, "conditions": [scheduled]}
    return result


def user_inline(**attributes: str) -> Manifest:
    result = user()
    result["spec"]["volumes"] = [inline(**attributes)]
    return result


def mount_of(pods: Iterable[Manifest], cluster: Known) -> MountPod:
    """Return the only mount pod that these need."""
    (mount,) = wanted(pods, cluster).mounts.values()
    return mount


def mount_pod(mount: MountPod, number: int = 0, created: float = 0, **status: Any) -> Manifest:
    """Return a mount pod that exists."""
    result = mount_pods.manifest(mount, number, "uid of owner")
    result["metadata"] |= {"uid": f"uid of {number}", "creationTimestamp": at(created)}
    result["status"] = {"phase": "Pending", **status}
    return result


def serving(mount: MountPod, number: int = 0, created: float = 0, since: float = 1) -> Manifest:
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": at(since)}
    return mount_pod(mount, number, created, phase="Running", conditions=[ready])


def failed(mount: MountPod, number: int = 0, created: float = 0) -> Manifest:
    return mount_pod(mount, number, created, phase="Failed", reason="Evicted", message="The node was low on memory.")


def ending(pod: Manifest, since: float = -60) -> Manifest:
    """Return the pod as it is when it was told to end so many seconds after `NOW`."""
    grace = 160
    pod["metadata"] |= {"deletionTimestamp": at(since + grace), "deletionGracePeriodSeconds": grace}
    return pod


def found(*pods: Manifest) -> list[Existing]:
    result = [mount_pods.existing(each) for each in pods]
    return [each for each in result if each]
