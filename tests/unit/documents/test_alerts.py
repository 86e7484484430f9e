"""The alerts are about metrics that exist, and their copies and docs/operations.md are up to date.

tests/kubernetes/test_alerts.py tests when they fire.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import promql_parser
import pytest

from tests.kubernetes import alerts
from tests.unit.documents.promql import ADDED, OF_PROMETHEUS, check_known, labels_named, selectors

if TYPE_CHECKING:
    from pathlib import Path

    from prometheus_client import Metric

RULES = alerts.rules()


@pytest.fixture(params=RULES, ids=lambda rule: rule["alert"])
def rule(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = request.param
    return found


def selected(rule: dict[str, Any]) -> list[promql_parser.VectorSelector]:
    return selectors(promql_parser.parse(rule["expr"]))


def test_its_metrics_exist_with_their_labels(rule: dict[str, Any], families: list[Metric]) -> None:
    assert selected(rule)
    check_known(selected(rule), families)


def test_it_says_only_what_its_metrics_tell(rule: dict[str, Any], families: list[Metric]) -> None:
    names = {selector.name for selector in selected(rule)}
    known = {
        label for family in families for sample in family.samples if sample.name in names for label in sample.labels
    }
    assert labels_named(rule["annotations"]["summary"]) <= known | ADDED


def test_a_metric_that_others_have_too_is_selected_by_the_job(rule: dict[str, Any]) -> None:
    for selector in selected(rule):
        ours = str(selector.name).startswith("fusermount3_broker_")
        jobs = [each.value for each in selector.matchers.matchers if each.name == "job"]
        assert jobs == ([] if ours else ["fusermount3-broker"])


def test_the_page_says_what_to_do_about_it(rule: dict[str, Any]) -> None:
    _, _, to_do = alerts.OPERATIONS.read_text().partition("What to look at, and what to do:")
    for selector in selected(rule):
        name = str(selector.name).removesuffix("_bucket")
        assert name == OF_PROMETHEUS or f"`{name}" in to_do


def test_it_has_a_name_of_its_own_and_a_severity() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    assert {rule["labels"]["severity"] for rule in RULES} == {"critical", "warning"}


@pytest.mark.parametrize("path", [alerts.OF_CHART, alerts.RULE, alerts.OPERATIONS], ids=lambda path: path.name)
def test_a_copy_is_up_to_date(path: Path) -> None:
    assert path.read_text() == alerts.copies()[path], "run .venv/bin/python -m tests.kubernetes.alerts"
