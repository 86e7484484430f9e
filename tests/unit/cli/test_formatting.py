"""Formatting of latencies, sizes and durations for people."""

from __future__ import annotations

import pytest

from fusermount3_broker.cli.formatting import age, duration, latency, mebibytes


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.0, "0.00 ms"), (0.001234, "1.23 ms"), (0.0123, "12.3 ms"), (0.123, "123 ms"), (5.0, "5000 ms")],
)
def test_a_latency(seconds: float | None, text: str) -> None:
    assert latency(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "00:00:00"), (59, "00:00:59"), (3723, "01:02:03"), (90061, "1 d 01:01:01")]
)
def test_a_duration(seconds: int, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((-5, "0s"), (0.9, "0s"), (59, "59s"), (60, "1m"), (61, "1m1s"), (599, "9m59s"), (659, "10m"), (3599, "59m")),
        *((3600, "1h"), (3900, "1h5m"), (86399, "23h"), (86400, "1d"), (90061, "1d1h"), (864000 * 2, "20d")),
    ],
)
def test_an_age(seconds: float, text: str) -> None:
    assert age(seconds) == text


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e300])
def test_what_is_no_age(seconds: float) -> None:
    with pytest.raises((ValueError, OverflowError)):
        age(seconds)


def test_a_size() -> None:
    assert mebibytes(3 * 2**19) == "1.5 MiB"
