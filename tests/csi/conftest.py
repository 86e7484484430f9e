"""Fixtures for the tests of CSI: programs and files from the Go module proxy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.callers.conftest import or_not_run
from tests.csi import build

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def csi_sanity() -> Path:
    """The csi-sanity executable; if the download fails, the test is not run, which in CI is a failure."""
    with or_not_run():
        return build.csi_sanity()


@pytest.fixture(scope="session")
def official_protos(csi_sanity: Path) -> dict[str, Path]:
    """The official csi.proto files, by version of CSI."""
    assert csi_sanity.exists()
    return {version: build.official_proto(version) for version in build.SPECIFICATIONS}
