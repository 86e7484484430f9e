"""``fusermount3-broker top``: live figures of a running broker, until the user quits.

It queries the broker each second and shows the changes since the last answer. The broker keeps no state for it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fusermount3_broker.cli import live_display, mounts_table, rates
from fusermount3_broker.cli.formatting import duration, latency, mebibytes
from fusermount3_broker.messages.untrusted_text import visible

#: States that need an administrator come first.
_ORDER = {"hung": 0, "dead": 1, "live": 2}


@dataclass(frozen=True)
class Sample:
    """The broker's answers to "status" and "mounts", and their time on a monotonic clock."""

    status: dict[str, Any]
    mounts: list[dict[str, Any]]
    at: float = field(default_factory=time.monotonic)


Ask = Callable[[], Sample]


def once(ask: Ask, console: Console) -> None:
    """Print one sample; rates and latencies are those since the broker's start. Raises NotRunning."""
    console.print(render(ask(), None, None))


def live(ask: Ask, console: Console) -> None:
    """Show a sample each second until q or ^C. Raises NotRunning, as `live_display.show` does."""
    live_display.show(ask, render, console)


def render(sample: Sample, before: Sample | None, height: int | None) -> RenderableType:
    """Return a sample, with rates since the one before, for the display; in `height` lines if given.

    Its table of mounts has hung and dead ones first, then the newest.
    """
    if before is not None and not rates.is_same_broker(sample.status, before.status):
        before = None
    tables = [_processes(sample.status), _requests(sample, before), _latency(sample, before), _limits(sample, before)]
    shown = [table for table in tables if table.row_count]
    lines = 2 + sum(table.row_count + 2 for table in shown)
    ordered = sorted(sample.mounts, key=lambda mount: (_ORDER[mount["state"]], -mount["mounted_at"]))
    mounts = mounts_table.MountsTable(ordered, None if height is None else max(1, height - lines - 2))
    parts: list[RenderableType] = [*shown, mounts]
    return Group(_header(sample.status), *(each for part in parts for each in (Text(), part)))


def _header(status: dict[str, Any]) -> Text:
    states = ", ".join(f"{count} {state}" for state, count in status["mount_states"].items())
    text = f"fusermount3-broker {status['version']}   up {duration(status['uptime_seconds'])}   mounts: {states}"
    return Text(visible(text), style="bold", no_wrap=True)


def _processes(status: dict[str, Any]) -> Table:
    table = _table("PROCESS", "PID", "MEMORY", "DESCRIPTORS", "RESTARTS")
    for name, process in status.items():
        if isinstance(process, dict) and "pid" in process:
            known = [process.get("open_descriptors", ""), process.get("restarts", "")]
            _add(table, name, process["pid"], mebibytes(process["rss_bytes"]), *known)
    return table


def _requests(sample: Sample, before: Sample | None) -> Table:
    table = _table("REQUEST", "RESULT", "TOTAL", "PER SECOND")
    for kind, total in sorted(sample.status["requests"].items()):
        operation, _, result = kind.partition(" ")
        _add(table, operation, result, total, _rate("requests", kind, sample, before))
    return table


def _limits(sample: Sample, before: Sample | None) -> Table:
    table = _table("LIMIT HIT", "TOTAL", "PER SECOND")
    for limit, total in sorted(sample.status["limits_hit"].items()):
        _add(table, limit, total, _rate("limits_hit", limit, sample, before))
    return table


def _rate(counter: str, key: str, sample: Sample, before: Sample | None) -> str:
    seconds = sample.at - before.at if before else max(1, sample.status["uptime_seconds"])
    count = sample.status[counter][key] - (before.status[counter].get(key, 0) if before else 0)
    return f"{count / seconds:.1f}" if count else "0"


def _latency(sample: Sample, before: Sample | None) -> Table:
    table = _table("LATENCY OF", "REQUESTS", "P50", "P99")
    for operation, histogram in sorted(sample.status["latency"].items()):
        earlier = before.status["latency"].get(operation) if before else None
        buckets = rates.since(histogram["buckets"], earlier and earlier["buckets"])
        p50, p99 = (latency(rates.quantile(buckets, part)) for part in (0.5, 0.99))
        _add(table, operation, buckets[-1][1], p50, p99)
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, no_wrap=True, overflow="ellipsis")
    return table


def _add(table: Table, *cells: object) -> None:
    table.add_row(*(Text(visible(str(cell))) for cell in cells))
