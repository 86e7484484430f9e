"""What the unit tests share: no test is failed for the time it takes on a busy machine."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("unit", deadline=None, database=None, max_examples=200)
settings.load_profile("unit")
