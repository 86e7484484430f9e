"""Two controllers and a real control plane: mount pods pass admission, scheduler, quota and RBAC, and are one.

The node has no driver, so no volume is published: mount pods and their users stay where kubelet waits for it. That they
serve is for the tests on a node with the driver.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from fusermount3_controller.mount_pods import ATTACHMENTS
from tests.callers.conftest import or_not_run
from tests.cluster import binaries, configuration
from tests.cluster.bare_controllers import MOUNTS, Controllers
from tests.cluster.node import ClusterNode
from tests.kubernetes.objects import Object
from tests.lab.pace import SLOWNESS
from tests.unit.controller.samples import claim, claimed, shared, volume
from tests.unit.controller.samples import pod as made_pod

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.e2e, pytest.mark.long]

TEAM = "team"
#: Seconds in which all that is promised happens, but for kubelet's part.
PATIENCE = 60.0
USERS = 50
#: Seconds in which who waits is told why.
TOLD = 10


class Cluster:
    """A node whose API server has the controller's objects, and two controllers with the rights of its account."""

    def __init__(self, node: ClusterNode, controllers: Controllers) -> None:
        self.node = node
        self.controllers = controllers

    def kubectl(self, *words: str, input: str = "") -> str:  # noqa: A002
        return self.node.kubectl(*words, input=input).stdout

    def create(self, *manifests: Object) -> None:
        self.kubectl("create", "--filename=-", input=yaml.safe_dump_all(manifests))

    def items(self, *words: str) -> list[Object]:
        items: list[Object] = json.loads(self.kubectl("get", *words, "--output=json"))["items"]
        return items

    def mount_pods(self) -> list[Object]:
        return self.items("pods", f"--namespace={MOUNTS}")

    def events(self, reason: str) -> list[Object]:
        return [each for each in self.items("events", f"--namespace={TEAM}") if each["reason"] == reason]

    def wait_until(self, true: Callable[[], object]) -> None:
        give_up = time.monotonic() + SLOWNESS * PATIENCE
        while not true():
            assert time.monotonic() < give_up, self.description()
            time.sleep(0.2)

    def description(self) -> str:
        listed = self.kubectl("get", f"pods,events,{ATTACHMENTS}", "--all-namespaces")
        return f"{listed}\n{self.controllers.said()}"


def template(name: str, cpu: str = "10m") -> Object:
    manifest = shared(name, allowInline=False)
    (container,) = manifest["spec"]["volumeStaging"]["podTemplate"]["spec"]["containers"]
    container["resources"] = {"requests": {"cpu": cpu}}
    return manifest


def storage(name: str) -> list[Object]:
    """Return a PersistentVolume of the template with this name, and a claim of it."""
    of_claim: dict[str, Any] = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    bound = volume(name, name)
    bound["spec"] |= {**of_claim, "capacity": {"storage": "1Gi"}}
    bound["spec"]["claimRef"] = {"namespace": TEAM, "name": name}
    asks = claim(name, volumeName=name)
    asks["spec"] |= {**of_claim, "resources": {"requests": {"storage": "1Gi"}}}
    return [bound, asks]


def user(name: str, claim_name: str) -> Object:
    result = made_pod(claimed(claim=claim_name), terminationGracePeriodSeconds=1)
    result["metadata"]["name"] = name
    return result


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with or_not_run():
        binaries.kubernetes()
    directory = tmp_path_factory.mktemp("mount-pods")
    with ClusterNode(directory / "node") as node:
        controllers = Controllers(node, directory)
        controllers.install([template("s3"), template("much", cpu="1000")])
        with controllers.running():
            node.kubectl("create", "namespace", TEAM)
            yield Cluster(node, controllers)


def test_many_users_and_two_controllers_make_one_mount_pod_and_nothing_is_left_of_it(cluster: Cluster) -> None:
    cluster.create(*storage("s3"), *(user(f"app-{number}", "s3") for number in range(USERS)))
    cluster.wait_until(lambda: any(each["spec"].get("nodeName") for each in cluster.mount_pods()))
    (made,) = cluster.mount_pods()
    assert made["spec"]["nodeName"] == configuration.NAME
    assert made["spec"]["priority"] == 1000000000
    cluster.wait_until(lambda: cluster.items(ATTACHMENTS)[0].get("status", {}).get("workloadCount") == USERS)
    (attachment,) = cluster.items(ATTACHMENTS)
    assert attachment["status"]["mountPod"]["name"] == made["metadata"]["name"]
    assert [each["name"] for each in attachment["status"]["workloads"]] == sorted(f"app-{n}" for n in range(USERS))
    assert made["metadata"]["ownerReferences"][0]["uid"] == attachment["metadata"]["uid"]
    assert cluster.events("MountPodCreated")
    shown = cluster.kubectl("get", "mpa").splitlines()
    columns = ["NODE", "VOLUME", "TEMPLATE", "FSGROUP", "POD", "PHASE", "WORKLOADS", "AGE"]
    assert shown[0].split() == ["NAME", *columns]

    # It stays what it is about.
    words = ["patch", ATTACHMENTS, attachment["metadata"]["name"], "--type=merge"]
    refused = cluster.node.kubectl(*words, '--patch={"spec": {"nodeName": "other"}}', check=False)
    assert "another volume has another MountPodAttachment" in refused.stderr

    # A drain would take it without --force, unlike the users, whom nobody would create again.
    drained = cluster.node.kubectl(
        *("drain", configuration.NAME, "--dry-run=server", "--delete-emptydir-data"), check=False
    )
    assert f"{TEAM}/app-0" in drained.stderr
    assert made["metadata"]["name"] not in drained.stderr

    # Whoever deletes it gets another one.
    cluster.kubectl("delete", "pod", made["metadata"]["name"], f"--namespace={MOUNTS}", "--wait=false")
    uid = made["metadata"]["uid"]
    cluster.wait_until(lambda: [each for each in cluster.mount_pods() if each["metadata"]["uid"] != uid])

    # And whoever deletes the attachment, too: Kubernetes takes the pod with it.
    cluster.kubectl("delete", ATTACHMENTS, attachment["metadata"]["name"])
    uid = attachment["metadata"]["uid"]
    cluster.wait_until(lambda: [each for each in cluster.items(ATTACHMENTS) if each["metadata"]["uid"] != uid])
    (attachment,) = cluster.items(ATTACHMENTS)
    uid = attachment["metadata"]["uid"]
    cluster.wait_until(
        lambda: [each["metadata"]["ownerReferences"][0]["uid"] for each in cluster.mount_pods()] == [uid]
    )

    cluster.kubectl("delete", "pods", "--all", f"--namespace={TEAM}", "--wait=false")
    cluster.wait_until(lambda: not cluster.mount_pods() and not cluster.items(ATTACHMENTS))


def test_who_waits_for_a_mount_pod_without_room_has_an_event_that_says_so(cluster: Cluster) -> None:
    cluster.create(*storage("much"), user("waits", "much"))
    begun = time.monotonic()
    cluster.wait_until(lambda: cluster.events("MountPodFailed"))
    assert time.monotonic() - begun <= SLOWNESS * TOLD
    (event,) = cluster.events("MountPodFailed")
    assert event["involvedObject"]["name"] == "waits"
    assert event["message"].startswith(f"mount pod {MOUNTS}/mp-")
    assert "Insufficient cpu" in event["message"]
    cluster.kubectl("delete", "pod", "waits", f"--namespace={TEAM}", "--wait=false")
    cluster.wait_until(lambda: not cluster.mount_pods() and not cluster.items(ATTACHMENTS))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"placement": "Sidecar"}, "have no effect with placement Sidecar"),
        ({"identity": "Pod"}, "spec.identity: Unsupported value"),
        ({"upgrade": "Never"}, "spec.upgrade: Unsupported value"),
        ({"idleSeconds": -1}, "spec.idleSeconds: Invalid value"),
        ({"allowInline": "yes"}, "spec.allowInline: Invalid value"),
        ({"allowedNamespaces": {"matchExpressions": [{"key": "a", "operator": "Is"}]}}, "Unsupported value"),
        ({"allowedNamespaces": {"matchLabel": {}}}, 'unknown field "spec.allowedNamespaces.matchLabel"'),
    ],
)
def test_the_api_server_refuses_a_template_for_shared_volumes(cluster: Cluster, change: Object, says: str) -> None:
    manifest = template("other")
    manifest["spec"] |= change
    words = ["create", "--dry-run=server", "--validate=strict", "--filename=-"]
    refused = cluster.node.kubectl(*words, input=yaml.safe_dump(manifest), check=False)
    assert refused.returncode != 0
    assert says in refused.stderr


def test_the_controllers_were_refused_nothing(cluster: Cluster) -> None:
    for log in cluster.controllers.logs:
        assert "orbidden" not in log.read_text()
        assert "Traceback" not in log.read_text()
