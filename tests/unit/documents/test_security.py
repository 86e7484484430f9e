"""docs/security.md names tests that exist, and explains each capability."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.mounter import daemon
from fusermount3_broker.supervisor import privilege

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/security.md").read_text()
NAMED = sorted(set(re.findall(r"`(test_\w+\.py)::(\w+)`", PAGE)))
NAMES = {getattr(syscalls, name): name for name in dir(syscalls) if name.startswith("CAP_")}


def capabilities_of_the_unit(setting: str) -> set[str]:
    unit = (ROOT / "packaging/systemd/fusermount3-broker.service").read_text()
    lines = re.findall(rf"^{setting}=(.*)$", unit, re.MULTILINE)
    return {name for line in lines for name in line.split()}


def test_the_page_names_tests() -> None:
    assert len(NAMED) > 50


@pytest.mark.parametrize("file, name", NAMED)
def test_a_test_that_holds_a_promise_exists(file: str, name: str) -> None:
    sources = [path.read_text() for path in (ROOT / "tests").rglob(file)]
    assert any(re.search(rf"^(?:async )?(?:def|class) {name}\b", source, re.MULTILINE) for source in sources)


@pytest.mark.parametrize("setting", ["CapabilityBoundingSet", "AmbientCapabilities"])
def test_the_unit_gives_what_the_mounter_needs(setting: str) -> None:
    assert capabilities_of_the_unit(setting) == {NAMES[each] for each in daemon.CAPABILITIES}


def test_the_broker_does_not_start_without_what_the_mounter_needs() -> None:
    needed = {f"CAP_{name}": number for name, number in privilege.OF_THE_MOUNTER.items()}
    assert {NAMES[number] for number in needed.values()} == set(needed)
    assert set(needed.values()) == set(daemon.CAPABILITIES) - {syscalls.CAP_MKNOD}


def test_each_capability_is_explained() -> None:
    explained = re.findall(r"^\| (CAP_\w+) \| .+ \|$", PAGE, re.MULTILINE)
    assert sorted(explained) == sorted(NAMES[each] for each in daemon.CAPABILITIES)


def test_reports_go_to_the_maintainers() -> None:
    (address,) = re.findall(r"^maintainer_email = (\S+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    assert f"<{address}>" in (ROOT / "SECURITY.md").read_text()


def test_the_page_is_linked() -> None:
    for page in ("README.md", "SECURITY.md", "docs/architecture.md"):
        assert "security.md)" in (ROOT / page).read_text()
