"""The controller in a real cluster: users' pods get their sidecars, and read; and who is refused, when and by whom."""

from __future__ import annotations

import base64
import datetime
import json
import re
import time
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from fusermount3_controller import serving_certificates
from fusermount3_controller.admission import STRIPPED
from fusermount3_controller.mount_pods import moment
from fusermount3_controller.pod_rules import SOCKET_VARIABLE
from fusermount3_controller.serving_certificates import Certificates
from tests.cluster import driver, installed_controller, server
from tests.cluster.installed_controller import ACCOUNT, DEPLOYMENT, NAME, NAMESPACE
from tests.cluster.left import left
from tests.cluster.pods import applied, restricted
from tests.kubernetes.objects import Object
from tests.lab.pace import SLOWNESS

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from tests.cluster.node import ClusterNode

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.usefixtures("controlled")]

DRIVER = "csi.fusermount3-proxy.dev"
ATTRIBUTES = {"volumeTemplate": "sshfs", "directory": "reports"}
INLINE: Object = {"csi": {"driver": DRIVER, "volumeAttributes": ATTRIBUTES}}
CLAIMED: Object = {"persistentVolumeClaim": {"claimName": "reports"}}
INJECT = "fusermount3-proxy.dev/inject"
#: Seconds in which a Job is complete whose container has ended.
COMPLETE = 5


@pytest.fixture(scope="module")
def controlled(node_of_session: ClusterNode) -> Iterator[None]:
    """The controller, and the template for sshfs."""
    with installed_controller.installed(node_of_session):
        yield


def pod(source: Object, **annotations: str) -> Object:
    """Return what a user writes, who knows of no FUSE program."""
    result = restricted(source)
    result["metadata"]["annotations"] = annotations
    return result


def tried(node: ClusterNode, *manifests: Object) -> subprocess.CompletedProcess[str]:
    """Have the API server do all but create these, as `kubectl create --dry-run=server` does."""
    words = ["create", "--dry-run=server", "--output=json", "--filename=-"]
    return node.kubectl(*words, input=yaml.safe_dump_all(manifests), check=False)


def sidecars(tried: subprocess.CompletedProcess[str]) -> list[str]:
    assert tried.returncode == 0, tried.stderr
    return [each["name"] for each in json.loads(tried.stdout)["spec"].get("initContainers", [])]


def wait_until(true: Any, seconds: float = 60) -> None:
    give_up = time.monotonic() + SLOWNESS * seconds
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.2)


def test_a_pod_with_six_lines_for_a_volume_reads_and_writes_through_sshfs(node: ClusterNode) -> None:
    with applied(node, [pod(INLINE)]) as running:
        running.wait_until_ready()
        assert running.execute("cat", "/data/first").stdout == "first\n"
        running.execute("sh", "-c", "echo webhook > /data/written")
        assert server.execute(node, "cat reports/written; rm reports/written") == "webhook\n"
        created = json.loads(node.kubectl("get", "pod", "app", "--output=json").stdout)
        (sidecar,) = created["spec"]["initContainers"]
        assert (sidecar["name"], sidecar["restartPolicy"]) == ("fuse-data", "Always")
        assert created["spec"]["serviceAccountName"] == "default"


def test_a_pod_starts_that_uses_none_of_its_volumes(node: ClusterNode) -> None:
    """kubelet publishes none of them, so a sidecar would wait for ever for its socket."""
    idle = pod(INLINE)
    del idle["spec"]["containers"][0]["volumeMounts"]
    with applied(node, [idle]) as running:
        running.wait_until_ready()
        assert "initContainers" not in json.loads(node.kubectl("get", "pod", "app", "--output=json").stdout)["spec"]


def test_a_job_with_a_sidecar_is_complete_when_its_own_container_has_ended(node: ClusterNode) -> None:
    """The sidecar has ended by itself, too: nobody had to kill it."""
    template = pod(INLINE)
    del template["apiVersion"], template["kind"], template["metadata"]
    (app,) = template["spec"]["containers"]
    app["command"] = ["sh", "-c", "cat /data/first"]
    template["spec"]["restartPolicy"] = "Never"
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "reads"},
        "spec": {"backoffLimit": 0, "template": template},
    }
    node.kubectl("create", "--filename=-", input=yaml.safe_dump(job))
    try:
        waited = node.kubectl("wait", "--for=condition=Complete", "job/reads", "--timeout=120s", check=False)
        assert waited.returncode == 0, node.kubectl("describe", "pods", "--selector=job-name=reads").stdout
        conditions = json.loads(node.kubectl("get", "job", "reads", "--output=json").stdout)["status"]["conditions"]
        (complete,) = [moment(each["lastTransitionTime"]) for each in conditions if each["type"] == "Complete"]
        (made,) = json.loads(node.kubectl("get", "pods", "--selector=job-name=reads", "--output=json").stdout)["items"]
        (app, sidecar) = (
            made["status"][each][0]["state"]["terminated"] for each in ("containerStatuses", "initContainerStatuses")
        )
        assert (complete - moment(app["finishedAt"])).total_seconds() <= SLOWNESS * COMPLETE
        # sshfs ends with 1 when it is told to end; with 137, it would have been killed.
        assert sidecar["exitCode"] in (0, 1)
        wait_until(lambda: json.loads(driver.broker(node, "mounts", "--json")) == [])
        assert made["metadata"]["uid"] not in str(left(node).mounts)
    finally:
        node.kubectl("delete", "job", "reads", "--cascade=foreground", "--timeout=120s")


def test_a_pod_whose_claim_is_created_with_it_reads_too(node: ClusterNode) -> None:
    """Also if the controller's watch has not told it of the claim yet."""
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "reports"},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "",
            "csi": {
                "driver": DRIVER,
                "volumeHandle": "reports",
                "volumeAttributes": {**ATTRIBUTES, "fdPassingEmptyDirName": "fuse-fd-passing"},
            },
        },
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "reports"},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "",
            "volumeName": "reports",
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    with applied(node, [volume, claim, pod(CLAIMED)]) as running:
        running.wait_until_ready()
        assert running.execute("cat", "/data/first").stdout == "first\n"


def test_a_claim_that_waits_for_its_first_consumer_is_resolved_by_its_class(node: ClusterNode) -> None:
    storage_class = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": "reports"},
        "provisioner": DRIVER,
        "volumeBindingMode": "WaitForFirstConsumer",
        "parameters": ATTRIBUTES,
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "reports"},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "reports",
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    manifests = yaml.safe_dump_all([storage_class, claim])
    node.kubectl("create", "--filename=-", input=manifests)
    try:
        assert sidecars(tried(node, pod(CLAIMED))) == ["fuse-data"]
    finally:
        node.kubectl("delete", "--filename=-", input=manifests)


def test_others_stay_as_they_are(node: ClusterNode) -> None:
    assert sidecars(tried(node, pod({"emptyDir": {}}))) == []
    assert sidecars(tried(node, pod(CLAIMED))) == []
    assert sidecars(tried(node, pod({"emptyDir": {}}, **{INJECT: "false"}))) == []


@pytest.mark.parametrize(
    ("source", "annotations", "says"),
    [
        (
            {"csi": {"driver": DRIVER, "volumeAttributes": {**ATTRIBUTES, "directroy": "x"}}},
            {},
            "csi.volumeAttributes: the template 'sshfs': unknown 'directroy', did you mean 'directory'?",
        ),
        (
            {"csi": {"driver": DRIVER, "volumeAttributes": {"volumeTemplate": "ssh"}}},
            {},
            "there is no VolumeTemplate 'ssh'; there are sshfs",
        ),
        ({"emptyDir": {}}, {INJECT: "true"}, f"{INJECT}: none of the pod's volumes names a template"),
        (INLINE, {"fusermount3-proxy.dev/cpu-limit": "much"}, "cpu-limit: must be a quantity such as 250m or 1Gi"),
    ],
)
def test_who_asks_for_what_can_not_be_is_told_why(
    node: ClusterNode, source: Object, annotations: dict[str, str], says: str
) -> None:
    refused = tried(node, pod(source, **annotations))
    assert refused.returncode != 0
    assert 'admission webhook "inject.fusermount3-proxy.dev" denied the request: ' in refused.stderr
    assert says in refused.stderr


def test_a_template_that_could_not_be_used_is_refused_by_field(node: ClusterNode) -> None:
    manifest = json.loads(node.kubectl("get", "volumetemplate", "sshfs", "--output=json").stdout)
    manifest["metadata"] = {"name": "other"}
    assert tried(node, manifest).returncode == 0
    (container,) = manifest["spec"]["volumeStaging"]["podTemplate"]["spec"]["containers"]
    container["image"] = "{{ params.image }}"
    container["securityContext"] = {"privileged": True}
    refused = tried(node, manifest)
    assert refused.returncode != 0
    assert 'admission webhook "check.fusermount3-proxy.dev" denied the request: ' in refused.stderr
    field = "spec.volumeStaging.podTemplate.spec.containers[0]"
    assert f"{field}.image: params.image is not in spec.parameters" in refused.stderr
    assert f"{field}.securityContext.privileged: must be false" in refused.stderr


def test_a_sidecar_that_has_lost_its_restart_policy_is_told_by_the_webhook(node: ClusterNode) -> None:
    """As if another webhook had removed it: that is what the API server asks about then."""
    stripped = json.loads(tried(node, pod(INLINE)).stdout)
    del stripped["spec"]["initContainers"][0]["restartPolicy"]
    for name in ("uid", "creationTimestamp"):
        stripped["metadata"].pop(name, None)
    refused = tried(node, stripped)
    assert refused.returncode != 0
    says = f"denied the request: spec.initContainers[0].restartPolicy: {STRIPPED}"
    assert f'admission webhook "inject.fusermount3-proxy.dev" {says}' in refused.stderr


def test_and_by_the_policy_if_it_was_written_by_hand(node: ClusterNode) -> None:
    by_hand = pod({"emptyDir": {}}, **{INJECT: "false"})
    (app,) = by_hand["spec"]["containers"]
    variable = {"name": SOCKET_VARIABLE, "value": "/run/x"}
    by_hand["spec"]["initContainers"] = [{**app, "name": "by-hand", "env": [variable]}]
    refused = tried(node, by_hand)
    assert refused.returncode != 0
    assert "the init container by-hand: a sidecar that serves a volume must have" in refused.stderr
    by_hand["spec"]["initContainers"][0]["restartPolicy"] = "Always"
    assert sidecars(tried(node, by_hand)) == ["by-hand"]


def test_the_controller_has_no_right_that_it_does_not_need(node: ClusterNode) -> None:
    def listed(account: str, namespace: str) -> set[tuple[str, str, str]]:
        """Return resource, names and sorted verbs of each rule, of what `kubectl auth can-i --list` says."""
        said = node.kubectl("auth", "can-i", "--list", "--as", account, "--namespace", namespace).stdout
        rows = [re.split(r"\s*(\[.*?\])\s*", line) for line in said.splitlines()[1:]]
        return {(row[0], row[3], " ".join(sorted(row[5].strip("[]").split()))) for row in rows if row[0]}

    def rights(namespace: str) -> set[tuple[str, str, str]]:
        # Every account may ask what it may do, and in newer releases more.
        return listed(ACCOUNT, namespace) - listed("system:serviceaccount:default:default", namespace)

    configurations = ("mutatingwebhookconfigurations", "validatingwebhookconfigurations")
    read = ("namespaces", "persistentvolumeclaims", "persistentvolumes", "pods", "storageclasses.storage.k8s.io")
    of_cluster = {(name, "[]", "get list watch") for name in (*read, "volumetemplates.fusermount3-proxy.dev")}
    of_cluster |= {(f"{name}.admissionregistration.k8s.io", f"[{NAME}]", "get patch") for name in configurations}
    attachments = "mountpodattachments.fusermount3-proxy.dev"
    of_cluster |= {(attachments, "[]", "create delete get list watch"), ("events", "[]", "create")}
    of_cluster |= {(f"{attachments}/status", "[]", "patch")}
    assert rights("default") == of_cluster
    assert rights(NAMESPACE) == of_cluster | {
        ("secrets", f"[{NAME}-tls]", "get patch"),
        ("leases.coordination.k8s.io", f"[{NAME}]", "get patch"),
    }
    read_only = ("pods", "[]", "get list watch")
    assert rights("fuse-mounts") == of_cluster - {read_only} | {("pods", "[]", "create delete get list watch")}


def test_the_controller_can_read_no_secret_but_its_own(node: ClusterNode) -> None:
    def may(verb: str, what: str, namespace: str, account: str = ACCOUNT) -> str:
        return node.kubectl(
            *("auth", "can-i", verb, what, "--as", account, "--namespace", namespace), check=False
        ).stdout.strip()

    for namespace in ("default", "kube-system", "fuse-mounts", NAMESPACE):
        assert {may(verb, "secrets", namespace) for verb in ("get", "list", "watch")} == {"no"}
    assert may("get", "secrets/sshfs", "default") == "no"
    assert may("get", f"secrets/{NAME}-tls", NAMESPACE) == "yes"
    # On the nodes, nothing has any right, and no token for it.
    of_nodes = f"system:serviceaccount:{driver.NAMESPACE}:default"
    assert {may("get", what, driver.NAMESPACE, of_nodes) for what in ("secrets", "pods", "nodes")} == {"no"}
    (plugin,) = json.loads(node.kubectl("get", "pods", "--namespace", driver.NAMESPACE, "--output=json").stdout)[
        "items"
    ]
    assert plugin["spec"]["serviceAccountName"] == "default"
    assert not [volume for volume in plugin["spec"]["volumes"] if "projected" in volume or "secret" in volume]


def test_a_certificate_is_renewed_and_no_pod_is_refused(node: ClusterNode) -> None:
    """The Secret gets a certificate of 61 days ago; the controllers replace it."""
    words = ["--namespace", NAMESPACE, "get", "secret", f"{NAME}-tls", "--output=json"]

    def certificates() -> Certificates:
        data = json.loads(node.kubectl(*words).stdout)["data"]
        found = Certificates.of({name: base64.b64decode(text) for name, text in data.items()})
        assert found is not None
        return found

    current = certificates()
    then = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=61)
    old = serving_certificates._signed(current, f"{NAME}.{NAMESPACE}.svc", then)
    data = {name: base64.b64encode(value).decode() for name, value in old.data().items()}
    patch = json.dumps({"data": data})
    node.kubectl("--namespace", NAMESPACE, "patch", "secret", f"{NAME}-tls", "--patch", patch)
    give_up = time.monotonic() + SLOWNESS * 60
    while certificates() == old:
        assert sidecars(tried(node, pod(INLINE))) == ["fuse-data"]
        assert time.monotonic() < give_up
    assert certificates().authorities == current.authorities
    give_up = time.monotonic() + 12  # the other replica looks, too
    while time.monotonic() < give_up:
        assert sidecars(tried(node, pod(INLINE))) == ["fuse-data"]


def test_while_it_is_away_only_those_who_ask_are_refused(node_of_session: ClusterNode) -> None:
    """The pods that the controller has after that are others, and stay."""
    node = node_of_session

    def replicas(number: int) -> None:
        node.kubectl("--namespace", NAMESPACE, "scale", DEPLOYMENT, f"--replicas={number}")

    replicas(0)
    pods = ["--namespace", NAMESPACE, "get", "pods", "--output=name"]
    wait_until(lambda: not node.kubectl(*pods).stdout)
    try:
        for source, annotations in ((INLINE, {}), (CLAIMED, {INJECT: "true"}), (INLINE, {INJECT: "false"})):
            refused = tried(node, pod(source, **annotations))
            assert refused.returncode != 0
            assert 'failed calling webhook "inject.fusermount3-proxy.dev"' in refused.stderr
        for source, annotations in (({"emptyDir": {}}, {}), (CLAIMED, {}), ({"emptyDir": {}}, {INJECT: "false"})):
            begin = time.monotonic()
            assert sidecars(tried(node, pod(source, **annotations))) == []
            # Below the webhook's timeout: nobody has waited for that.
            assert time.monotonic() - begin < SLOWNESS * 2
    finally:
        replicas(2)
        installed_controller.wait_until_ready(node)
    wait_until(lambda: tried(node, pod(INLINE)).returncode == 0)
    assert sidecars(tried(node, pod(INLINE))) == ["fuse-data"]
