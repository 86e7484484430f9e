"""Short runs of all parts of the benchmarks: the results must be complete; the times are not checked."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import latency, metafuse, page, results
from benchmarks.__main__ import PAGE, STORED, in_private_namespace
from benchmarks.latency import META_FUSE
from benchmarks.remote_caller import CONTAINERS, MOUNTPOINT, RemoteCaller, uid_of
from benchmarks.results import AS_ROOT, GENUINE, IN_CONTAINERS, PROXY, Cost
from tests.e2e.conftest import fuse_mounts_of_host
from tests.lab.commands import run_with_teardown
from tests.lab.images import BUSYBOX, image_tag
from tests.lab.load import Helper
from tests.lab.podman import Container, Volume
from tests.lab.programs import oldclient

pytestmark = [pytest.mark.e2e, pytest.mark.long]

#: Tells identity, rights and namespaces, except for that of cgroups.
REPORT = """#!/bin/sh
exec >&2
grep -E '^(Uid|Gid|Groups|CapPrm|CapEff|CapBnd)' /proc/self/status
for name in user mnt pid net ipc uts; do readlink /proc/self/ns/$name; done
exit 1
"""
SOURCES = Path(__file__).parents[2]


def test_a_quick_run_measures_all_parts_and_leaves_nothing(tmp_path: Path) -> None:
    mounts, documents = fuse_mounts_of_host(), (PAGE.file.read_bytes(), STORED.read_bytes())
    stored = tmp_path / "results.json"
    command: list[str | Path] = [
        "env",
        "--chdir",
        SOURCES,
        sys.executable,
        "-m",
        "benchmarks",
        "--quick",
        "--json",
        stored,
    ]
    done = run_with_teardown(command)
    print(done.stdout)
    measured = results.load(stored)
    assert measured.quick
    assert page.rendered(measured).count("### ") == 7
    assert measured.latency
    assert {GENUINE, PROXY, *IN_CONTAINERS} <= set(measured.latency.exec_to_descriptor)
    assert META_FUSE in {**measured.latency.exec_to_descriptor, **measured.latency.not_measured}
    check_cpu(measured.cpu or {})
    assert measured.callers
    assert [each.failed() for each in measured.callers] == [0, 0, 0]
    for title in ("The n-th mount", "8 callers at once", "Another caller, while a container", "A hundred at once"):
        assert f"\n{title}" in done.stdout, "a part did not run"
    assert fuse_mounts_of_host() == mounts
    assert (PAGE.file.read_bytes(), STORED.read_bytes()) == documents, "it wrote without --write"


def check_cpu(measured: dict[str, Cost]) -> None:
    """Check that each helper has used something, and the broker for the proxy: the numbers are not checked."""
    assert list(measured) == [GENUINE, PROXY, AS_ROOT]
    assert measured.pop(GENUINE).broker == []
    for cost in measured.values():
        assert len(cost.helper) == len(cost.broker) == 2
        for use in (*cost.helper, *cost.broker):
            assert use.cpu_milliseconds > 0
            assert use.minor_faults > 0


def test_the_time_to_exit_is_that_of_the_same_calls_and_longer() -> None:
    measured = in_private_namespace(lambda: latency.measure(6))
    assert list(measured.exec_to_descriptor) == list(measured.exec_to_exit)
    for name, to_descriptor in measured.exec_to_descriptor.items():
        to_exit = measured.exec_to_exit[name]
        assert to_descriptor.calls == to_exit.calls == 6
        assert to_descriptor.p50 < to_exit.p50


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_caller_has_the_namespaces_and_rights_of_the_container(name: str, tmp_path: Path) -> None:
    """A script in place of the helper says the same when podman runs it."""
    script = tmp_path / "script"
    script.write_text(REPORT)
    script.chmod(0o755)
    options = replace(CONTAINERS[name], volumes=[Volume(script, "/script")])
    with Container(image_tag(BUSYBOX), options=options) as container:
        expected = container.exec(["/script"], check=False).stderr
        helper = Helper(Path("/nowhere"), Path("/script"))
        caller = RemoteCaller(helper, MOUNTPOINT, container.pid, uid_of(options))
        with pytest.raises(AssertionError) as failed, caller:
            caller.mount()
    assert "CapBnd" in expected
    assert f"status 1: {expected.strip()}" in str(failed.value)


def test_where_the_proxy_of_meta_fuse_csi_plugin_can_be_had_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that speaks its protocol replaces it: its module is not available everywhere."""
    stand_in = oldclient()
    monkeypatch.setattr(metafuse, "install", lambda _: stand_in)
    measured = in_private_namespace(lambda: latency.measure(3))
    assert list(measured.exec_to_descriptor) == [GENUINE, PROXY, *IN_CONTAINERS, META_FUSE]
    assert measured.exec_to_descriptor[META_FUSE].calls == 3
    assert measured.not_measured == {}
