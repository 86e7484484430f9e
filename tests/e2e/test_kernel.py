"""The broker says what the running kernel lacks, in the log at its start and in `status`.

`tests/machines` runs this on the kernels of Debian's releases.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import pytest

from fusermount3_broker.kernel import features

if TYPE_CHECKING:
    from tests.e2e.conftest import RunBroker

pytestmark = pytest.mark.e2e


def numbers(release: str) -> tuple[int, ...]:
    """Return major and minor of a kernel's release."""
    return tuple(map(int, re.findall(r"\d+", release)[:2]))


def test_the_log_and_status_name_what_the_kernel_lacks(run_broker: RunBroker) -> None:
    """Neither upstream's kernels nor Debian's have features of newer ones."""
    expected = [each for each in features.FEATURES if numbers(each.since) > numbers(os.uname().release)]
    broker = run_broker()
    assert broker.status()["kernel"] == {
        "release": os.uname().release,
        "lacks": [{"name": each.name, "since": each.since, "otherwise": each.otherwise} for each in expected],
    }
    said = [record["message"] for record in broker.records(f"{features.running()} offers no ")]
    assert said == [
        f"{features.running()} offers no {each.name} (since {each.since}): {each.otherwise}" for each in expected
    ]
