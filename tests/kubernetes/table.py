"""Generate the table of values in packaging/kubernetes/chart/README.md from values.yaml and values.schema.json.

    .venv/bin/python -m tests.kubernetes.table

writes it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import yaml

from tests.kubernetes.objects import CHART

if TYPE_CHECKING:
    from collections.abc import Iterator

FILE = CHART / "README.md"
HEADING = "## Values\n"


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield name, default and description of each value, in the order of values.yaml.

    A value has a description in the schema; a mapping without one is a group of values.
    """
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    yield from _rows("", values, schema["properties"])


def _rows(prefix: str, values: dict[str, Any], properties: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name, value in values.items():
        if "description" in properties[name]:
            yield prefix + name, json.dumps(value), properties[name]["description"]
        else:
            yield from _rows(f"{prefix}{name}.", value, properties[name]["properties"])


def table() -> str:
    lines = [f"| `{name}` | {_cell(default)} | {description} |" for name, default, description in rows()]
    return "\n".join(["| value | default | meaning |", "| --- | --- | --- |", *lines]) + "\n"


def _cell(default: str) -> str:
    """Return the default as the table shows it; for a default of several lines, it refers to values.yaml."""
    return "see values.yaml" if "\\n" in default else f"`{default}`"


def page() -> str:
    """Return the file with an up-to-date table; the text before the table stays as it is."""
    head, found, _ = FILE.read_text().partition(HEADING)
    assert found, f"{FILE} has no heading {HEADING!r}"
    return f"{head}{HEADING}\n{table()}"


if __name__ == "__main__":
    FILE.write_text(page())
