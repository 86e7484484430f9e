"""What the kernel of this machine has, as the broker finds it: for tests of what the broker does with it or without."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import pytest

from fusermount3_broker.kernel import features
from fusermount3_broker.mounter.kept_descriptors import detached

if TYPE_CHECKING:
    from collections.abc import Iterator


def kernel_has(name: str) -> bool:
    """Return whether the kernel has a feature of `features.FEATURES`. Raises StopIteration if there is none."""
    return next(feature for feature in features.FEATURES if feature.name == name).exists()


def needs_kernel(name: str) -> pytest.MarkDecorator:
    """Mark a test of what can't be done without that feature. The kernel of CI has all of them."""
    return pytest.mark.skipif(not kernel_has(name), reason=f"{features.running()} lacks {name}")


@contextlib.contextmanager
def keeping_fusectl() -> Iterator[None]:
    """Use fusectl while the block runs, as any host does that has it mounted."""
    mount = detached(b"fusectl")
    try:
        yield
    finally:
        os.close(mount)
