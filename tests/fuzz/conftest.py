"""Fixtures: the engine that runs in the background; and the order of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.background import awaits_the_engine, directory_of


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that wait for the engine after all others."""
    items.sort(key=awaits_the_engine)


@pytest.fixture
def fuzzing_in_background(request: pytest.FixtureRequest) -> Path:
    """The directory where the engine tells its result, which has fuzzed all targets since the session's start."""
    return directory_of(request.config)
