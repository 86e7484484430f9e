"""Rates and latencies of a running broker, from one answer of the control socket or from the difference of two. Pure
functions.

A histogram is as in the answer to "status": its `buckets` are pairs of an upper bound in seconds, null for the last,
and the number of requests up to it, cumulative as in Prometheus.
"""

from collections.abc import Mapping
from typing import Any

Buckets = list[tuple[float | None, int]]


def quantile(buckets: Buckets, part: float) -> float | None:
    """Return the latency in seconds which that part of the requests, between 0 and 1, did not exceed.

    None if there was no request. Like PromQL's histogram_quantile(), assume an even distribution within each bucket,
    and return the highest bound for requests beyond it.
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
    """Return the histogram of the requests between two answers; `before` is None if the first had no histogram."""
    if before is None:
        return now
    return [(upper, count - earlier) for (upper, count), (_, earlier) in zip(now, before, strict=True)]


def is_same_broker(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Test whether both answers are from one front: a new front counts from zero."""
    return bool(now["front"]["pid"] == before["front"]["pid"] and now["uptime_seconds"] >= before["uptime_seconds"])
