"""Test that the genuine fusermount3 and the proxy behave the same, apart from the table of deviations."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.differential import grammar
from tests.differential.corpus import CORPUS
from tests.differential.deviations import DEVIATIONS, Deviation, disagreement
from tests.differential.model import Case, Observation
from tests.differential.sides import GENUINE, TARGET, Genuine, Pair
from tests.e2e.conftest import fuse_mounts_of_host

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.e2e

DOCUMENT = Path(__file__).parents[2] / "docs/compatibility.md"

#: Every run generates the same examples, so that a failure in CI is the same failure everywhere. There is no shrinking:
#: the examples are small already, and shrinking one that hangs would take hours.
generated = settings(
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture],
)


def check(sides: Pair, case: Case) -> None:
    """Run the case on both sides, and fail with the differences, if any."""
    left = disagreement(case, *sides.observe(case))
    assert left is None, f"{sides.genuine}: {case}\n{difference(*left)}"


def difference(genuine: Observation, proxy: Observation) -> str:
    lines = []
    for name in (field.name for field in dataclasses.fields(Observation)):
        if getattr(genuine, name) != getattr(proxy, name):
            lines.append(f"{name}\n  genuine {getattr(genuine, name)!r}\n  proxy   {getattr(proxy, name)!r}")
    return "\n".join(lines)


CASES = [
    pytest.param(genuine, case, id=f"{genuine}-{name}")
    for genuine in GENUINE
    for name, case in CORPUS.items()
    if case.since <= genuine.release
]


@pytest.mark.parametrize(("genuine", "case"), CASES)
def test_the_proxy_does_what_the_genuine_helper_does(
    genuine: Genuine, case: Case, pair_of: Callable[[Genuine], Pair]
) -> None:
    check(pair_of(genuine), case)


@given(case=grammar.mounts(TARGET.release))
@settings(generated, max_examples=1200)
def test_any_options_mean_the_same(target: Pair, case: Case) -> None:
    check(target, case)


@given(case=grammar.invocations())
@settings(generated, max_examples=700)
def test_any_arguments_mean_the_same(target: Pair, case: Case) -> None:
    check(target, case)


@given(case=grammar.places())
@settings(generated, max_examples=600)
def test_any_path_means_the_same(target: Pair, case: Case) -> None:
    check(target, case)


@pytest.mark.parametrize("genuine", GENUINE[:-1], ids=str)
@given(data=st.data())
@settings(generated, max_examples=200)
def test_options_that_older_releases_know_mean_the_same(
    genuine: Genuine, pair_of: Callable[[Genuine], Pair], data: st.DataObject
) -> None:
    check(pair_of(genuine), data.draw(grammar.mounts(genuine.release)))


@pytest.mark.parametrize("deviation", DEVIATIONS, ids=lambda deviation: deviation.name)
def test_a_deviation_still_occurs(deviation: Deviation, pair_of: Callable[[Genuine], Pair]) -> None:
    case = CORPUS[deviation.example]
    (genuine,) = [each for each in GENUINE if each.release == deviation.release]
    observed = pair_of(genuine).observe(case)
    assert disagreement(case, *observed) is None
    assert disagreement(case, *observed, without=deviation.name) is not None, "it does what the genuine one does now"


def test_the_document_names_the_same_deviations() -> None:
    section = DOCUMENT.read_text().partition("## Where it deviates")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `?(.+?)`? \|", section, re.MULTILINE)
    assert named[2:] == [deviation.name for deviation in DEVIATIONS]


def test_nothing_is_left_on_the_host(target: Pair) -> None:
    before = fuse_mounts_of_host()
    check(target, CORPUS["comm socket: a stream socket"])
    assert fuse_mounts_of_host() == before


@pytest.fixture(scope="module")
def target(pair_of: Callable[[Genuine], Pair]) -> Pair:
    """The release whose behaviour the proxy imitates."""
    return pair_of(TARGET)
