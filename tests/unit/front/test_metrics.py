"""The metrics: what they report about the front, and that no caller can add one."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import psutil
import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from fusermount3_broker.front import metrics
from fusermount3_broker.front.metrics import OPENMETRICS, PLAIN_TEXT, REQUESTS, Exposition
from fusermount3_broker.front.tables.volume_table import Volumes
from fusermount3_broker.messages.supervisor import PluginStarted
from fusermount3_proxy import __version__
from tests.unit.fronts import FrontWithoutMounter
from tests.unit.samples import VOLUME

FRONT = Path(__file__).parents[3] / "broker/fusermount3_broker/front"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FrontWithoutMounter:
    monkeypatch.setattr(metrics, "FRESH", -1.0)
    return FrontWithoutMounter(tmp_path)


def families(served: FrontWithoutMounter) -> dict[str, Metric]:
    _, text = Exposition(served.front).text("")
    return {family.name: family for family in parse_text(text.decode())}


def values(served: FrontWithoutMounter, sample: str) -> dict[tuple[str, ...], float]:
    """Return the values of a sample, keyed by the values of its labels."""
    found = {}
    for family in families(served).values():
        for each in family.samples:
            if each.name == sample:
                found[tuple(each.labels.values())] = each.value
    return found


def test_requests_are_counted_by_operation_and_result(served: FrontWithoutMounter) -> None:
    served.front.requests["mount mounted"] += 3
    served.front.requests["mount not rolled back"] += 1
    counted = values(served, "fusermount3_broker_requests_total")
    assert counted["mount", "mounted"] == 3
    assert counted["mount", "not_rolled_back"] == 1
    assert sum(counted.values()) == 4
    known = {(operation, result.replace(" ", "_")) for operation, results in REQUESTS for result in results}
    assert set(counted) == known
    assert not any(" " in word for labels in counted for word in labels)


def test_every_result_that_a_call_can_have_is_told_from_the_start() -> None:
    """`decided` is called with constants only, and `REQUESTS` has all of them."""
    results = set()
    names = "caller_connection.py", "call.py", "server.py", "volume_call.py"
    calls = "".join((FRONT / name).read_text() for name in names)
    for node in ast.walk(ast.parse(calls)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "decided":
            result = node.args[1]
            assert isinstance(result, ast.Constant) and isinstance(result.value, str)
            results.add(result.value.partition(":")[0])
    assert results == {
        result
        for operation, results in REQUESTS
        for result in results
        if operation in ("request", "mount", "unmount", "device")
    }
    assert dict(REQUESTS)["volume"] == dict(REQUESTS)["mount"]


def test_latencies_are_a_histogram_by_operation(served: FrontWithoutMounter) -> None:
    for seconds in (0.0015, 0.0015, 0.3, 1000):
        served.front.latency.labels("mount").observe(seconds)
    buckets = values(served, "fusermount3_broker_request_duration_seconds_bucket")
    assert (buckets["0.001", "mount"], buckets["0.002", "mount"], buckets["0.5", "mount"]) == (0, 2, 3)
    assert (buckets["300.0", "mount"], buckets["+Inf", "mount"]) == (3, 4)
    assert values(served, "fusermount3_broker_request_duration_seconds_count") == {("mount",): 4}
    assert values(served, "fusermount3_broker_request_duration_seconds_sum")["mount",] == pytest.approx(1000.303)


def test_mounts_are_told_by_state_and_those_that_are_gone_are_not(served: FrontWithoutMounter) -> None:
    dead, _, gone, _ = (served.mount(number) for number in range(1, 5))
    found = served.front.registry.find(dead)
    assert found
    served.front.states.note_dead(found.connection)
    served.fusectl.disconnect(gone)
    assert values(served, "fusermount3_broker_mounts") == {("live",): 2, ("dead",): 1, ("hung",): 0}


def test_what_waits_for_its_program_does_not_hang(served: FrontWithoutMounter) -> None:
    found = served.front.registry.find(served.mount(1))
    assert found
    served.front.registry.add(replace(found, volume=b"pods/1/mount", pid=0))
    served.front.states.note(found.connection, waiting=1, now=-1000.0)
    assert values(served, "fusermount3_broker_mounts") == {("live",): 1, ("dead",): 0, ("hung",): 0}


def test_volumes_and_restarts_of_the_plugin_are_counted(served: FrontWithoutMounter, tmp_path: Path) -> None:
    assert values(served, "fusermount3_broker_volumes") == {(): 0}
    served.front.volumes = Volumes(tmp_path / "volumes")
    served.front.volumes.add(VOLUME)
    served.front.plugin = PluginStarted(1, restarts=2)
    served.front.volumes.add(replace(VOLUME, target=b"borrower").as_borrower())
    served.front.volumes.add(replace(VOLUME, target=b"source", share=b"k"))
    assert values(served, "fusermount3_broker_volumes") == {(): 3}
    assert values(served, "fusermount3_broker_borrowed_volumes") == {(): 1}
    assert values(served, "fusermount3_broker_shared_volumes") == {(): 1}
    assert values(served, "fusermount3_broker_plugin_restarts_total") == {(): 2}
    served.front.volumes.close()


def test_limits_and_restarts_are_counted(served: FrontWithoutMounter) -> None:
    assert values(served, "fusermount3_broker_limits_hit_total") == {}
    served.front.limits_hit["mount_max"] += 2
    served.front.mounter.restarts = 3
    assert values(served, "fusermount3_broker_limits_hit_total") == {("mount_max",): 2}
    assert values(served, "fusermount3_broker_mounter_restarts_total") == {(): 3}


def test_version_and_process_are_told(served: FrontWithoutMounter) -> None:
    assert values(served, "fusermount3_broker_build_info") == {(__version__,): 1}
    for name in ("open_fds", "max_fds", "resident_memory_bytes", "virtual_memory_bytes", "start_time_seconds"):
        assert values(served, f"process_{name}")[()] > 0


def test_each_process_of_the_broker_is_told_and_not_only_the_front(served: FrontWithoutMounter) -> None:
    resident, seconds = (
        f"fusermount3_broker_process_{name}" for name in ("resident_memory_bytes", "cpu_seconds_total")
    )
    assert values(served, resident) == {}, "no process can be read"
    served.front.proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    try:
        served.front.mounter.pid = os.getppid()
        served.front.plugin = PluginStarted(os.getpid(), restarts=0)
        sizes, times = values(served, resident), values(served, seconds)
    finally:
        os.close(served.front.proc)
    assert set(sizes) == set(times) == {("supervisor",), ("front",), ("mounter",), ("plugin",)}
    own = psutil.Process()
    assert sizes["front",] == pytest.approx(own.memory_info().rss, rel=0.2)
    assert sizes["mounter",] == pytest.approx(psutil.Process(os.getppid()).memory_info().rss, rel=0.2)
    spent = own.cpu_times()
    assert times["front",] == pytest.approx(sum(spent[:2]), rel=0.1, abs=0.5)
    parent = psutil.Process(os.getppid()).cpu_times()
    assert times["supervisor",] == pytest.approx(sum(parent[:2]), rel=0.1, abs=0.5), "it restarts the other processes"
    assert times["mounter",] == pytest.approx(sum(parent[:4]), rel=0.1, abs=0.5), "its children do the work"


def test_nothing_that_a_caller_chooses_is_in_it(served: FrontWithoutMounter) -> None:
    before = {sample.name: sample.labels for family in families(served).values() for sample in family.samples}
    for number in range(50):
        served.mount(number, f"chosen {number}")
    _, text = Exposition(served.front).text("")
    assert b"chosen" not in text
    after = {sample.name: sample.labels for family in families(served).values() for sample in family.samples}
    assert after == before


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain; version=0.0.4"),
        ("*/*", "text/plain; version=0.0.4"),
        (
            "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.5",
            "application/openmetrics-text",
        ),
        ("application/openmetrics-text; version=666; escaping=none\x7f", "application/openmetrics-text; version=1.0.0"),
        ("text/plain; version=1.0.0; escaping=chosen", "text/plain; version=0.0.4"),
    ],
)
def test_the_client_chooses_one_of_two_formats(served: FrontWithoutMounter, accept: str, content_type: str) -> None:
    served.front.requests["mount mounted"] += 1
    told, text = Exposition(served.front).text(accept)
    assert told.startswith(content_type)
    assert told in (OPENMETRICS[1], PLAIN_TEXT[1])
    parse = parse_openmetrics if "openmetrics" in told else parse_text
    (family,) = [each for each in cast(Iterator[Metric], parse(text.decode())) if each.name.endswith("requests")]
    assert [each.value for each in family.samples if each.labels["result"] == "mounted"] == [1, 0]


def test_a_text_is_given_again_for_a_moment(served: FrontWithoutMounter, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(metrics, "FRESH", 1.0)
    monkeypatch.setattr("fusermount3_broker.front.metrics.time.monotonic", lambda: now)
    exposition = Exposition(served.front)
    first = exposition.text("")[1]
    served.mount(1)
    assert exposition.text("")[1] is first
    now = 101.5
    assert b'fusermount3_broker_mounts{state="live"} 1.0' in exposition.text("")[1]


def test_two_fronts_have_nothing_in_common(served: FrontWithoutMounter, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = FrontWithoutMounter(tmp_path / "other")
    served.front.latency.labels("mount").observe(1)
    served.front.requests["mount mounted"] += 1
    assert values(other, "fusermount3_broker_request_duration_seconds_count") == {}
    assert sum(values(other, "fusermount3_broker_requests_total").values()) == 0
