"""The alerts are about metrics that exist, and their copies and the tables in the documents are up to date.

tests/kubernetes/test_alerts.py tests when they fire.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import promql_parser
import pytest

from tests.kubernetes import alerts
from tests.kubernetes.alerts import Alerts
from tests.unit.documents.promql import ADDED, OF_PROMETHEUS, check_known, labels_named, selectors

if TYPE_CHECKING:
    from pathlib import Path

    from prometheus_client import Metric

RULES = [(of, rule) for of in alerts.ALL for rule in of.rules()]
OF_RULE = pytest.mark.parametrize(("of", "rule"), RULES, ids=[rule["alert"] for _, rule in RULES])
COPIES = [(of, path) for of in alerts.ALL for path in of.copies()]


def selected(rule: dict[str, Any]) -> list[promql_parser.VectorSelector]:
    return selectors(promql_parser.parse(rule["expr"]))


@OF_RULE
def test_its_metrics_exist_with_their_labels(of: Alerts, rule: dict[str, Any], every: dict[str, list[Metric]]) -> None:
    assert selected(rule)
    check_known(selected(rule), every[of.job])


@OF_RULE
def test_it_says_only_what_its_metrics_tell(of: Alerts, rule: dict[str, Any], every: dict[str, list[Metric]]) -> None:
    names = {selector.name for selector in selected(rule)}
    known = {
        label
        for family in every[of.job]
        for sample in family.samples
        if sample.name in names
        for label in sample.labels
    }
    assert labels_named(rule["annotations"]["summary"]) <= known | ADDED


@OF_RULE
def test_a_metric_that_others_have_too_is_selected_by_the_job(of: Alerts, rule: dict[str, Any]) -> None:
    for selector in selected(rule):
        ours = str(selector.name).startswith(of.prefix)
        jobs = [each.value for each in selector.matchers.matchers if each.name == "job"]
        assert jobs == ([] if ours else [of.job])


@OF_RULE
def test_the_page_says_what_to_do_about_it(of: Alerts, rule: dict[str, Any]) -> None:
    to_do = of.to_do()
    for selector in selected(rule):
        name = str(selector.name).removesuffix("_bucket")
        assert name == OF_PROMETHEUS or f"`{name}" in to_do


def test_it_has_a_name_of_its_own_and_a_severity() -> None:
    assert len({rule["alert"] for _, rule in RULES}) == len(RULES)
    assert {rule["labels"]["severity"] for _, rule in RULES} == {"critical", "warning"}


@pytest.mark.parametrize(("of", "path"), COPIES, ids=[f"{path.parent.name}/{path.name}" for _, path in COPIES])
def test_a_copy_is_up_to_date(of: Alerts, path: Path) -> None:
    assert path.read_text() == of.copies()[path], "run .venv/bin/python -m tests.kubernetes.alerts"
