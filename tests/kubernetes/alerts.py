"""Write the copies of the alerts in packaging/prometheus: those for Kubernetes, and the tables in the documents.

.venv/bin/python -m tests.kubernetes.alerts
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.kubernetes.objects import CHART, PACKAGING

ROOT = Path(__file__).parents[2]
#: The line above the table in a page.
HEADING = "| alert | after | severity | says |\n"


@dataclass(frozen=True)
class Alerts:
    """The alerts about what is scraped as `job`, whose metrics begin with `prefix`, and where there are copies."""

    job: str
    prefix: str
    file: Path
    of_chart: Path
    rule: Path
    page: Path

    def groups(self) -> str:
        """Return the text of the file from its groups on."""
        return "groups:\n" + self.file.read_text().partition("\ngroups:\n")[2]

    def rules(self) -> list[dict[str, Any]]:
        """Return all alerts."""
        return [rule for group in yaml.safe_load(self.file.read_text())["groups"] for rule in group["rules"]]

    def to_do(self) -> str:
        """Return what the page says to do, from its beginning to the end of the page."""
        return self.page.read_text().partition("What to look at, and what to do:")[2]

    def copies(self) -> dict[Path, str]:
        """Return the content of each file that has a copy."""
        page = self.page.read_text()
        head, found, rest = page.partition(HEADING)
        assert found, f"{self.page} has no line {HEADING!r}"
        _, end, tail = rest.partition("\n\n")
        source = f"../../prometheus/{self.file.name}"
        object = _OBJECT.format(source=source, job=self.job) + textwrap.indent(self.groups(), "  ")  # noqa: A001
        return {
            self.of_chart: f"# A copy of the groups in {source}.\n{self.groups()}",
            self.rule: object,
            self.page: head + self._table() + "\n" + tail if end else head + self._table(),
        }

    def _table(self) -> str:
        lines = [
            f"| `{rule['alert']}` | {rule.get('for', 'at once')} | {rule['labels']['severity']} | {_said(rule)} |\n"
            for rule in self.rules()
        ]
        return "".join([HEADING, "| --- | --- | --- | --- |\n", *lines])


_OBJECT = """\
# The groups are those of {source}.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: {job}
  labels:
    app.kubernetes.io/name: {job}
spec:
"""

BROKER = Alerts(
    job="fusermount3-broker",
    prefix="fusermount3_broker_",
    file=ROOT / "packaging/prometheus/alerts.yaml",
    of_chart=CHART / "alerts.yaml",
    rule=PACKAGING / "metrics/prometheusrule.yaml",
    page=ROOT / "docs/operations.md",
)
CONTROLLER = Alerts(
    job="fusermount3-controller",
    prefix="fusermount3_controller_",
    file=ROOT / "packaging/prometheus/controller-alerts.yaml",
    of_chart=CHART / "controller-alerts.yaml",
    rule=PACKAGING / "controller-metrics/prometheusrule.yaml",
    page=ROOT / "docs/templates.md",
)
ALL = (BROKER, CONTROLLER)


def _said(rule: dict[str, Any]) -> str:
    """Return what the alert says, with words for what Prometheus puts in."""
    text = re.sub(r"{{ \$labels\.(\w+) }}", lambda match: match[1].upper(), rule["annotations"]["summary"])
    units = {"humanizeDuration": "N seconds", "humanizePercentage": "N %"}
    text = re.sub(r"{{ \$value \| (\w+) }}", lambda match: units[match[1]], text)
    return text.replace("{{ $value }}", "N")


if __name__ == "__main__":
    for each in ALL:
        for path, content in each.copies().items():
            path.write_text(content)
