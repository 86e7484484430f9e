"""The driver is removed, and installed: with kustomize and with Helm until a pod reads, as who begins does, and for the
pods of meta-fuse-csi-plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.callers.build import compilers, copy_out, downloading, recipe_of
from tests.callers.conftest import or_not_run
from tests.cluster import driver, first_pod, images
from tests.cluster.commands import execute
from tests.cluster.pods import applied, wait_until_it_says
from tests.e2e.documented import block
from tests.journeys.journey import walking
from tests.kubernetes import programs as tools
from tests.kubernetes.objects import MIGRATION, the
from tests.kubernetes.rendered import OLD_DRIVER
from tests.lab import programs
from tests.lab.cache import Cache, recipe_hash
from tests.lab.images import SSHFS, image_tag

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cluster.node import ClusterNode
    from tests.journeys.journey import Journey

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PAGE = "kubernetes.md"

_OPERATOR = "github.com/prometheus-operator/prometheus-operator"
_DEFINITIONS = f"""cd /source && mkdir /out && module=$(go list -m -f '{{{{.Dir}}}}' {_OPERATOR}) &&
    cp "$module"/example/prometheus-operator-crd/*_podmonitors.yaml /out &&
    cp "$module"/example/prometheus-operator-crd/*_prometheusrules.yaml /out"""


def definitions() -> Path:
    """Return the directory with the Prometheus Operator's definitions of its resources. Raises NotReachable."""
    source = programs.SOURCES / "kubernetes/prometheus-operator"

    def build(directory: Path) -> None:
        with compilers(source) as container:
            with downloading("the Go module of the Prometheus Operator"):
                container.exec(["sh", "-c", f"cd /source && go mod download {_OPERATOR}"], timeout=300)
            container.exec(["sh", "-c", _DEFINITIONS])
            copy_out(container, "/out", directory)

    return Cache().entry("prometheus-operator", recipe_hash(recipe_of(source), _DEFINITIONS), build)


@pytest.fixture
def operator(without_driver: ClusterNode) -> Iterator[None]:
    """The cluster knows PodMonitors and PrometheusRules, as with the Prometheus Operator."""
    with or_not_run():
        files = f"--filename={definitions()}"
    without_driver.kubectl("create", files)
    yield
    without_driver.kubectl("delete", files)


def rolled_out(node: ClusterNode, namespace: str, name: str) -> None:
    node.kubectl("--namespace", namespace, "rollout", "status", f"daemonset/{name}", "--timeout=180s")


def reads(node: ClusterNode) -> None:
    """A pod reads a file in a volume."""
    with applied(node, driver.example("sshfs")) as pod:
        pod.wait_until_ready()
        assert pod.execute("cat", "/data/hello").stdout == "hello\n"


def prepared(journey: Journey) -> None:
    """Count the commands of which the node comes with the results: the image, in the node, and the Secret."""
    journey.typed(len(["make images", "ctr images import", "kubectl create secret"]))


def first_pod_reads(node: ClusterNode, journey: Journey) -> None:
    journey.typed(len(first_pod.COMMANDS))
    first_pod.reads(node)
    journey.mounted()


def test_kustomize(without_driver: ClusterNode) -> None:
    with walking("Kubernetes, with kustomize") as journey:
        prepared(journey)
        journey.typed(len(block(PAGE, "kubectl apply --kustomize").commands))
        driver.install(without_driver)
        first_pod_reads(without_driver, journey)
    driver.remove(without_driver)
    assert driver.what_there_is(without_driver) == ""


@pytest.mark.usefixtures("operator")
def test_helm(without_driver: ClusterNode) -> None:
    node = without_driver
    tools.program("helm")  # so that the time of a build doesn't count
    with walking("Kubernetes, with Helm") as journey:
        prepared(journey)
        install = block(PAGE, "kubectl create namespace")
        journey.typed(len(install.commands))
        execute(node, install.text, names={"REGISTRY": "localhost"})
        first_pod_reads(node, journey)
    rolled_out(node, driver.NAMESPACE, "fusermount3-broker")
    execute(node, block("operations.md", "helm upgrade").text)
    rolled_out(node, driver.NAMESPACE, "fusermount3-broker")
    assert "fusermount3_broker_mounts" in metrics(node)
    listed = ("get", "podmonitors,prometheusrules", "--namespace", driver.NAMESPACE, "--output=name")
    assert node.kubectl(*listed).stdout.split() == [
        "podmonitor.monitoring.coreos.com/fusermount3-broker",
        "prometheusrule.monitoring.coreos.com/fusermount3-broker",
    ]
    reads(node)
    execute(node, block(PAGE, "helm uninstall").text)
    assert driver.what_there_is(node) == ""


def metrics(node: ClusterNode) -> str:
    """Return what the port `metrics` of the broker's pod answers."""
    running = ("get", "pods", "--field-selector=status.phase=Running", "--output=jsonpath={.items[*].metadata.name}")
    pod = node.kubectl("--namespace", driver.NAMESPACE, *running).stdout
    return node.kubectl("get", "--raw", f"/api/v1/namespaces/{driver.NAMESPACE}/pods/{pod}:9468/proxy/metrics").stdout


def test_a_pod_of_meta_fuse_csi_plugin_with_a_stand_in_for_its_client(node: ClusterNode) -> None:
    node.kubectl("apply", "--filename=-", input=yaml.safe_dump_all(old_driver()))
    old = images.Built(
        f"FROM {image_tag(SSHFS)}\nCOPY fusermount3 /usr/bin/\n", {"fusermount3": programs.oldclient()}
    ).tag()
    images.load_one(node, "localhost/old-sshfs:1", old)
    try:
        execute(node, block(PAGE, "kubectl --namespace mfcp-system").text)
        assert OLD_DRIVER not in driver.what_there_is(node)
        with driver.kustomization(MIGRATION) as directory:
            execute(node, block(PAGE, "kubectl apply --kustomize").commands[0], directory)
            rolled_out(node, "meta-fuse-csi-plugin", "meta-fuse-csi-plugin")
            with applied(node, old_pod()) as pod:
                pod.wait_until_ready()
                wait_until_it_says(pod, ["cat", "/data/hello"], "hello\n")
            reads(node)  # through the driver with the new name, which runs beside it
            execute(node, block(PAGE, "kubectl delete --kustomize").text, directory)
        reads(node)
    finally:
        node.kubectl("delete", "namespace", "mfcp-system")


def old_driver() -> list[dict[str, Any]]:
    """Return the objects of meta-fuse-csi-plugin that the page deletes; its program does nothing."""
    labels = {"app": "meta-fuse-csi-plugin"}
    container = {"name": "driver", "image": "busybox:1.37", "command": ["sleep", "infinity"]}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 1}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "mfcp-system"}},
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "CSIDriver",
            "metadata": {"name": OLD_DRIVER},
            "spec": {"attachRequired": False, "podInfoOnMount": True, "volumeLifecycleModes": ["Ephemeral"]},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "DaemonSet",
            "metadata": {"name": "meta-fuse-csi-plugin", "namespace": "mfcp-system"},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": spec},
            },
        },
    ]


def old_pod() -> list[dict[str, Any]]:
    """Return a pod as they were written for that driver: two containers, and attributes that it requires."""
    objects = driver.example("two-containers")
    spec = the("Pod", objects)["spec"]
    sshfs, app = spec["containers"]
    sshfs["image"] = "localhost/old-sshfs:1"
    app |= {
        "image": "busybox:1.37",
        "command": ["sh", "-c", "trap 'exit 0' TERM; until mount | grep fuse; do sleep 1; done; sleep infinity & wait"],
    }
    (volume,) = [each for each in spec["volumes"] if "csi" in each]
    volume["csi"] = {
        "driver": OLD_DRIVER,
        "readOnly": False,
        "volumeAttributes": {
            "fdPassingEmptyDirName": "fuse-fd-passing",
            "fdPassingSocketName": "fuse-csi-ephemeral.sock",
        },
    }
    return objects
