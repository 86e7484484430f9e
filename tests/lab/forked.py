"""Processes that a test forks to act as a program, a caller or an attacker."""

from __future__ import annotations

import contextlib
import os
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def ending_afterwards() -> Iterator[None]:
    """End the process after the body instead of returning to the test: with status 0, or 1 if the body raised.

    The exception is written to the standard error, which pytest shows if the test fails.
    """
    status = 1
    try:
        yield
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
