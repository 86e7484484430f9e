"""What Prometheus can ask of the controller."""

from collections.abc import Callable, Mapping
from functools import partial

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from fusermount3_controller.admission import RESULTS
from fusermount3_controller.served_volumes import Kind

#: Results of requests that got no answer: the API server could not be asked, or the request was none.
FAILED, MALFORMED = "failed", "malformed"

_PREFIX = "fusermount3_controller"
#: Seconds. An answer from the cache takes some milliseconds; the API server waits for five seconds at most.
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


#: Seconds. A mount pod is scheduled, its image may have to be pulled, and its program mounts.
_START_BUCKETS = (1, 2, 3, 5, 10, 20, 30, 60, 120, 300)


class Metrics:
    """The metrics, and the text in which Prometheus reads them."""

    CONTENT_TYPE = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            f"{_PREFIX}_admissions",
            "Pods and templates about which the API server has asked.",
            ["result"],
            registry=self._registry,
        )
        for result in (*RESULTS, FAILED, MALFORMED):
            self._requests.labels(result)
        self._seconds = Histogram(
            f"{_PREFIX}_admission_seconds",
            "Time from the API server's question to the answer.",
            buckets=_BUCKETS,
            registry=self._registry,
        )

        self._mount_pods = Gauge(
            f"{_PREFIX}_mount_pods", "Pods that serve shared volumes.", ["template", "phase"], registry=self._registry
        )
        self._waiting = Gauge(
            f"{_PREFIX}_workloads_waiting",
            "Pods with shared volumes on a node whose containers have not begun.",
            registry=self._registry,
        )
        #: What the exposition counts of each node.
        self._of_nodes: dict[str, tuple[Mapping[tuple[str, str], int], int]] = {}
        self._starts = Histogram(
            f"{_PREFIX}_mount_pod_start_seconds",
            "Time from the creation of a mount pod until it served, of those that this process has created.",
            buckets=_START_BUCKETS,
            registry=self._registry,
        )
        self._looks = Histogram(
            f"{_PREFIX}_reconcile_seconds",
            "Time in which it was decided which mount pods a node must have, and the API server was asked for them.",
            buckets=_BUCKETS,
            registry=self._registry,
        )

        self._pod_volumes = Gauge(
            f"{_PREFIX}_pod_volumes",
            "Volumes that were created for claims.",
            ["template", "phase"],
            registry=self._registry,
        )
        self._runs = Counter(
            f"{_PREFIX}_pod_runs",
            "Pods that have run for such a volume, and of which this process has written the result.",
            ["stage", "result"],
            registry=self._registry,
        )

    def show_mount_pods(self, node: str, numbers: Mapping[tuple[str, str], int], waiting: int) -> None:
        """Have the exposition count a node's mount pods, by template and phase, and the pods that wait for them."""
        before, waited = self._of_nodes.pop(node, ({}, 0))
        for labels in before.keys() | numbers.keys():
            self._mount_pods.labels(*labels).inc(numbers.get(labels, 0) - before.get(labels, 0))
        self._waiting.inc(waiting - waited)
        if numbers or waiting:
            self._of_nodes[node] = numbers, waiting

    def forget_mount_pods(self) -> None:
        """Have the exposition count no mount pods, nor pods that wait: another process does."""
        self._of_nodes.clear()
        self._mount_pods.clear()
        self._waiting.set(0)

    def show_pod_volumes(self, numbers: Mapping[tuple[str, str], int]) -> None:
        """Have the exposition tell of the PodVolumes, by template and phase."""
        self._pod_volumes.clear()
        for labels, number in numbers.items():
            self._pod_volumes.labels(*labels).set(number)

    def count_run(self, stage: str, *, has_succeeded: bool) -> None:
        """Count a pod of a stage that has ended."""
        self._runs.labels(stage, "succeeded" if has_succeeded else "failed").inc()

    def count_start(self, seconds: float) -> None:
        """Count a mount pod that serves."""
        self._starts.observe(seconds)

    def show_look(self, seconds: float) -> None:
        """Count a look at the cluster."""
        self._looks.observe(seconds)

    def count(self, result: str, seconds: float) -> None:
        """Count one request."""
        self._requests.labels(result).inc()
        self._seconds.observe(seconds)

    def show_cache(self, sizes: Callable[[], Mapping[Kind, int]], age: Callable[[], float]) -> None:
        """Have the exposition tell of the cache."""
        objects = Gauge(
            f"{_PREFIX}_cached_objects", "Objects of the cluster that are known.", ["kind"], registry=self._registry
        )
        for kind in Kind:
            objects.labels(kind).set_function(partial(_size, sizes, kind))
        oldest = Gauge(
            f"{_PREFIX}_resync_age_seconds",
            "Time since all objects of a kind were listed, of the kind for which that is longest ago.",
            registry=self._registry,
        )
        oldest.set_function(age)

    def show_leader(self, is_leader: Callable[[], bool]) -> None:
        """Have the exposition tell whether this process looks after pods."""
        gauge = Gauge(
            f"{_PREFIX}_leader",
            "1, if this process holds the Lease and looks after mount pods and volumes, else 0.",
            registry=self._registry,
        )
        gauge.set_function(is_leader)

    def show_certificate(self, expiry: Callable[[], float]) -> None:
        """Have the exposition tell when the serving certificate expires."""
        gauge = Gauge(
            f"{_PREFIX}_certificate_expiry_timestamp_seconds",
            "When the webhook's certificate expires.",
            registry=self._registry,
        )
        gauge.set_function(expiry)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)


def _size(sizes: Callable[[], Mapping[Kind, int]], kind: Kind) -> float:
    return sizes().get(kind, 0)
