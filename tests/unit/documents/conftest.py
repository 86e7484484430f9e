"""Fixtures: the metrics that the broker exports."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from fusermount3_broker.front.metrics import Exposition
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
    found = list(parse_text(text.decode()))
    assert all(family.samples for family in found)
    return found
