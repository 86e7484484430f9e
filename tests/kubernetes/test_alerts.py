"""Test with promtool when each alert fires, and that it does not otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.kubernetes import alerts
from tests.kubernetes.alerts import Alerts
from tests.lab.commands import run

OF_ALERTS = pytest.mark.parametrize("of", alerts.ALL, ids=lambda each: each.job)


def file_of_tests(of: Alerts) -> Path:
    """Return the file for `promtool test rules`."""
    return Path(__file__).with_name(f"{of.file.stem}.test.yaml")


def asserted(of: Alerts) -> set[tuple[str, bool]]:
    """Return the name of each alert, and whether it fires, in each of the assertions."""
    return {
        (each["alertname"], "exp_alerts" in each)
        for test in yaml.safe_load(file_of_tests(of).read_text())["tests"]
        for each in test["alert_rule_test"]
    }


@pytest.mark.e2e
@OF_ALERTS
def test_promtool_accepts_them(promtool: Path, of: Alerts) -> None:
    run([promtool, "check", "rules", of.file])


@pytest.mark.e2e
@OF_ALERTS
def test_they_fire_when_they_should(promtool: Path, of: Alerts) -> None:
    run([promtool, "test", "rules", file_of_tests(of)])


@OF_ALERTS
def test_each_is_tested_both_ways_and_nothing_else(of: Alerts) -> None:
    names = {rule["alert"] for rule in of.rules()}
    assert asserted(of) == {(name, fires) for name in names for fires in (True, False)}
