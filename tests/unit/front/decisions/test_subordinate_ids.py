"""The owners of subordinate uids: from /etc/subuid, some of whose lines assign nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusermount3_broker.front.decisions import subordinate_ids

PASSWD = b"root:x:0:0::/root:/bin/sh\nann:x:1000:1000::/home/ann:/bin/sh\nbob:x:1001:1001:::\nbad:x:y:0:::\n"
SUBUID = b"ann:100000:65536\nbob:165536:65536\nann:400000:10\n1002:231072:65536\nldap:300000:10\nroot:500000:10\n"


@pytest.mark.parametrize(
    ("uid", "owner"),
    [
        (0, b""),
        (1000, b""),
        (99_999, b""),
        (100_000, b"uid 1000"),
        (165_535, b"uid 1000"),
        (165_536, b"uid 1001"),
        (231_071, b"uid 1001"),
        (231_072, b"uid 1002"),
        (300_009, b"subuid ldap"),
        (300_010, b""),
        (400_009, b"uid 1000"),
        (500_000, b"subuid root"),
        (2**32 - 1, b""),
    ],
)
def test_a_uid_is_that_users_to_whom_it_was_given(uid: int, owner: bytes) -> None:
    assert subordinate_ids.parse(SUBUID, PASSWD).owner(uid) == owner


def test_without_files_no_uid_is_subordinate() -> None:
    nobodys = subordinate_ids.parse(b"", b"")
    assert [nobodys.owner(uid) for uid in (0, 1000, 100_000)] == [b""] * 3


@pytest.mark.parametrize(
    "line",
    [b"ann", b"ann:1", b"ann:1:2:3", b":1:2", b"ann:1:0", b"ann:x:1", b"ann:-1:5", b"ann:1:99999999999", b"\xff:a:b"],
)
def test_a_line_that_gives_nothing_is_passed_over(line: bytes) -> None:
    read = subordinate_ids.parse(line + b"\nbob:165536:65536", PASSWD)
    assert [each.owner for each in read.ranges] == [b"uid 1001"]


def test_where_ranges_overlap_every_uid_has_one_owner() -> None:
    read = subordinate_ids.parse(b"ann:100:100\nbob:150:100\nann:160:10\n", PASSWD)
    assert [read.owner(uid) for uid in (99, 100, 199, 200, 249, 250)] == [
        *(b"", b"uid 1000", b"uid 1000", b"uid 1001", b"uid 1001", b"")
    ]


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_any_bytes_are_read(subuid: bytes, passwd: bytes) -> None:
    read = subordinate_ids.parse(subuid + b"\nann:100000:65536", passwd + b"\n" + PASSWD)
    firsts = [each.first for each in read.ranges]
    assert firsts == sorted(set(firsts))
    assert all(isinstance(read.owner(uid), bytes) for uid in (0, 5, 100_005, 2**32 - 1))
