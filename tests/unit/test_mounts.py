"""What is read of mountinfo, with a table that the test writes as the kernel would."""

from __future__ import annotations

import pytest

from broker import mounts

#: A caller's mountpoint may be named so: the kernel escapes blanks, tabs, newlines and backslashes, and nothing else.
PLACE = b"/mnt\r36 35"
TABLE = b"""
35 1 0:35 / / rw - ext4 /dev/sda rw
36 35 0:36 / /mnt\r36\\04035 rw,nosuid,nodev - fuse.x x rw,user_id=1000,group_id=100
37 36 0:37 / /mnt\r36\\04035 rw,nosuid,nodev - tmpfs \r36 rw
"""


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "_mountinfo", lambda: TABLE)


def test_a_name_with_a_carriage_return_is_in_one_line() -> None:
    assert mounts._is_covered(36)
    assert not mounts._is_covered(35)
    assert not mounts._is_covered(37)
    assert mounts._parent_of(37) == 36
    assert mounts.fuse_of(36) == mounts.Fuse(1000, 100, allow_other=False)


def test_what_is_dead_is_found_at_a_name_with_a_carriage_return(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[tuple[int, bytes]] = []

    def look_at(device: int, place: bytes, _locks: int, _seconds: int) -> bool:
        looked_at.append((device, place))
        return True

    monkeypatch.setattr(mounts, "_unmount_if_dead", look_at)
    assert mounts.unmount_dead(device=36, locks=-1, seconds=1) == 1
    assert looked_at == [(36, PLACE)]
