"""Write the copies of packaging/prometheus/alerts.yaml: those for Kubernetes, and the table in docs/operations.md.

.venv/bin/python -m tests.kubernetes.alerts
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import yaml

from tests.kubernetes.objects import CHART, PACKAGING

ROOT = Path(__file__).parents[2]
FILE = ROOT / "packaging/prometheus/alerts.yaml"
OF_CHART = CHART / "alerts.yaml"
RULE = PACKAGING / "metrics/prometheusrule.yaml"
OPERATIONS = ROOT / "docs/operations.md"
#: The line above the table in that page.
HEADING = "| alert | after | severity | says |\n"

OBJECT = """\
# The groups are those of ../../prometheus/alerts.yaml.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: fusermount3-broker
  labels:
    app.kubernetes.io/name: fusermount3-broker
spec:
"""
NOTE = "# A copy of the groups in ../../prometheus/alerts.yaml.\n"


def groups() -> str:
    """Return the text of the file from its groups on."""
    return "groups:\n" + FILE.read_text().partition("\ngroups:\n")[2]


def rules() -> list[dict[str, Any]]:
    """Return all alerts."""
    return [rule for group in yaml.safe_load(FILE.read_text())["groups"] for rule in group["rules"]]


def table() -> str:
    """Return the table in docs/operations.md."""
    lines = [
        f"| `{rule['alert']}` | {rule.get('for', 'at once')} | {rule['labels']['severity']} | {said(rule)} |\n"
        for rule in rules()
    ]
    return "".join([HEADING, "| --- | --- | --- | --- |\n", *lines])


def said(rule: dict[str, Any]) -> str:
    """Return what the alert says, with words for what Prometheus puts in."""
    text = re.sub(r"{{ \$labels\.(\w+) }}", lambda match: match[1].upper(), rule["annotations"]["summary"])
    units = {"humanizeDuration": "N seconds", "humanizePercentage": "N %"}
    text = re.sub(r"{{ \$value \| (\w+) }}", lambda match: units[match[1]], text)
    return text.replace("{{ $value }}", "N")


def copies() -> dict[Path, str]:
    """Return the content of each file that has a copy."""
    page = OPERATIONS.read_text()
    head, found, rest = page.partition(HEADING)
    assert found, f"{OPERATIONS} has no line {HEADING!r}"
    _, end, tail = rest.partition("\n\n")
    return {
        OF_CHART: NOTE + groups(),
        RULE: OBJECT + textwrap.indent(groups(), "  "),
        OPERATIONS: head + table() + "\n" + tail if end else head + table(),
    }


if __name__ == "__main__":
    for path, content in copies().items():
        path.write_text(content)
