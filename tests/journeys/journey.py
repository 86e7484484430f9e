"""The journeys, and what each of them takes: how many commands of the pages, and how long to the first mount.

A test walks a journey by executing the commands as the pages have them. `python -m tests.journeys` runs these tests and
writes the table in docs/where-it-runs.md; any other run compares the number of commands with the table.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.section import Section

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
TABLE = Section(ROOT / "docs/where-it-runs.md", "python -m tests.journeys")
#: The directory for the results of a run that is to write the table.
WRITE = "FUSERMOUNT3PROXY_JOURNEYS"


class Route(NamedTuple):
    """Where a journey leads: the pages that it follows, as links of the table, and the test that walks it."""

    pages: str
    test: str


_HOST = "tests/journeys/test_on_a_host.py"
_SYSTEMD = "[systemd](install-systemd.md#debian-packages)"
_COMPOSE = "[Compose](#docker-compose)"
_CLUSTER = "tests/cluster/test_installations.py"
_KUBERNETES = "[install](kubernetes.md#install), [the first pod](kubernetes.md#the-first-pod)"
ROUTES = {
    "Debian packages and sshfs in Podman": Route(
        f"{_SYSTEMD}, [any image: volumes](containers.md#any-image-volumes)", f"{_HOST}::test_sshfs_in_podman"
    ),
    "Podman without root": Route(
        "[Podman without root](#podman-without-root), on a host with a broker",
        "tests/e2e/test_rootless_podman.py::test_a_container_mounts_as",
    ),
    "a CI job": Route(f"{_SYSTEMD}, [in a build](ci.md#in-a-build-of-an-image)", f"{_HOST}::test_ci_job"),
    "CDI, with an image that nobody changed": Route(
        f"{_SYSTEMD}, [any image: CDI](containers.md#any-image-cdi)", f"{_HOST}::test_cdi"
    ),
    "a FUSE author's own program": Route(
        f"{_SYSTEMD}, [any image: CDI](containers.md#any-image-cdi), [for authors](fuse-programs.md)",
        f"{_HOST}::test_a_program_that_its_author_wrote_by_the_page",
    ),
    "Kubernetes, with kustomize": Route(_KUBERNETES, f"{_CLUSTER}::test_kustomize"),
    "Kubernetes, with Helm": Route(_KUBERNETES, f"{_CLUSTER}::test_helm"),
    "Docker Compose": Route(f"{_SYSTEMD}, {_COMPOSE}", f"{_HOST}::test_docker_compose"),
    "an administrator who reads why a mount was refused, and allows it": Route(
        f"{_SYSTEMD}, [the log](messages.md#from-a-users-message-to-the-log), "
        "[configure](install-systemd.md#configure)",
        f"{_HOST}::test_a_refusal_is_found_in_the_log_and_mended",
    ),
    "upgrade from 0.1.0 with a live mount, which is read again": Route(
        "[upgrade](install-systemd.md#upgrade-and-remove)", f"{_HOST}::test_an_upgrade_from_the_last_release"
    ),
}


class Journey:
    """A walk on one of the `ROUTES`."""

    def __init__(self) -> None:
        self.commands = 0
        self.seconds = 0.0
        self._start = 0.0

    def typed(self, commands: int = 1) -> None:
        """Count commands that are executed next, until there is a mount; the clock starts with the first."""
        self._start = self._start or time.monotonic()
        self.commands += 0 if self.seconds else commands

    def mounted(self) -> None:
        """Stop the clock, and the counting: files have been read through a mount."""
        self.seconds = self.seconds or time.monotonic() - self._start


@contextlib.contextmanager
def walking(name: str) -> Iterator[Journey]:
    """Walk the journey of this name until the block ends; it must have led to a mount, by as many commands as the table
    says."""
    assert name in ROUTES
    journey = Journey()
    yield journey
    assert journey.seconds, "no mount"
    if directory := os.environ.get(WRITE):
        result = {"commands": journey.commands, "seconds": journey.seconds}
        Path(directory, f"{list(ROUTES).index(name)}.json").write_text(json.dumps(result))
    else:
        assert journey.commands == listed()[name], f"{TABLE.writer} writes the table"


def listed() -> dict[str, int]:
    """Return the number of commands of each journey in the table."""
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| `[^|]+` \| (\d+) \| [^|]+ \|$", TABLE.read(), re.MULTILINE)
    return {name: int(commands) for name, commands in rows}


def table(results: Path) -> str:
    """Return the table of the results in this directory. FileNotFoundError if one is missing."""
    lines = ["| journey | pages | test | commands | seconds to the first mount |", "| --- | --- | --- | --- | --- |"]
    for number, (name, route) in enumerate(ROUTES.items()):
        result = json.loads((results / f"{number}.json").read_text())
        lines.append(
            f"| {name} | {route.pages} | `{route.test}` | {result['commands']} | {max(1, round(result['seconds']))} |"
        )
    return "\n" + "\n".join(lines) + "\n"
