"""Volumes that are created for claims on a node of the tests: the controller, an S3 server, classes; what is there."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

import yaml

from fusermount3_controller.pod_annotations import INJECT
from fusermount3_controller.pod_volumes import PLURAL
from tests.callers import s3
from tests.callers.build import image_tag
from tests.cluster import buckets, configuration, driver, images, installed_controller
from tests.cluster.pods import restricted
from tests.cluster.shared_volumes import MOUNTS
from tests.kubernetes.objects import PACKAGING, PROVISIONING, Object
from tests.lab.pace import SLOWNESS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.cluster.node import ClusterNode

TEMPLATE = PACKAGING / "provisioners/s3.yaml"
ENDPOINT, NOBODY = (f"http://{configuration.ADDRESS}:{port}" for port in (s3.PORT, 9))
IMAGE = "docker.io/example/s3:1.0"


@contextlib.contextmanager
def installed(node: ClusterNode) -> Iterator[None]:
    """Have the controller with its rights to volumes, the template for buckets, an S3 server and classes.

    Raises `build.NotReachable` if one of the programs can't be downloaded.
    """
    with contextlib.ExitStack() as stack:
        images.load_one(node, IMAGE, images.with_proxy(image_tag(buckets.DEBIANS), {}))
        stack.enter_context(s3.s3_for(node))
        stack.enter_context(installed_controller.installed(node, PROVISIONING))
        node.kubectl("--namespace", MOUNTS, "create", "secret", "generic", "s3", *buckets.KEYS)
        node.kubectl("create", f"--filename={TEMPLATE}")
        classes = [
            storage_class("s3"),
            storage_class("kept", reclaimPolicy="Retain"),
            storage_class("nobody", endpoint=NOBODY),
            storage_class("waits", volumeBindingMode="WaitForFirstConsumer"),
        ]
        created = yaml.safe_dump_all(classes)
        node.kubectl("create", "--filename=-", input=created)
        stack.callback(node.kubectl, "delete", "--filename=-", input=created)
        yield


def storage_class(name: str, endpoint: str = ENDPOINT, **fields: Any) -> Object:
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": name},
        "provisioner": driver.NAME,
        "parameters": {"volumeTemplate": "s3", "endpoint": endpoint},
        **fields,
    }


def claim_spec(of_class: str) -> Object:
    requests = {"storage": "1Gi"}
    return {"storageClassName": of_class, "accessModes": ["ReadWriteMany"], "resources": {"requests": requests}}


def claim(of_class: str) -> Object:
    """Return the claim `data`."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "data", "namespace": "default"},
        "spec": claim_spec(of_class),
    }


def user(source: Object | None = None) -> Object:
    """Return a pod that has the volume of the claim `data`, or another one, at /data."""
    pod = restricted(source or {"persistentVolumeClaim": {"claimName": "data"}})
    pod["metadata"]["annotations"] = {INJECT: "false"}
    return pod


class Cluster:
    def __init__(self, node: ClusterNode) -> None:
        self.node = node

    def items(self, *words: str) -> list[Object]:
        found: list[Object] = json.loads(self.node.kubectl("get", *words, "--output=json").stdout)["items"]
        return found

    def wait_until(self, true: Callable[[], Any], seconds: float = 120) -> None:
        give_up = time.monotonic() + SLOWNESS * seconds
        while not true():
            assert time.monotonic() < give_up, self.description()
            time.sleep(0.2)

    def description(self) -> str:
        """Return what kubectl says of all that has to do with volumes."""
        parts = (
            ["get", f"pods,pvc,pv,{PLURAL},mpa,events", "--all-namespaces"],
            ["get", PLURAL, "--output=yaml"],
            ["--namespace", MOUNTS, "describe", "pods"],
            ["--namespace", installed_controller.NAMESPACE, "logs", installed_controller.DEPLOYMENT, "--tail=40"],
        )
        return "\n".join(self.node.kubectl(*words, check=False).stdout for words in parts)

    def events(self, reason: str) -> list[str]:
        return [each["message"] for each in self.items("events", "--all-namespaces") if each["reason"] == reason]

    def forget_events(self) -> None:
        """Delete all events, which outlive what they are about: those of a test before this one tell nothing of it."""
        self.node.kubectl("delete", "events", "--all", "--all-namespaces")

    def buckets(self) -> str:
        """Return the S3 server's list."""
        return s3.get(self.node)

    def is_clean(self) -> bool:
        """Return whether nothing is left of volumes but what the server has."""
        return not any(self.items(kind) for kind in (PLURAL, "pv", "mpa")) and not self.items("pods", f"-n{MOUNTS}")

    @contextlib.contextmanager
    def created(self, *manifests: Object) -> Iterator[None]:
        text = yaml.safe_dump_all(manifests)
        try:
            self.node.kubectl("create", "--filename=-", input=text)
            yield
        finally:
            self.node.kubectl("delete", "--filename=-", "--ignore-not-found", "--timeout=120s", input=text)

    def bound(self) -> Object:
        """Return the only PersistentVolume, once it is bound."""

        def is_bound() -> bool:
            return [each["status"].get("phase") for each in self.items("pv")] == ["Bound"]

        self.wait_until(is_bound)
        (volume,) = self.items("pv")
        return volume
