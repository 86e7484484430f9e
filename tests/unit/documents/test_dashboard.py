"""The dashboards and the table in docs/operations.md match the metrics that exist."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from prometheus_client import Metric

from tests.kubernetes import alerts
from tests.unit.documents.promql import ADDED, check_known, selectors

ROOT = Path(__file__).parents[3]
#: The dashboards, by the names of the jobs that they are about.
DASHBOARDS: dict[str, dict[str, Any]] = {
    each.job: json.loads((ROOT / f"packaging/grafana/{each.job}.json").read_text()) for each in alerts.ALL
}
OPERATIONS = ROOT / "docs/operations.md"
#: Values that Grafana substitutes for its variables.
VARIABLES = {"$__rate_interval": "1m", "$__range": "3h", "$job": ".+", "$instance": ".+"}


@pytest.fixture(params=DASHBOARDS)
def job(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def dashboard(job: str) -> dict[str, Any]:
    return DASHBOARDS[job]


@pytest.fixture
def metrics(job: str, every: dict[str, list[Metric]]) -> list[Metric]:
    """The metrics that the dashboard is about."""
    return every[job]


def expressions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def selected(dashboard: dict[str, Any]) -> list[promql_parser.VectorSelector]:
    found = []
    for expression in expressions(dashboard):
        for variable, value in VARIABLES.items():
            expression = expression.replace(variable, value)
        assert "$" not in expression
        found += selectors(promql_parser.parse(expression))
    return found


def test_every_metric_on_the_dashboard_exists_with_its_labels(dashboard: dict[str, Any], metrics: list[Metric]) -> None:
    check_known(selected(dashboard), metrics)


def test_every_metric_is_on_the_dashboard(dashboard: dict[str, Any], metrics: list[Metric]) -> None:
    shown = {selector.name for selector in selected(dashboard)}
    for family in metrics:
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        assert {family.name + suffix for suffix in suffixes} <= shown


def test_what_is_grouped_by_is_a_label(dashboard: dict[str, Any], metrics: list[Metric]) -> None:
    labels = {label for family in metrics for sample in family.samples for label in sample.labels}
    for expression in expressions(dashboard):
        for names in re.findall(r"by \((.*?)\)", expression):
            assert set(names.split(", ")) <= labels | ADDED
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            assert set(re.findall(r"{{(.*?)}}", target["legendFormat"])) <= labels | ADDED


def test_grafana_finds_what_it_needs_of_each_panel(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["type"] in ("timeseries", "stat")
        assert panel["title"]
        for source in (panel["datasource"], *(target["datasource"] for target in panel["targets"])):
            assert source == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert references and len(set(references)) == len(references)
    names = [variable["name"] for variable in dashboard["templating"]["list"]]
    assert names == ["datasource", "job", "instance"]
    assert dashboard["templating"]["list"][0]["type"] == "datasource"
    assert dashboard["id"] is None, "Grafana gives it"


def test_no_panel_lies_on_another(dashboard: dict[str, Any]) -> None:
    taken = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for cell in itertools.product(
            range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        ):
            assert cell not in taken
            taken.add(cell)


def described(family: Metric) -> str:
    """Return a metric's line in the table."""
    name = family.name + ("_total" if family.type == "counter" else "")
    labels = sorted({f"`{label}`" for sample in family.samples for label in sample.labels if label != "le"})
    return f"| `{name}` | {family.type} | {', '.join(labels)} | {family.documentation} |"


def test_the_table_has_every_metric_and_no_other(families: list[Metric]) -> None:
    table = re.findall(r"^\| `(?:fusermount3_broker|process)_.*$", OPERATIONS.read_text(), re.MULTILINE)
    assert table == [described(family) for family in families]


def test_the_page_says_what_to_do_about_each_metric_of_the_brokers(families: list[Metric]) -> None:
    _, _, to_do = OPERATIONS.read_text().partition("What to look at, and what to do:")
    names = {described(family).split("`")[1] for family in families}
    ours = {name for name in names if name.startswith("fusermount3_broker_")} - {"fusermount3_broker_build_info"}
    assert ours
    assert {name for name in ours if f"`{name}" not in to_do} == set()
