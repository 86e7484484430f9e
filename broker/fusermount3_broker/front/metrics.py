"""The broker's metrics, by their Prometheus names.

Every value is read from the front at the moment of a scrape; nothing is counted twice. Label values are the broker's
own words, so this module and the configuration bound the number of series, whatever callers send.
"""

import time
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from fusermount3_broker.front import process_usage
from fusermount3_broker.front.context import Front
from fusermount3_broker.front.mount_states import MOUNT_STATES
from fusermount3_proxy import __version__

PREFIX = "fusermount3_broker_"
#: The results of requests; exported from the start, so that the first one of a kind is seen as an increase. The
#: operation is "request" if it ends before its caller has said intelligibly what it wants; "volume" is a mount on a
#: volume, "device" the offer of a block device.
REQUESTS = (
    ("request", ("refused", "caller went away", "ended")),
    ("mount", ("mounted", "refused", "rolled back", "not rolled back", "caller went away", "ended")),
    ("volume", ("mounted", "refused", "rolled back", "not rolled back", "caller went away", "ended")),
    ("device", ("offered", "refused", "caller went away", "ended")),
    ("unmount", ("unmounted", "refused", "caller went away", "ended")),
    ("reap", ("unmounted",)),
    ("abort", ("aborted",)),
    ("publish", ("published", "unchanged", "refused")),
    ("unpublish", ("unpublished", "nothing there", "refused")),
)
OPENMETRICS = choose_encoder("application/openmetrics-text; version=1.0.0")
PLAIN_TEXT = choose_encoder("")
#: Seconds for which an answer is reused: endless scrapes cost callers nothing.
FRESH = 1.0


def registry_of(front: Front) -> CollectorRegistry:
    """Return a registry of all metrics; the process metrics are those of the process that reads them."""
    registry = CollectorRegistry()
    registry.register(_Collector(front))
    ProcessCollector(registry=registry)
    return registry


class Exposition:
    """All metrics as text."""

    def __init__(self, front: Front) -> None:
        self._registry = registry_of(front)
        self._made_at = 0.0
        self._texts: dict[str, bytes] = {}

    def text(self, accept: str) -> tuple[str, bytes]:
        """Return content type and text, at most `FRESH` seconds old, in the format that an Accept: header asks for.

        The header selects one of two formats; its parameters are not echoed.
        """
        encode, content_type = OPENMETRICS if "application/openmetrics-text" in accept else PLAIN_TEXT
        now = time.monotonic()
        if now - self._made_at > FRESH:
            self._texts.clear()
            self._made_at = now
        if content_type not in self._texts:
            self._texts[content_type] = encode(self._registry)
        return content_type, self._texts[content_type]


class _Collector(Collector):
    """Collects the metrics from the front."""

    def __init__(self, front: Front) -> None:
        self._front = front

    def describe(self) -> Iterable[Metric]:
        """Announce no names: the registry would read the front for them before it serves."""
        return ()

    def collect(self) -> Iterator[Metric]:
        yield _gauge("build_info", "Always 1; the label is the version.", "version", {__version__: 1})
        yield self._requests()
        yield from self._latency()
        yield self._mounts()
        meaning = "Children of the mounter that carry out operations, or hang after those were over."
        yield _gauge("children", meaning, "state", self._front.children())
        yield _counter(
            "limits_hit",
            "Requests that a limit has refused, by its configuration key.",
            "limit",
            self._front.limits_hit,
        )
        restarts = "How often the mounter was found dead and started again."
        yield CounterMetricFamily(f"{PREFIX}mounter_restarts", restarts, value=self._front.mounter.restarts)
        restarts = "How often the CSI plugin was found dead and started again."
        times = self._front.plugin.restarts if self._front.plugin else 0
        yield CounterMetricFamily(f"{PREFIX}plugin_restarts", restarts, value=times)
        failures = {table.name: table.failures for table in self._front.tables}
        yield _counter("table_write_failures", "Failed attempts to write to a table on disk.", "table", failures)
        volumes = "Volumes that kubelet has had published."
        yield GaugeMetricFamily(f"{PREFIX}volumes", volumes, value=len(self._front.volumes or ()))
        borrowers = "Those of them that have the filesystem of a mount pod."
        number = sum(volume.is_borrower for volume in self._front.volumes or ())
        yield GaugeMetricFamily(f"{PREFIX}borrowed_volumes", borrowers, value=number)
        sources = "Those of them that are of a mount pod, and offer their filesystem to others."
        number = sum(volume.share != b"" for volume in self._front.volumes or ())
        yield GaugeMetricFamily(f"{PREFIX}shared_volumes", sources, value=number)
        yield from self._processes()

    def _requests(self) -> Metric:
        family = CounterMetricFamily(
            f"{PREFIX}requests", "Requests, by how they ended.", labels=["operation", "result"]
        )
        counted = {f"{operation} {result}": 0 for operation, results in REQUESTS for result in results}
        for kind, count in (counted | self._front.requests).items():
            operation, _, result = kind.partition(" ")
            family.add_metric([operation, _label(result)], count)
        return family

    def _processes(self) -> Iterator[Metric]:
        found = list(process_usage.of_processes(self._front))
        meaning = "Resident memory size of a process of the broker in bytes."
        yield _gauge(
            "process_resident_memory_bytes", meaning, "process", {each.process: each.resident for each in found}
        )
        meaning = (
            "User and system CPU time spent by a process of the broker in seconds; that of the mounter has that of its "
            "children that have ended."
        )
        yield _counter("process_cpu_seconds", meaning, "process", {each.process: each.seconds for each in found})

    def _latency(self) -> Iterator[Metric]:
        """Yield the histogram, without the times at which its series began: the start time of the process suffices."""
        for family in self._front.latency.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family

    def _mounts(self) -> Metric:
        self._front.registry.reconcile()
        states = dict.fromkeys(MOUNT_STATES, 0) | self._front.mount_states()
        return _gauge("mounts", "Mounts made through the broker, by their state.", "state", states)


def _label(result: str) -> str:
    """Return the result of a request as the value of a label: in one word, as Prometheus' own are."""
    return result.replace(" ", "_")


def _gauge(name: str, meaning: str, label: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, meaning, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _counter(name: str, meaning: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, meaning, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family
