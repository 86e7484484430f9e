"""``fusermount3-broker top``: live figures of a running broker, until the user quits.

It queries the broker each second and shows the changes since the last answer. The broker keeps no state for it.
"""

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fusermount3_broker.cli import rates
from fusermount3_broker.cli.control_client import NotRunning
from fusermount3_broker.cli.formatting import duration, latency, mebibytes, moment
from fusermount3_broker.messages.untrusted_text import visible

#: Seconds between two queries.
PAUSE = 1.0
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
    """Show a sample each second until q or ^C. If the broker is away meanwhile, wait for it.

    Raises NotRunning if it does not answer the first query.
    """
    sample, before, problem = ask(), None, ""
    with (
        suppress(KeyboardInterrupt),
        _keys() as pressed,
        Live(console=console, screen=True, auto_refresh=False) as screen,
    ):
        while True:
            shown = render(sample, before, console.size.height)
            screen.update(Group(Text(visible(problem), style="bold red"), shown) if problem else shown, refresh=True)
            if pressed() == "q":
                return
            try:
                sample, before, problem = ask(), sample, ""
            except NotRunning as error:
                problem = str(error)


@contextmanager
def _keys() -> Iterator[Callable[[], str]]:
    """Yield a function that waits for `PAUSE` seconds, or a key, and returns the key, or ""."""
    if not sys.stdin.isatty():
        yield _pause
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed() -> str:
        ready, _, _ = select.select([descriptor], [], [], PAUSE)
        return os.read(descriptor, 1).decode("ascii", "replace") if ready else ""

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _pause() -> str:
    time.sleep(PAUSE)
    return ""


def render(sample: Sample, before: Sample | None, height: int | None) -> RenderableType:
    """Return a sample, with rates since the one before, for the display; in `height` lines if given."""
    if before is not None and not rates.is_same_broker(sample.status, before.status):
        before = None
    tables = [_processes(sample.status), _requests(sample, before), _latency(sample, before), _limits(sample, before)]
    shown = [table for table in tables if table.row_count]
    lines = 2 + sum(table.row_count + 2 for table in shown)
    mounts = _mounts(sample.mounts, None if height is None else max(1, height - lines - 2))
    return Group(_header(sample.status), *(part for each in (*shown, mounts) for part in (Text(), each)))


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


def _mounts(mounts: list[dict[str, Any]], most: int | None) -> RenderableType:
    """Return the table of mounts, hung and dead ones first, then the newest; no more than `most`."""
    table = _table("STATE", "MOUNTPOINT", "TYPE", "UID", "PID", "COMMAND", "CONTAINER", "SINCE")
    ordered = sorted(mounts, key=lambda mount: (_ORDER[mount["state"]], -mount["mounted_at"]))
    for mount in ordered[:most]:
        names = mount["mountpoint"] or mount["volume"], mount["type"], mount["uid"], mount["pid"], mount["command"]
        _add(table, mount["state"], *names, mount["container"][:24], moment(mount["mounted_at"]))
    more = len(mounts) - table.row_count
    return Group(table, Text(f"and {more} more")) if more else table


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, no_wrap=True, overflow="ellipsis")
    return table


def _add(table: Table, *cells: object) -> None:
    table.add_row(*(Text(visible(str(cell))) for cell in cells))
