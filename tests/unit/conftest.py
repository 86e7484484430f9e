"""What the unit tests share: none is failed for the time it takes on a busy machine, or for what others have left."""

from __future__ import annotations

import gc

import pytest
from hypothesis import settings

settings.register_profile("unit", deadline=None, database=None, max_examples=200)
settings.load_profile("unit")


@pytest.fixture(autouse=True, scope="module")
def _nothing_of_other_modules_is_collected() -> None:
    """Many a test counts descriptors: so what others left is closed before, and what they keep is not searched again.

    Without the second each `open_descriptors` would take a tenth of a second.
    """
    gc.collect()
    gc.freeze()
