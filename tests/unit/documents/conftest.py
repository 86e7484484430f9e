"""Fixtures: the metrics that broker and controller export."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from fusermount3_broker.front.metrics import Exposition
from fusermount3_controller.admission import REFUSED
from fusermount3_controller.controller_metrics import Metrics
from fusermount3_controller.mount_pods import Phase
from fusermount3_controller.served_volumes import Kind
from tests.kubernetes import alerts
from tests.unit.fronts import FrontWithoutMounter

if TYPE_CHECKING:
    from pathlib import Path

    from prometheus_client import Metric


@pytest.fixture
def families(tmp_path: Path) -> list[Metric]:
    """The endpoint's metrics for a front in which every metric has a sample."""
    front = FrontWithoutMounter(tmp_path).front
    front.limits_hit["mount_max"] += 1
    front.latency.labels("mount").observe(0.003)
    front.proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    try:
        _, text = Exposition(front).text("")
    finally:
        os.close(front.proc)
    return parsed(text.decode())


@pytest.fixture
def of_controller() -> list[Metric]:
    """The controller's metrics, when every metric has a sample."""
    metrics = Metrics()
    metrics.count(REFUSED, 0.003)
    metrics.show_cache(lambda: dict.fromkeys(Kind, 1), lambda: 1.0)
    metrics.show_certificate(lambda: 1.0)
    metrics.show_leader(lambda: False)
    metrics.show_mount_pods("node", {("s3", phase): 1 for phase in Phase}, 1)
    metrics.show_pod_volumes({("s3", "Created"): 1})
    metrics.count_run("volumeCreation", has_succeeded=True)
    metrics.count_start(1.0)
    metrics.show_look(0.003)
    # When a series began is none of the metrics.
    return [each for each in parsed(metrics.exposition().decode()) if not each.name.endswith("_created")]


@pytest.fixture
def every(families: list[Metric], of_controller: list[Metric]) -> dict[str, list[Metric]]:
    """All metrics, by the name of the job that scrapes them."""
    return {alerts.BROKER.job: families, alerts.CONTROLLER.job: of_controller}


def parsed(exposition: str) -> list[Metric]:
    found = list(parse_text(exposition))
    assert all(family.samples for family in found)
    return found
