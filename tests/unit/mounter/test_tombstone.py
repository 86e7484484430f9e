"""A tombstone that can't be made is an error, which is tried again, and not a volume that is gone."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusermount3_broker.mounter import tombstone


def test_a_missing_device_does_not_pass_for_a_missing_volume(tmp_path: Path) -> None:
    directory = os.open(tmp_path, os.O_PATH)
    opened: Any = SimpleNamespace(devices=directory)
    try:
        with pytest.raises(OSError) as caught:
            tombstone.create(opened)
    finally:
        os.close(directory)
    assert caught.value.errno == errno.ENODEV
    assert not isinstance(caught.value, FileNotFoundError)
