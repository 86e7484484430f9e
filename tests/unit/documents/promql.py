"""The metrics that expressions in PromQL select, compared with those that the broker exports."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any

import promql_parser

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client import Metric

#: Labels that Prometheus adds to scraped samples.
ADDED = {"job", "instance"}
#: What Prometheus says of each target by itself.
OF_PROMETHEUS = "up"


def selectors(expression: Any) -> list[promql_parser.VectorSelector]:
    """Return the metric selectors in a parsed expression."""
    match expression:
        case promql_parser.VectorSelector():
            return [expression]
        case promql_parser.MatrixSelector():
            return [expression.vector_selector]
        case promql_parser.BinaryExpr():
            return selectors(expression.lhs) + selectors(expression.rhs)
        case promql_parser.Call():
            return [each for argument in expression.args for each in selectors(argument)]
        case promql_parser.AggregateExpr() | promql_parser.ParenExpr() | promql_parser.SubqueryExpr():
            return selectors(expression.expr)
        case promql_parser.UnaryExpr():
            return selectors(expression.expr)
        case _:
            return []


def check_known(selected: Iterable[promql_parser.VectorSelector], families: Sequence[Metric]) -> None:
    """Assert that each selected metric exists, with the labels and the values of them that are asked for."""
    labels: dict[str, set[str]] = {OF_PROMETHEUS: set()}
    values: dict[tuple[str, str], set[str]] = {}
    for sample in itertools.chain.from_iterable(family.samples for family in families):
        labels.setdefault(sample.name, set()).update(sample.labels)
        for label, value in sample.labels.items():
            values.setdefault((sample.name, label), set()).add(value)
    for selector in selected:
        assert selector.name in labels
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels[selector.name] | ADDED
            wanted = matcher.value.split("|") if matcher.op == promql_parser.MatchOp.Re else [matcher.value]
            assert matcher.name in ADDED or set(wanted) <= values[selector.name, matcher.name]


def labels_named(template: str) -> set[str]:
    """Return the labels that the text of an alert names."""
    return set(re.findall(r"\$labels\.(\w+)", template))
