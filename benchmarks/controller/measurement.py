"""Measures two controllers on a real control plane: while pods come, when all are there, while pods go."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil
import yaml

from benchmarks.controller.simulation import TEAM, Extent, Simulation, template
from tests.cluster import configuration
from tests.cluster.api import Api
from tests.cluster.bare_controllers import MOUNTS, Controllers, exposition
from tests.cluster.node import ClusterNode
from tests.unit.controller.samples import inline, pod
from tests.unit.controller.samples import template as sidecar

if TYPE_CHECKING:
    from collections.abc import Sequence

RATE = 50.0
"""Admissions in a second."""
WITHIN = 0.02
"""Seconds; a bucket of the controller's histogram ends there."""
_SIDECAR = "sidecar"


class Used(NamedTuple):
    """What the two controllers have used: CPU seconds of both, and of memory the most that one has had, in bytes."""

    cpu: float
    resident: int
    peak: int


@dataclass
class Measured:
    """What was measured. Latencies in seconds; `writes` by verb and resource, of refused ones with the status."""

    extent: Extent
    latencies: list[float] = field(default_factory=list)
    writes_come: Counter[str] = field(default_factory=Counter)
    writes_go: Counter[str] = field(default_factory=Counter)
    cpu_come: float = 0.0
    cpu_idle: float = 0.0
    cpu_admissions: float = 0.0
    cpu_go: float = 0.0
    empty: int = 0
    resident: int = 0
    peak: int = 0
    seconds_come: float = 0.0
    cleaned: float = 0.0
    pod_bytes: int = 0
    admissions: int = 0
    failed: int = 0
    within: int = 0
    admission_latencies: list[float] = field(default_factory=list)


def measure(extent: Extent, directory: Path) -> Measured:
    """Start a control plane in this directory, and measure. AssertionError with what the controllers said."""
    with ClusterNode(directory / "node", machine=configuration.SIMULATED) as node:
        controllers = Controllers(node, directory)
        controllers.install([template(), sidecar(name=_SIDECAR)])
        node.kubectl("create", "namespace", TEAM)
        # One that is installed allows 1,000 mount pods, unless its administrator says more.
        quota = yaml.safe_dump({"spec": {"hard": {"pods": "100000"}}})
        node.kubectl("patch", "resourcequota", "fuse-mounts", f"--namespace={MOUNTS}", f"--patch={quota}")
        with controllers.running():
            try:
                return node.in_network(lambda: asyncio.run(_measured(extent, node, controllers.pids)))
            except AssertionError as error:
                raise AssertionError(f"{error}\n{controllers.said()}") from error


async def _measured(extent: Extent, node: ClusterNode, pids: Sequence[int]) -> Measured:
    result = Measured(extent)
    async with Api(node.root) as api:
        simulation = Simulation(api, extent)
        await simulation.prepare()
        result.empty = used(pids).resident
        begin, before, written = time.monotonic(), used(pids), await simulation.writes()
        await simulation.come()
        after = used(pids)
        result.seconds_come, result.cpu_come = time.monotonic() - begin, after.cpu - before.cpu
        result.latencies = [simulation.created[place] - since for place, since in simulation.wanted.items()]
        result.writes_come = await simulation.writes() - written
        result.pod_bytes = len(await api.text(f"/api/v1/namespaces/{TEAM}/pods?limit=100")) // 100
        await asyncio.sleep(extent.idle)
        idle = used(pids)
        result.cpu_idle = idle.cpu - after.cpu
        await _ask(api, result)
        asked = used(pids)
        result.cpu_admissions, result.resident, result.peak = asked.cpu - idle.cpu, asked.resident, asked.peak
        written = await simulation.writes()
        result.cleaned = await simulation.go()
        result.cpu_go = used(pids).cpu - asked.cpu
        result.writes_go = await simulation.writes() - written
        assert not simulation.failures, simulation.failures
    return result


async def _ask(api: Api, result: Measured) -> None:
    """Have pods admitted, at a steady rate."""
    path = f"/api/v1/namespaces/{TEAM}/pods?dryRun=All"
    asking = pod(inline(template=_SIDECAR))
    before = await asyncio.to_thread(_answered)

    async def admission() -> None:
        begin = time.monotonic()
        answer = await api.ask("POST", path, asking)
        result.admission_latencies.append(time.monotonic() - begin)
        result.failed += not (answer.good and answer.body["spec"].get("initContainers"))

    begin, tasks = time.monotonic(), []
    for number in range(int(RATE * result.extent.asking)):
        await asyncio.sleep(begin + number / RATE - time.monotonic())
        tasks.append(asyncio.create_task(admission()))
    await asyncio.gather(*tasks)
    after = await asyncio.to_thread(_answered)
    result.admissions, result.within = after[0] - before[0], after[1] - before[1]


def _answered() -> tuple[int, int]:
    """Return how many admissions the controllers have answered, and how many of them within `WITHIN`."""
    texts = [exposition(number) for number in range(2)]
    name = "fusermount3_controller_admission_seconds"
    counts = (rf"^{name}_count (\S+)$", rf'^{name}_bucket{{le="{WITHIN}"}} (\S+)$')
    total, within = (sum(int(float(re.findall(each, text, re.M)[0])) for text in texts) for each in counts)
    return total, within


def used(pids: Sequence[int]) -> Used:
    processes = [psutil.Process(pid) for pid in pids]
    times = [each.cpu_times() for each in processes]
    peaks = [re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0] for pid in pids]
    return Used(
        cpu=sum(each.user + each.system for each in times),
        resident=max(each.memory_info().rss for each in processes),
        peak=1024 * max(map(int, peaks)),
    )
