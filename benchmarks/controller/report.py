"""What docs/performance.md says of the controller, and the bounds that it must keep."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

import psutil

from benchmarks.controller.measurement import RATE, WITHIN
from benchmarks.machine import processor
from tests.cluster import binaries
from tests.lab.checkout import commit

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from benchmarks.controller.measurement import Measured

MIB = 1 << 20
REPLICAS = 2
LIMIT = 256 * MIB
"""Of a replica's container (packaging/kubernetes/controller/deployment.yaml)."""


class Row(NamedTuple):
    """A quantity, what was measured, and what it must be; without a bound, it is always kept."""

    quantity: str
    measured: str
    bound: str = ""
    is_kept: bool = True


def missed(measured: Measured) -> list[str]:
    """Return the bounds that were missed."""
    return [f"{row.quantity}: {row.measured}, not {row.bound}" for row in _rows(measured) if not row.is_kept]


def markdown(measured: Measured) -> str:
    extent, places = measured.extent, len(measured.latencies)
    lines = [
        f"{extent.nodes:,} nodes and {extent.workloads:,} pods of {measured.pod_bytes / 1000:.1f} kB, simulated: they "
        "exist in the API server, and a program says of them what kubelets would. "
        f"{extent.rate:.0f} pods come in a second; "
        f"{places:,} mount pods serve them. Measured on {datetime.now(UTC).date().isoformat()}: {processor()}, "
        f"{psutil.cpu_count()} processors, which API server, etcd, scheduler, both replicas and the simulation share; "
        f"Kubernetes {binaries.KUBERNETES.version}; fusermount3-proxy {commit()}.",
        "",
        "| quantity | measured | bound |",
        "| --- | --- | --- |",
        *(f"| {row.quantity} | {row.measured} | {row.bound} |" for row in _rows(measured)),
        "",
        "Beyond that, computed from these numbers:",
        "",
        "| of a replica | value |",
        "| --- | --- |",
        *(f"| {quantity} | {value} |" for quantity, value in _limits(measured)),
    ]
    return "\n".join(lines) + "\n"


def _rows(measured: Measured) -> list[Row]:
    number, latency = measured.extent.workloads, _quantile(measured.latencies, 0.99)
    writes = measured.writes_come + measured.writes_go
    refused = sum(count for name, count in writes.items() if ":" in name)
    each, good = sum(writes.values()) / number, measured.within / max(measured.admissions, 1)
    return [
        Row(
            "from a pod on its node to its mount pod: p50, p99, longest",
            _seconds(measured.latencies, (0.5, 0.99, 1)),
            "p99 ≤ 2 s",
            latency <= 2,
        ),
        Row(
            "writes of both replicas for each pod, from when it comes until nothing is left of it",
            f"{each:.2f}, of which {refused / number:.2f} were refused: the other replica was faster",
            "≤ 4",
            each <= 4,
        ),
        Row("… when it comes", _per(measured.writes_come, number)),
        Row("… when it goes", _per(measured.writes_go, number)),
        Row("from when the last pod has gone until nothing is left", f"{measured.cleaned:.1f} s", "≤ 10 s"),
        Row(
            "memory of a replica: without pods, with all, most",
            f"{measured.empty / MIB:.0f} MiB, {measured.resident / MIB:.0f} MiB, {measured.peak / MIB:.0f} MiB",
            "< 100 MiB",
            measured.resident < 100 * MIB,
        ),
        Row("CPU of both for a pod that comes, that goes", _milliseconds(measured)),
        Row(
            "CPU of a replica while nothing happens but that all is listed again",
            f"{100 * measured.cpu_idle / REPLICAS / measured.extent.idle:.1f} % of a processor",
        ),
        Row(
            f"answers of the webhook within {1000 * WITHIN:.0f} ms, at {RATE:.0f} pods a second",
            f"{100 * good:.2f} % of {measured.admissions:,}; {measured.failed} failed",
            "≥ 99 %, none failed",
            good >= 0.99 and not measured.failed,
        ),
        Row(
            "the API server's answer to a pod that is admitted: p50, p99",
            _seconds(measured.admission_latencies, (0.5, 0.99)),
        ),
    ]


def _limits(measured: Measured) -> list[tuple[str, str]]:
    number = measured.extent.workloads
    memory = (measured.resident - measured.empty) / number
    cpu = (measured.cpu_come + measured.cpu_go) / REPLICAS / number
    listing = measured.cpu_idle / REPLICAS / measured.extent.idle / number
    return [
        ("memory for each pod in its cache", f"{memory / 1024:.1f} KiB"),
        ("pods until it has used the 256 MiB that its container may", f"{(LIMIT - measured.empty) / memory:,.0f}"),
        ("pods that come and go in a second until it needs a processor", f"{1 / cpu:,.0f}"),
        ("pods in its cache until listing them again needs half a processor", f"{0.5 / listing:,.0f}"),
    ]


def _quantile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(int(len(values) * part), len(values) - 1)]


def _seconds(values: Sequence[float], parts: Sequence[float]) -> str:
    return ", ".join(f"{1000 * _quantile(values, part):.0f} ms" for part in parts)


def _per(writes: Counter[str], number: int) -> str:
    """Return the writes by verb and resource, for each pod."""
    shown = {name: count / number for name, count in sorted(writes.items()) if count}
    return "; ".join(f"{name} {each:.2f}" for name, each in shown.items()) or "none"


def _milliseconds(measured: Measured) -> str:
    number = measured.extent.workloads
    return f"{1000 * measured.cpu_come / number:.1f} ms, {1000 * measured.cpu_go / number:.1f} ms"
