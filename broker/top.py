"""``fusermount3-broker top``: the figures of a running broker, live, until somebody has seen enough.

Each second the broker is asked, and what has changed since its last answer is shown. The broker keeps nothing for it.
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

from broker import figures
from broker.control import NotRunning
from broker.terminal import duration, latency, mebibytes, moment, visible

#: Seconds between two looks.
PAUSE = 1.0
#: What needs an administrator comes first.
_ORDER = {"hung": 0, "dead": 1, "live": 2}


@dataclass(frozen=True)
class Look:
    """What the broker answered to "status" and "mounts", and when, on a clock that only goes forward."""

    status: dict[str, Any]
    mounts: list[dict[str, Any]]
    at: float = field(default_factory=time.monotonic)


Ask = Callable[[], Look]


def once(ask: Ask, console: Console) -> None:
    """Print one look; rates and latencies are those since the broker's start. Raises NotRunning."""
    console.print(render(ask(), None, None))


def live(ask: Ask, console: Console) -> None:
    """Show a look each second until q or ^C. A broker that is away meanwhile is waited for.

    Raises NotRunning if it does not even answer the first time.
    """
    look, before, problem = ask(), None, ""
    with (
        suppress(KeyboardInterrupt),
        _keys() as pressed,
        Live(console=console, screen=True, auto_refresh=False) as screen,
    ):
        while True:
            shown = render(look, before, console.size.height)
            screen.update(Group(Text(problem, style="bold red"), shown) if problem else shown, refresh=True)
            if pressed() == "q":
                return
            try:
                look, before, problem = ask(), look, ""
            except NotRunning as error:
                problem = str(error)


@contextmanager
def _keys() -> Iterator[Callable[[], str]]:
    """Give a function that waits for `PAUSE` seconds, or a key, and returns that."""
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


def render(look: Look, before: Look | None, height: int | None) -> RenderableType:
    """Return what is shown of a look, and of what has changed since the one before, in so many lines if given."""
    if before is not None and not figures.is_same_broker(look.status, before.status):
        before = None
    tables = [_processes(look.status), _requests(look, before), _latency(look, before), _limits(look, before)]
    shown = [table for table in tables if table.row_count]
    lines = 2 + sum(table.row_count + 2 for table in shown)
    mounts = _mounts(look.mounts, None if height is None else max(1, height - lines - 2))
    return Group(_header(look.status), *(part for each in (*shown, mounts) for part in (Text(), each)))


def _header(status: dict[str, Any]) -> Text:
    states = ", ".join(f"{count} {state}" for state, count in status["mount_states"].items())
    text = f"fusermount3-broker {status['version']}   up {duration(status['uptime_seconds'])}   mounts: {states}"
    return Text(text, style="bold", no_wrap=True)


def _processes(status: dict[str, Any]) -> Table:
    table = _table("PROCESS", "PID", "MEMORY", "DESCRIPTORS", "RESTARTS")
    for name, process in status.items():
        if isinstance(process, dict) and "pid" in process:
            known = [process.get("open_descriptors", ""), process.get("restarts", "")]
            _add(table, name, process["pid"], mebibytes(process["rss_bytes"]), *known)
    return table


def _requests(look: Look, before: Look | None) -> Table:
    table = _table("REQUEST", "RESULT", "TOTAL", "PER SECOND")
    for kind, total in sorted(look.status["requests"].items()):
        operation, _, result = kind.partition(" ")
        _add(table, operation, result, total, _rate("requests", kind, look, before))
    return table


def _limits(look: Look, before: Look | None) -> Table:
    table = _table("LIMIT HIT", "TOTAL", "PER SECOND")
    for limit, total in sorted(look.status["limits_hit"].items()):
        _add(table, limit, total, _rate("limits_hit", limit, look, before))
    return table


def _rate(counter: str, key: str, look: Look, before: Look | None) -> str:
    seconds = look.at - before.at if before else max(1, look.status["uptime_seconds"])
    count = look.status[counter][key] - (before.status[counter].get(key, 0) if before else 0)
    return f"{count / seconds:.1f}" if count else "0"


def _latency(look: Look, before: Look | None) -> Table:
    table = _table("LATENCY OF", "REQUESTS", "P50", "P99")
    for operation, histogram in sorted(look.status["latency"].items()):
        earlier = before.status["latency"].get(operation) if before else None
        buckets = figures.since(histogram["buckets"], earlier and earlier["buckets"])
        p50, p99 = (latency(figures.quantile(buckets, part)) for part in (0.5, 0.99))
        _add(table, operation, buckets[-1][1], p50, p99)
    return table


def _mounts(mounts: list[dict[str, Any]], most: int | None) -> RenderableType:
    """The mounts, hung and dead ones first, then the newest; no more than `most`."""
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
