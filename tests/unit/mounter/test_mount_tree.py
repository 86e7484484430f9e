"""Parsing mountinfo, with a table that the test writes as the kernel would."""

from __future__ import annotations

import pytest

from fusermount3_broker.mounter import mount_tree

#: A caller may give its mountpoint this name: the kernel escapes only blanks, tabs, newlines and backslashes.
PLACE = b"/mnt\r36 35"
TABLE = b"""
35 1 0:35 / / rw - ext4 /dev/sda rw
36 35 0:36 / /mnt\r36\\04035 rw,nosuid,nodev - fuse.x x rw,user_id=1000,group_id=100
37 36 0:37 / /mnt\r36\\04035 rw,nosuid,nodev - tmpfs \r36 rw
"""


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mount_tree, "_mountinfo", lambda *_: TABLE)


def test_a_name_with_a_carriage_return_is_in_one_line() -> None:
    assert mount_tree._is_covered(36)
    assert not mount_tree._is_covered(35)
    assert not mount_tree._is_covered(37)
    assert mount_tree._parent_of(37) == 36
    assert mount_tree.fuse_of(36) == mount_tree.Fuse(1000, 100, allow_other=False)


def test_a_name_with_a_carriage_return_is_in_the_table() -> None:
    assert [mount.place for mount in mount_tree.table() if mount.device == 36] == [PLACE]
