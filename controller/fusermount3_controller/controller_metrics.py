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
    return sizes()[kind]
