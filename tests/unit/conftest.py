"""Settings of all unit tests: none fails because a busy machine is slow, or because of what other tests left behind."""

from __future__ import annotations

import gc

import pytest
from hypothesis import settings

settings.register_profile("unit", deadline=None, database=None, max_examples=200)
settings.load_profile("unit")


@pytest.fixture(autouse=True, scope="module")
def _nothing_of_other_modules_is_collected() -> None:
    """Close what other modules left open, since many tests count descriptors; exempt what they keep from collection.

    Without the exemption, each `open_descriptors` would take a tenth of a second.
    """
    gc.collect()
    gc.freeze()
