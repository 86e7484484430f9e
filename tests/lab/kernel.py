"""What the kernel of this machine lacks, as the broker finds it: for tests of what the broker does without it."""

from __future__ import annotations

import pytest

from fusermount3_broker.kernel import features


def kernel_has(name: str) -> bool:
    """Return whether the kernel has a feature of `features.FEATURES`. Raises StopIteration if there is none."""
    return next(feature for feature in features.FEATURES if feature.name == name).exists()


def needs_kernel(name: str) -> pytest.MarkDecorator:
    """Mark a test of what can't be done without that feature. The kernel of CI has all of them."""
    return pytest.mark.skipif(not kernel_has(name), reason=f"{features.running()} lacks {name}")
