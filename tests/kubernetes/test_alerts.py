"""Test with promtool when each alert fires, and that it does not otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.kubernetes import alerts
from tests.lab.commands import run

TESTS = Path(__file__).with_name("alerts.test.yaml")
NAMES = [rule["alert"] for rule in alerts.rules()]
#: The name of each alert, and whether it fires, in each of the assertions.
ASSERTED = [
    (each["alertname"], "exp_alerts" in each)
    for test in yaml.safe_load(TESTS.read_text())["tests"]
    for each in test["alert_rule_test"]
]


@pytest.mark.e2e
def test_promtool_accepts_them(promtool: Path) -> None:
    run([promtool, "check", "rules", alerts.FILE])


@pytest.mark.e2e
def test_they_fire_when_they_should(promtool: Path) -> None:
    run([promtool, "test", "rules", TESTS])


@pytest.mark.parametrize("name", NAMES)
def test_an_alert_is_tested_both_ways(name: str) -> None:
    assert (name, True) in ASSERTED and (name, False) in ASSERTED


def test_what_is_tested_is_an_alert() -> None:
    assert {name for name, _ in ASSERTED} == set(NAMES)
