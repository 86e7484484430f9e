"""A jump of the machine's clock changes nothing but what is shown: who looks at the time of day, and what for.

All that waits is measured with the monotonic clock, which nobody sets. Only the controller has to do with the time of
day: the API server compares certificates with its own, and dates what the controller looks at. If its clock jumps, it
may end a mount pod too early or too late that nobody uses.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = [
    *(path for path in sorted((ROOT / "broker").rglob("*.py")) if not path.name.endswith("_pb2.py")),
    *sorted((ROOT / "controller").rglob("*.py")),
    *sorted((ROOT / "fusermount3_proxy").glob("*.py")),
]
SOURCES = [path for folder in ("broker", "packaging/static") for path in sorted((ROOT / folder).rglob("*.[ch]"))]

TIME_OF_DAY = {"time", "time_ns", "strftime", "localtime", "gmtime", "ctime", "asctime", "clock_gettime"}
OF_DATETIME = {"now", "utcnow", "today"}
IN_C = re.compile(r"\b(time|gettimeofday|timespec_get|CLOCK_REALTIME\w*)\b *[(,]")

ALLOWED = {
    "controller/fusermount3_controller/certificate_keeper.py": "renews certificates, which expire at a time of day",
    "controller/fusermount3_controller/leader_election.py": "notes when the Lease was renewed, to be shown",
    "controller/fusermount3_controller/mount_pod_keeper.py": "compares what the API server has dated",
    "controller/fusermount3_controller/pod_volume_keeper.py": "the same, and when a stage is to be tried again",
    "fusermount3_broker/cli/mounts_table.py": "shows how old a mount is",
    "fusermount3_broker/front/call.py": "notes when a mount was made, to be shown",
    "fusermount3_broker/front/published_volumes.py": "the same",
    "fusermount3_broker/front/tables/damaged_rows.py": "notes when a row was put aside",
    "fusermount3_broker/service/log.py": "says in the log when something happened",
    "fusermount3_broker/service/state_directory.py": "names a damaged file that is put aside",
}
"""The modules that look at the time of day, and for what; in the broker, for nothing but what is shown."""


def asks_the_time_of_day(module: Path) -> bool:
    tree = ast.parse(module.read_text())
    assert not any(isinstance(node, ast.ImportFrom) and node.module == "datetime" for node in ast.walk(tree))
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "time"
        for alias in node.names
    }
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time"
    }
    return bool((imported | used) & TIME_OF_DAY) or ("datetime" in names and bool(attributes & OF_DATETIME))


def test_only_what_is_shown_and_what_the_api_server_compares_depend_on_the_time_of_day() -> None:
    found = {str(path.relative_to(ROOT)).removeprefix("broker/") for path in MODULES if asks_the_time_of_day(path)}
    assert found == ALLOWED.keys()


def test_no_program_in_c_looks_at_the_time_of_day() -> None:
    assert [path.name for path in SOURCES if IN_C.search(path.read_text())] == []
