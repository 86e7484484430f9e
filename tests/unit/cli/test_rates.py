"""Quantiles and differences of histograms, as Prometheus computes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusermount3_broker.cli.rates import Buckets, is_same_broker, quantile, since

BUCKETS: Buckets = [(0.001, 0), (0.002, 10), (0.004, 30), (None, 40)]


@pytest.mark.parametrize(
    ("part", "expected"),
    [(0.0, 0.001), (0.125, 0.0015), (0.25, 0.002), (0.5, 0.003), (0.75, 0.004), (0.9, 0.004), (1.0, 0.004)],
)
def test_a_quantile_lies_evenly_in_its_bucket(part: float, expected: float) -> None:
    assert quantile(BUCKETS, part) == pytest.approx(expected)


@pytest.mark.parametrize("buckets", [[], [(0.001, 0), (None, 0)]])
def test_there_is_no_quantile_of_nothing(buckets: Buckets) -> None:
    assert quantile(buckets, 0.5) is None


BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.1)


def histogram(seconds: list[float]) -> Buckets:
    counts = [sum(each <= bound for each in seconds) for bound in BOUNDS]
    return [*zip(BOUNDS, counts, strict=True), (None, len(seconds))]


@given(st.lists(st.floats(0, 0.1), min_size=1), st.floats(0.01, 1))
def test_a_quantile_is_in_the_bucket_of_the_true_one(seconds: list[float], part: float) -> None:
    found = quantile(histogram(seconds), part)
    assert found is not None
    true = sorted(seconds)[max(0, -int(-part * len(seconds) // 1) - 1)]
    upper = min(bound for bound in BOUNDS if true <= bound)
    lower = max((bound for bound in BOUNDS if bound < upper), default=0.0)
    assert lower <= found <= upper * 1.000001


@given(st.lists(st.floats(0, 1)), st.lists(st.floats(0, 1)))
def test_the_difference_of_two_answers_is_what_came_between(earlier: list[float], later: list[float]) -> None:
    assert since(histogram(earlier + later), histogram(earlier)) == histogram(later)


def test_without_an_earlier_answer_everything_came_since() -> None:
    assert since(BUCKETS, None) == BUCKETS


def test_a_front_that_was_started_again_counts_from_nothing() -> None:
    def status(pid: int, uptime: int) -> dict[str, object]:
        return {"front": {"pid": pid}, "uptime_seconds": uptime}

    assert is_same_broker(status(1, 5), status(1, 4))
    assert not is_same_broker(status(2, 5), status(1, 4))
    assert not is_same_broker(status(1, 0), status(1, 4))
