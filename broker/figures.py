"""What an administrator wants to know from the figures of a running broker: rates and latencies, from one answer of the
control socket or from the difference of two. Pure functions.

A histogram is as in the answer to "status": its `buckets` are pairs of an upper bound in seconds, null for the last,
and the number of requests up to it, as Prometheus counts them.
"""

from collections.abc import Mapping
from typing import Any

Buckets = list[tuple[float | None, int]]


def quantile(buckets: Buckets, part: float) -> float | None:
    """Return the latency in seconds which that part of the requests, between 0 and 1, did not exceed.

    None if there was none. As PromQL's histogram_quantile() it takes them to lie evenly in their bucket, and says the
    highest bound that there is for those beyond it.
    """
    total = buckets[-1][1] if buckets else 0
    if not total:
        return None
    rank = part * total
    lower, below = 0.0, 0
    for upper, count in buckets:
        if upper is None:
            break
        if count >= rank and count > below:
            return lower + (upper - lower) * max(0.0, rank - below) / (count - below)
        lower, below = upper, count
    return lower


def since(now: Buckets, before: Buckets | None) -> Buckets:
    """Return the histogram of what came between two answers; `before` is None if there was nothing by then."""
    if before is None:
        return now
    return [(upper, count - earlier) for (upper, count), (_, earlier) in zip(now, before, strict=True)]


def is_same_broker(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether both answers are from one front: another one has begun to count at nothing."""
    return bool(now["front"]["pid"] == before["front"]["pid"] and now["uptime_seconds"] >= before["uptime_seconds"])
