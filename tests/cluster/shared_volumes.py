"""Volumes that pods share on a node of the tests: a template for them, pods that use it, and what serves these."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from fusermount3_controller.mount_pods import ATTACHMENTS
from fusermount3_controller.rendering import TEMPLATE_LABEL
from tests.cluster import driver, installed_controller
from tests.cluster.pods import Pod, restricted
from tests.kubernetes.objects import TEMPLATES, Object
from tests.lab.pace import SLOWNESS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.cluster.node import ClusterNode

MOUNTS = "fuse-mounts"
"""The namespace of mount pods."""
TEMPLATE = "shared"
FIRST = ("cat", "/data/first")
"""Prints a line, if a volume of the template is at /data."""

_Result = TypeVar("_Result")

_SSHFS = next(path for path in TEMPLATES if path.stem == "sshfs")


@contextlib.contextmanager
def installed(node: ClusterNode) -> Iterator[None]:
    """Have the controller, the template for sshfs as one for shared volumes, and the Secret that it needs."""
    with installed_controller.installed(node):
        secret = json.loads(node.kubectl("get", "secret", "sshfs", "--output=json").stdout)
        secret["metadata"] = {"name": "sshfs", "namespace": MOUNTS}
        node.kubectl("create", "--filename=-", input=json.dumps(secret))
        node.kubectl("create", "--filename=-", input=yaml.safe_dump(template()))
        yield


def template(name: str = TEMPLATE, **program: Any) -> Object:
    """Return the template; `program` has more fields of its container."""
    manifest: Object = yaml.safe_load(_SSHFS.read_text())
    manifest["metadata"]["name"] = name
    manifest["spec"] |= {"placement": "Shared", "allowInline": True}
    (container,) = manifest["spec"]["volumeStaging"]["podTemplate"]["spec"]["containers"]
    container |= program
    return manifest


def user(
    name: str,
    group: int | None = None,
    *,
    read_only: bool = False,
    command: str = "",
    of_template: str = TEMPLATE,
    **mount: Any,
) -> Object:
    """Return a pod with six lines for a shared volume.

    `command` is a script that it runs instead of waiting; `mount` has more fields of its container's volumeMount.
    """
    attributes = {"volumeTemplate": of_template, "directory": "reports"}
    pod = restricted({"csi": {"driver": driver.NAME, "volumeAttributes": attributes, "readOnly": read_only}}, name)
    # A drain selects them by this label, with their mount pods.
    pod["metadata"]["labels"] = {TEMPLATE_LABEL: of_template}
    if group is not None:
        pod["spec"]["securityContext"]["fsGroup"] = group
    (container,) = pod["spec"]["containers"]
    container["volumeMounts"][0] |= mount
    if command:
        container["command"] = ["sh", "-c", command]
    return pod


@contextlib.contextmanager
def used(node: ClusterNode, *users: Object) -> Iterator[list[Pod]]:
    """Yield the pods when they are ready; afterwards, wait until nothing is left of them and of what served them."""
    try:
        yield started(node, *users)
    finally:
        manifests = yaml.safe_dump_all(users)
        node.kubectl("delete", "--filename=-", "--ignore-not-found", "--timeout=120s", input=manifests)
        wait_for(node, 0)
        assert not items(node, ATTACHMENTS)


def started(node: ClusterNode, *users: Object) -> list[Pod]:
    """Create the pods; return them when they are ready."""
    node.kubectl("create", "--filename=-", input=yaml.safe_dump_all(users))
    pods = [Pod(node, each["metadata"]["name"]) for each in users]
    for each in pods:
        each.wait_until_ready()
    return pods


def items(node: ClusterNode, *words: str) -> list[Object]:
    found: list[Object] = json.loads(node.kubectl("get", *words, "--output=json").stdout)["items"]
    return found


def mount_pods(node: ClusterNode) -> list[Object]:
    return items(node, "pods", f"--namespace={MOUNTS}")


def wait_for(node: ClusterNode, number: int, *, beside: Sequence[Object] = (), seconds: float = 120) -> list[Object]:
    """Return the mount pods when there are so many, all of which serve; none of them is one of those in `beside`."""
    others = set(map(uid_of, beside))

    def there() -> list[Object] | None:
        found = mount_pods(node)
        are_new = not any(uid_of(each) in others for each in found)
        return found if len(found) == number and are_new and all(map(_serves, found)) else None

    return wait_until(there, lambda: str(mount_pods(node)), seconds)


def _serves(mount_pod: Object) -> bool:
    conditions = mount_pod["status"].get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def wait_until(there: Callable[[], _Result | None], describe: Callable[[], str], seconds: float) -> _Result:
    """Return what `there` returns as soon as that is not None. AssertionError with a description if it stays so."""
    give_up = time.monotonic() + SLOWNESS * seconds
    while (found := there()) is None:
        assert time.monotonic() < give_up, describe()
        time.sleep(0.2)
    return found


def device(pod: Pod) -> str:
    """Return the device number of the filesystem in the container `app`."""
    return pod.execute("stat", "-c", "%d", "/data").stdout


def name_of(each: Object) -> str:
    return str(each["metadata"]["name"])


def uid_of(each: Object) -> str:
    return str(each["metadata"]["uid"])


def served_mounts(node: ClusterNode) -> list[dict[str, Any]]:
    """Return the shared mounts that the broker has, with their borrowers."""
    found: list[dict[str, Any]] = json.loads(driver.broker(node, "mounts", "--json"))
    return [each for each in found if each["share"]]
