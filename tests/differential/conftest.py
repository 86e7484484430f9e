"""Fixtures: the brokers, started once a session, and a pair of workers for each release of Debian."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.differential.sides import GENUINE, Genuine, Pair, Place, pair, prepared, unpack
from tests.lab.broker import PROXY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="session")
def place() -> Iterator[Place]:
    if not PROXY.exists():
        pytest.fail(f"{PROXY} is missing: run 'make static'")
    with tempfile.TemporaryDirectory() as directory, prepared(Path(directory)) as place:
        yield place


@pytest.fixture(scope="session")
def pair_of(place: Place) -> Iterator[Callable[[Genuine], Pair]]:
    """Return a function that returns the pair for a release, and starts it on the first call."""
    with contextlib.ExitStack() as stack:
        pairs: dict[Genuine, Pair] = {}

        def pair_of(genuine: Genuine) -> Pair:
            if genuine not in pairs:
                unpack(genuine, place.directory)
                pairs[genuine] = stack.enter_context(pair(place, genuine))
            return pairs[genuine]

        yield pair_of


@pytest.fixture(params=GENUINE, ids=str)
def sides(request: pytest.FixtureRequest, pair_of: Callable[[Genuine], Pair]) -> Pair:
    """The workers for the genuine helper of each release and for the proxy."""
    genuine: Genuine = request.param
    return pair_of(genuine)
