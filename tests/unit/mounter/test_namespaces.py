"""Parsing /proc/PID/status, in a directory that stands in for /proc."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fusermount3_broker.mounter import namespaces


@pytest.mark.parametrize("name", [b"sh", b"a\rCapEff:\t3f", b"a\rCapBnd", b"CapEff:\t3f"])
def test_the_capabilities_of_a_process_are_not_read_in_its_name(tmp_path: Path, name: bytes) -> None:
    """The kernel escapes newlines in the name, but not carriage returns."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "status").write_bytes(b"Name:\t%b\nUmask:\t0022\nCapBnd:\t00000000000000ff\nCapEff:\t0\n" % name)
    proc = os.open(tmp_path, os.O_PATH)
    try:
        assert namespaces.capabilities_of(7, proc) == (0xFF, 0)
        assert namespaces.capabilities_of(8, proc) == (0, 0)
    finally:
        os.close(proc)
