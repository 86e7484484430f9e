"""Test how Prometheus gets the controller's metrics: PodMonitor and PrometheusRule of chart and component."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.kubernetes import alerts
from tests.kubernetes.objects import CONTROLLER, KUSTOMIZATION, PACKAGING, containers
from tests.kubernetes.rendered import rendered_by_helm, rendered_by_kustomize

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kubernetes.objects import Object

# Building helm and kustomize needs Podman.
pytestmark = pytest.mark.e2e

NAME = "fusermount3-controller"
MONITOR, RULE = f"PodMonitor {NAME}", f"PrometheusRule {NAME}"
ENABLED = (
    *("--set=controller.enabled=true", "--kube-version=1.30"),
    *("--set=metrics.enabled=true", "--set=podMonitor.enabled=true", "--set=prometheusRule.enabled=true"),
)
INSTANCE = "app.kubernetes.io/instance"


@pytest.fixture
def of_component(kustomize: Path, tmp_path: Path) -> dict[str, Object]:
    directory = tmp_path.resolve()
    resources, component = (os.path.relpath(each, directory) for each in (CONTROLLER, PACKAGING / "controller-metrics"))
    (directory / KUSTOMIZATION).write_text(yaml.safe_dump({"resources": [resources], "components": [component]}))
    return rendered_by_kustomize(kustomize, directory)


def test_the_component_adds_two_objects_to_the_controller(kustomize: Path, of_component: dict[str, Object]) -> None:
    more = {name: each for name, each in of_component.items() if name not in (MONITOR, RULE)}
    assert more == rendered_by_kustomize(kustomize, CONTROLLER)
    assert {of_component[each]["metadata"]["namespace"] for each in (MONITOR, RULE)} == {NAME}


def test_the_chart_has_the_same(helm: Path, of_component: dict[str, Object]) -> None:
    of_chart = rendered_by_helm(helm, *ENABLED, namespace=NAME)
    for name in (MONITOR, RULE):
        assert of_chart[name]["metadata"]["labels"].pop(INSTANCE)
    assert of_chart[MONITOR]["spec"]["selector"]["matchLabels"].pop(INSTANCE)
    assert [of_chart[name] for name in (MONITOR, RULE)] == [of_component[name] for name in (MONITOR, RULE)]


def test_prometheus_finds_the_port_under_the_name_of_the_alerts(helm: Path, of_component: dict[str, Object]) -> None:
    for rendered in (of_component, rendered_by_helm(helm, *ENABLED)):
        monitor, pod = rendered[MONITOR]["spec"], rendered[f"Deployment {NAME}"]["spec"]["template"]
        assert monitor["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        assert pod["metadata"]["labels"][monitor["jobLabel"]] == alerts.CONTROLLER.job
        (endpoint,) = monitor["podMetricsEndpoints"]
        (container,) = containers(pod)
        (port,) = [each["containerPort"] for each in container["ports"] if each["name"] == endpoint["port"]]
        assert f"--health-port={port}" in container["args"]


def test_the_rule_has_all_alerts(helm: Path) -> None:
    (group,) = rendered_by_helm(helm, *ENABLED)[RULE]["spec"]["groups"]
    assert group["rules"] == alerts.CONTROLLER.rules()


@pytest.mark.parametrize(
    ("left_out", "absent"), [("controller.", {MONITOR, RULE}), ("podMonitor.", {MONITOR}), ("prometheusRule.", {RULE})]
)
def test_the_chart_makes_only_what_is_wanted(helm: Path, left_out: str, absent: set[str]) -> None:
    made = rendered_by_helm(helm, *(each for each in ENABLED if left_out not in each))
    assert {MONITOR, RULE} - made.keys() == absent


def test_settings_of_the_operators_objects(helm: Path) -> None:
    labels = ("--set=podMonitor.labels.release=prometheus", "--set=prometheusRule.labels.release=prometheus")
    found = rendered_by_helm(helm, *ENABLED, *labels, "--set=podMonitor.interval=30s")
    assert {found[each]["metadata"]["labels"]["release"] for each in (MONITOR, RULE)} == {"prometheus"}
    assert found[MONITOR]["spec"]["podMetricsEndpoints"][0]["interval"] == "30s"
