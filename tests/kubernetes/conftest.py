"""Fixtures: the executables of helm, kustomize and promtool."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.callers.conftest import or_not_run
from tests.kubernetes import programs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def built(make: Callable[[], Path]) -> Path:
    with or_not_run():
        return make()


@pytest.fixture(scope="session")
def helm() -> Path:
    return built(partial(programs.program, "helm"))


@pytest.fixture(scope="session")
def kustomize() -> Path:
    return built(partial(programs.program, "kustomize"))


@pytest.fixture(scope="session")
def promtool() -> Path:
    return built(programs.promtool)
