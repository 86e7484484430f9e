"""What the tests of CSI share: programs and files that the Go module proxy has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.callers.build import NotReachable
from tests.callers.conftest import not_run
from tests.csi import build

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def csi_sanity() -> Path:
    """The executable; if it can't be downloaded, the test is not run, which in CI is a failure."""
    try:
        return build.csi_sanity()
    except NotReachable as error:
        not_run(str(error))
        raise


@pytest.fixture(scope="session")
def official_protos(csi_sanity: Path) -> dict[str, Path]:
    """csi.proto by the version of CSI."""
    assert csi_sanity.exists()
    return {version: build.official_proto(version) for version in build.SPECIFICATIONS}
