"""Fixtures: the executables of helm and kustomize."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.callers.build import NotReachable
from tests.callers.conftest import not_run
from tests.kubernetes import programs

if TYPE_CHECKING:
    from pathlib import Path


def built(name: str) -> Path:
    try:
        return programs.program(name)
    except NotReachable as error:
        not_run(str(error))
        raise


@pytest.fixture(scope="session")
def helm() -> Path:
    return built("helm")


@pytest.fixture(scope="session")
def kustomize() -> Path:
    return built("kustomize")
