"""Label selectors: what they match, and what is said about one that can't be used."""

from __future__ import annotations

from typing import Any

import pytest

from fusermount3_controller.faults import Fault
from fusermount3_controller.label_selectors import OPERATORS, matches, parse


def parsed(given: Any) -> tuple[Any, dict[str, str]]:
    faults: list[Fault] = []
    return parse(given, "f", faults), {fault.field: fault.text for fault in faults}


@pytest.mark.parametrize(
    ("given", "labels", "matched"),
    [
        ({}, {}, True),
        ({"matchLabels": {"a": "b"}}, {"a": "b", "c": "d"}, True),
        ({"matchLabels": {"a": "b"}}, {"a": "c"}, False),
        ({"matchLabels": {"a": "b"}}, {}, False),
        ({"matchLabels": {"a": "b", "c": "d"}}, {"a": "b"}, False),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["b", "c"]}]}, {"a": "c"}, True),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]}, {"a": "c"}, False),
        ({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["b"]}]}, {"a": "b"}, False),
        ({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["b"]}]}, {}, True),
        ({"matchExpressions": [{"key": "a", "operator": "Exists"}]}, {"a": ""}, True),
        ({"matchExpressions": [{"key": "a", "operator": "Exists"}]}, {}, False),
        ({"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]}, {}, True),
        ({"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]}, {"a": "b"}, False),
    ],
)
def test_labels_are_matched(given: Any, labels: dict[str, str], matched: bool) -> None:
    selector, faults = parsed(given)
    assert not faults
    assert matches(selector, labels) == matched


@pytest.mark.parametrize(
    ("given", "field", "says"),
    [
        ({"matchLabel": {}}, "f", "unknown 'matchLabel', did you mean 'matchLabels'?"),
        ({"matchLabels": {"a": 1}}, "f.matchLabels", "must be strings"),
        ({"matchLabels": ["a"]}, "f.matchLabels", "must be strings"),
        ({"matchExpressions": {"a": "b"}}, "f.matchExpressions", "must be a list"),
        ({"matchExpressions": ["a"]}, "f.matchExpressions[0]", "must be an object, not 'a'"),
        ({"matchExpressions": [{"operator": "Exists"}]}, "f.matchExpressions[0].key", "the name of a label"),
        ({"matchExpressions": [{"key": "a", "operator": "Is"}]}, "f.matchExpressions[0].operator", "not 'Is'"),
        ({"matchExpressions": [{"key": "a", "operator": []}]}, "f.matchExpressions[0].operator", "not '[]'"),
        ({"matchExpressions": [{"key": "a", "operator": "In"}]}, "f.matchExpressions[0].values", "In needs some"),
        (
            {"matchExpressions": [{"key": "a", "operator": "Exists", "values": ["b"]}]},
            "f.matchExpressions[0].values",
            "Exists needs none",
        ),
        (
            {"matchExpressions": [{"key": "a", "operator": "In", "values": [1]}]},
            "f.matchExpressions[0].values",
            "must be a list of strings",
        ),
        ({"matchExpressions": [{"key": "a", "operator": "Exists", "value": []}]}, "f.matchExpressions[0]", "unknown"),
    ],
)
def test_a_fault_names_its_field(given: Any, field: str, says: str) -> None:
    selector, faults = parsed(given)
    assert says in faults[field]
    assert not selector


def test_all_operators_are_known() -> None:
    for operator, has_values in OPERATORS.items():
        values = {"values": ["b"]} if has_values else {}
        assert parsed({"matchExpressions": [{"key": "a", "operator": operator, **values}]})[1] == {}
