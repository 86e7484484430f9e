"""Test how Prometheus gets the metrics of the DaemonSet: the container, PodMonitor and PrometheusRule of chart and
component, and that what the container runs passes on a real broker's metrics.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import subprocess
import time
import tomllib
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import yaml

from fusermount3_broker.service import configuration_file
from tests.e2e.documented import blocks
from tests.e2e.test_metrics import Endpoint, free_port
from tests.kubernetes import alerts
from tests.kubernetes.objects import BASE, CHART, KUSTOMIZATION, MIGRATION, PACKAGING, objects, the, validate
from tests.kubernetes.rendered import OLDEST, rendered_by_helm, rendered_by_kustomize
from tests.lab.broker import Broker
from tests.lab.commands import CommandFailed, run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.kubernetes.objects import Object
    from tests.lab.commands import Argument

# Building helm and kustomize needs Podman.
pytestmark = pytest.mark.e2e

COMPONENT = PACKAGING / "metrics"
ALL = ("--set=metrics.enabled=true", "--set=podMonitor.enabled=true", "--set=prometheusRule.enabled=true")
INSTANCE = "app.kubernetes.io/instance"
#: A container that a user may add.
ADDED = {"name": "own", "image": "own:1.0", "ports": [{"name": "metrics", "containerPort": 1234}]}


def with_component(kustomize: Path, base: Path, namespace: str, directory: Path) -> dict[str, Object]:
    """Return what the page's kustomization makes, with this base in this namespace."""
    (text,) = [each.text for each in blocks() if each.page == "operations.md" and "components:" in each.text]
    page = yaml.safe_load(text)
    assert (page["namespace"], *page["resources"], *page["components"]) == (
        "fusermount3-proxy",
        f"fusermount3-proxy/packaging/kubernetes/{BASE.name}",
        f"fusermount3-proxy/packaging/kubernetes/{COMPONENT.name}",
    )
    page |= {"namespace": namespace}
    page |= {"resources": [os.path.relpath(base, directory)], "components": [os.path.relpath(COMPONENT, directory)]}
    (directory / KUSTOMIZATION).write_text(yaml.safe_dump(page))
    return rendered_by_kustomize(kustomize, directory)


def pod_of(rendered: dict[str, Object]) -> Object:
    template: Object = the("DaemonSet", list(rendered.values()))["spec"]["template"]
    return template


def metrics_container(rendered: dict[str, Object]) -> Object:
    (found,) = [each for each in pod_of(rendered)["spec"]["containers"] if each["name"] == "metrics"]
    assert isinstance(found, dict)
    return found


def configured(rendered: dict[str, Object]) -> str:
    """Return the broker's configuration."""
    (text,) = the("ConfigMap", list(rendered.values()))["data"].values()
    return str(text)


def without_instance(labels: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in labels.items() if name != INSTANCE}


def test_chart_and_component_are_the_same(helm: Path, kustomize: Path, tmp_path: Path) -> None:
    of_chart = rendered_by_helm(helm, *ALL)
    of_component = with_component(kustomize, BASE, "fusermount3-proxy", tmp_path.resolve())
    del of_component["Namespace fusermount3-proxy"]
    for kind in ("PodMonitor", "PrometheusRule"):  # a release selects only its own pods
        ours = of_chart[f"{kind} fusermount3-broker"]
        assert ours["metadata"]["labels"].pop(INSTANCE)
        if kind == "PodMonitor":
            assert ours["spec"]["selector"]["matchLabels"].pop(INSTANCE)
    assert of_chart == of_component


def test_it_is_the_base_and_what_the_page_says(kustomize: Path, tmp_path: Path) -> None:
    base = rendered_by_kustomize(kustomize, BASE)
    more = with_component(kustomize, BASE, "fusermount3-proxy", tmp_path.resolve())
    assert more.keys() - base.keys() == {"PodMonitor fusermount3-broker", "PrometheusRule fusermount3-broker"}
    *others, added = pod_of(more)["spec"]["containers"]
    assert others == pod_of(base)["spec"]["containers"]
    assert added["image"] == others[0]["image"]
    assert configured(more) == f'metrics = "127.0.0.1:9467"\n{configured(base)}'


@pytest.mark.parametrize(("base", "namespace"), [(BASE, "fusermount3-proxy"), (MIGRATION, MIGRATION.name)])
def test_prometheus_finds_the_port(kustomize: Path, base: Path, namespace: str, tmp_path: Path) -> None:
    rendered = with_component(kustomize, base, namespace, tmp_path.resolve())
    check_found(rendered)
    namespaces = {each["metadata"].get("namespace") for each in rendered.values()}
    assert namespaces == {namespace, None}
    assert rendered[f"Namespace {namespace}"]


def test_prometheus_finds_the_port_of_a_release(helm: Path) -> None:
    check_found(rendered_by_helm(helm, *ALL, release="other"))
    check_found(rendered_by_helm(helm, *ALL, "--set=metrics.port=12345"))


def check_found(rendered: dict[str, Object]) -> None:
    monitor = the("PodMonitor", list(rendered.values()))["spec"]
    pod = pod_of(rendered)
    assert monitor["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert pod["metadata"]["labels"][monitor["jobLabel"]] == "fusermount3-broker", "the job of the alerts"
    (endpoint,) = monitor["podMetricsEndpoints"]
    container = metrics_container(rendered)
    (port,) = container["ports"]
    assert port["name"] == endpoint["port"]
    listen, connect = addresses(container)
    assert listen.startswith(f"TCP-LISTEN:{port['containerPort']},")
    assert tomllib.loads(configured(rendered))["metrics"] == connect.removeprefix("TCP:")


def addresses(container: Object) -> list[str]:
    """Return where the container listens, and where it connects to."""
    return [word for word in container["args"] if not word.startswith("-")]


def test_the_container_has_no_privilege(helm: Path) -> None:
    context = metrics_container(rendered_by_helm(helm, *ALL))["securityContext"]
    assert context.pop("runAsUser") == context.pop("runAsGroup") != 0
    assert context == {
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def test_without_being_asked_nothing_is_exported(helm: Path) -> None:
    rendered = rendered_by_helm(helm)
    assert {each["kind"] for each in rendered.values()} == {"CSIDriver", "ConfigMap", "DaemonSet"}
    assert "metrics" not in tomllib.loads(configured(rendered))


def test_what_the_page_sets_is_all(helm: Path) -> None:
    (command,) = [line for each in blocks() for line in each.commands if line.startswith("helm upgrade ")]
    words = shlex.split(command)
    options = [f"--set={value}" for option, value in itertools.pairwise(words) if option == "--set"]
    assert rendered_by_helm(helm, *options) == rendered_by_helm(helm, *ALL)


def test_the_objects_of_kubernetes_are_valid(helm: Path, tmp_path: Path) -> None:
    rendered = rendered_by_helm(helm, *ALL, f"--set-json=extraContainers={json.dumps([ADDED])}")
    for each in rendered.values():
        if not each["apiVersion"].startswith("monitoring.coreos.com/"):
            validate(each)
    (tmp_path / "broker.toml").write_text(configured(rendered))
    configuration_file.load(tmp_path / "broker.toml")


def test_the_rule_has_all_alerts(helm: Path) -> None:
    (group,) = the("PrometheusRule", list(rendered_by_helm(helm, *ALL).values()))["spec"]["groups"]
    assert group["rules"] == alerts.BROKER.rules()


def test_settings_of_the_operators_objects(helm: Path) -> None:
    labels = ("--set=podMonitor.labels.release=prometheus", "--set=prometheusRule.labels.release=prometheus")
    found = list(rendered_by_helm(helm, *ALL, *labels, "--set=podMonitor.interval=30s").values())
    for kind in ("PodMonitor", "PrometheusRule"):
        assert the(kind, found)["metadata"]["labels"]["release"] == "prometheus"
    (endpoint,) = the("PodMonitor", found)["spec"]["podMetricsEndpoints"]
    assert endpoint["interval"] == "30s"


def test_containers_and_volumes_can_be_added(helm: Path) -> None:
    containers, volumes = (
        f"--set-json=extraContainers={json.dumps([ADDED])}",
        '--set-json=extraVolumes=[{"name": "own"}]',
    )
    usual, found = (pod_of(rendered_by_helm(helm, *more))["spec"] for more in ((), (containers, volumes)))
    assert found["containers"] == [*usual["containers"], ADDED]
    assert found["volumes"] == [*usual["volumes"], {"name": "own"}]


def test_the_monitor_needs_something_to_scrape(helm: Path) -> None:
    monitor = "--set=podMonitor.enabled=true"
    with pytest.raises(CommandFailed, match=r"podMonitor\.enabled needs metrics\.enabled"):
        rendered_by_helm(helm, monitor)
    found = rendered_by_helm(helm, monitor, f"--set-json=extraContainers={json.dumps([ADDED])}")
    assert "PodMonitor fusermount3-broker" in found


def test_metrics_are_configured_once(helm: Path) -> None:
    own = '--set-json=configuration="metrics = \\"127.0.0.1:1\\"\\n"'
    with pytest.raises(CommandFailed, match="remove one of them"):
        rendered_by_helm(helm, *ALL, own)
    assert tomllib.loads(configured(rendered_by_helm(helm, own))) == {"metrics": "127.0.0.1:1"}


# NOTES.txt


def notes(helm: Path, directory: Path, *options: str) -> str:
    """Return what helm says after an installation: `helm template` only says what other templates make of it."""
    chart = directory / "chart"
    shutil.copytree(CHART, chart)
    (chart / "templates/notes.yaml").write_text(
        'said: {{ include (print .Template.BasePath "/NOTES.txt") . | toJson }}\n'
    )
    command: list[Argument] = [helm, "template", "mine", chart, "--namespace", "there", *OLDEST, *options]
    (said,) = objects(run([*command, "--show-only", "templates/notes.yaml"]).stdout)
    return str(said["said"])


def test_the_notes_name_what_was_installed(helm: Path, tmp_path: Path) -> None:
    said = notes(helm, tmp_path, "--set=driverName=driver.example")
    assert "kubectl --namespace there rollout status daemonset/mine\n" in said
    assert "kubectl label namespace there pod-security.kubernetes.io/enforce=privileged\n" in said
    (volumes,) = [yaml.safe_load(part) for part in said.split("\n\n") if part.startswith("  volumes:")]
    assert volumes["volumes"][1] == {"name": "data", "csi": {"driver": "driver.example"}}
    assert "fusermount3-broker is in no public registry" in said and "Prometheus" not in said


def test_the_notes_are_silent_about_an_image_that_was_set(helm: Path, tmp_path: Path) -> None:
    said = notes(helm, tmp_path, "--set=images.broker.repository=registry.example/broker", *ALL)
    assert "registry" not in said
    assert "metrics on port 9468 of each pod, as the PodMonitor mine says." in said


# What the container runs


@contextmanager
def passing_on(argv: Sequence[str]) -> Iterator[None]:
    process = subprocess.Popen(argv)
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=20)


def test_the_container_passes_on_the_metrics(helm: Path) -> None:
    container = metrics_container(rendered_by_helm(helm, *ALL))
    inner, outer = free_port(), free_port()
    listen, connect = addresses(container)
    ports = {listen: listen.replace("9468", str(outer)) + ",bind=127.0.0.1", connect: f"TCP:127.0.0.1:{inner}"}
    argv = [ports.get(word, word) for word in (*container["command"], *container["args"])]
    with Broker(f'metrics = "127.0.0.1:{inner}"') as broker, passing_on(argv):
        endpoint = Endpoint(broker, outer)
        give_up = time.monotonic() + 20
        while not is_open(endpoint):
            assert time.monotonic() < give_up
            time.sleep(0.05)
        assert endpoint.scrape()["fusermount3_broker_mounts", "live"] == 0
        for _ in range(20):
            assert endpoint.get("/healthz") == (200, "ok\n")


def is_open(endpoint: Endpoint) -> bool:
    try:
        endpoint.connect().close()
    except OSError:
        return False
    return True
