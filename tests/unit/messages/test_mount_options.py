"""The argument of ``-o``: each row of fusermount3's table, its order, its escapes, and the texts of its refusals."""

from __future__ import annotations

import errno
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusermount3_broker.messages import mount_options
from fusermount3_broker.messages.mount_options import MountOptions
from fusermount3_broker.messages.refusal import Refusal


def parse(text: bytes, *, may_allow_other: bool = False) -> MountOptions:
    return mount_options.parse(text, may_allow_other=may_allow_other, where_allowed=b"/etc/broker.toml", kernel=b"6.18")


def given_options(text: bytes, **keywords: bool) -> dict[str, Any]:
    """Return the options that `text` changes from the defaults."""
    defaults = asdict(MountOptions())
    return {name: value for name, value in asdict(parse(text, **keywords)).items() if value != defaults[name]}


def refusal(text: bytes, **keywords: bool) -> Refusal:
    with pytest.raises(Refusal) as caught:
        parse(text, **keywords)
    return caught.value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", {}),
        (b"fsname=host:/dir", {"fsname": b"host:/dir"}),
        (b"fsname=", {"fsname": b""}),
        (b"subtype=sshfs", {"subtype": b"sshfs"}),
        (b"subtype=a.b", {"subtype": b"a.b"}),
        (b"auto_unmount", {"auto_unmount": True}),
        (b"default_permissions", {"default_permissions": True}),
        (b"max_read=131072", {"max_read": b"131072"}),
        (b"blksize=512", {"block_size": b"512"}),
        (b"rw", {}),
        (b"ro", {"read_only": True}),
        (b"exec", {}),
        (b"noexec", {"noexec": True}),
        (b"async", {}),
        (b"sync", {"sync": True}),
        (b"dirsync", {"dirsync": True}),
        (b"atime", {}),
        (b"noatime", {"noatime": True}),
        (b"diratime", {}),
        (b"nodiratime", {"nodiratime": True}),
        (b"relatime", {}),
        (b"norelatime", {}),
        (b"strictatime", {"strictatime": True}),
        (b"nostrictatime", {}),
        (b"lazytime", {"lazytime": True}),
        (b"nolazytime", {}),
        (b"symfollow", {}),
        (b"nosymfollow", {"nosymfollow": True}),
        (b"nosuid", {}),
        (b"nodev", {}),
        (b"nonempty", {}),
    ],
)
def test_an_option_means_what_mount_8_says(text: bytes, expected: dict[str, Any]) -> None:
    assert given_options(text) == expected


@pytest.mark.parametrize("text", [b"fd=3", b"rootmode=40000", b"user_id=0", b"group_id=0", b"user_id=", b"fd=x"])
def test_what_is_the_helpers_to_say_is_dropped_without_a_word(text: bytes) -> None:
    assert given_options(text) == {}
    assert given_options(text + b",ro") == {"read_only": True}


@pytest.mark.parametrize("text", [b"fd", b"rootmode", b"user_id", b"group_id", b"max_read", b"blksize", b"fsname"])
def test_an_option_that_needs_a_value_is_unknown_without_one(text: bytes) -> None:
    assert refusal(text).text == b"unknown option '%b'" % text


@pytest.mark.parametrize(
    "text", [b"x-a", b"x-systemd.automount", b"x-a=b", b"x-", b"x-a,x-b", b"x-a,ro,x-b", b"ro,x-a"]
)
def test_options_for_user_space_are_accepted_and_dropped(text: bytes) -> None:
    assert given_options(text) == ({"read_only": True} if b"ro" in text.split(b",") else {})


@pytest.mark.parametrize("text", [b",ro", b"ro,", b",ro,"])
def test_a_comma_at_either_end_is_tolerated(text: bytes) -> None:
    assert given_options(text) == {"read_only": True}


def test_two_commas_hold_an_unknown_option_without_a_name() -> None:
    assert refusal(b"ro,,rw").text == b"unknown option ''"


@pytest.mark.parametrize("item", [b"suid", b"dev"])
@pytest.mark.parametrize("may_allow_other", [False, True])
def test_an_unsafe_option_is_ignored_with_a_warning(item: bytes, may_allow_other: bool) -> None:
    expected = {"read_only": True, "warnings": (b"unsafe option %b ignored" % item,)}
    assert given_options(item + b",ro", may_allow_other=may_allow_other) == expected


def test_a_deprecated_option_is_ignored_with_a_note() -> None:
    note = b"note: 'large_read' mount option is deprecated for 6.18 kernels"
    assert given_options(b"large_read") == {"warnings": (note,)}


def test_warnings_come_in_the_order_of_the_options() -> None:
    assert parse(b"dev,large_read,suid").warnings == (
        b"unsafe option dev ignored",
        b"note: 'large_read' mount option is deprecated for 6.18 kernels",
        b"unsafe option suid ignored",
    )


def test_everybody_may_allow_other_only_where_the_configuration_says_so() -> None:
    refused = refusal(b"allow_other")
    assert refused.errno == errno.EPERM
    assert refused.text == b"option allow_other only allowed if 'user_allow_other' is set in /etc/broker.toml"
    assert given_options(b"allow_other", may_allow_other=True) == {"allow_other": True}
    assert given_options(b"allow_other,allow_other", may_allow_other=True) == {"allow_other": True}


def test_allow_root_is_the_librarys_and_never_the_helpers() -> None:
    assert refusal(b"allow_root").text.startswith(b"option allow_root only allowed if 'user_allow_other' is set in ")
    assert refusal(b"allow_root", may_allow_other=True).text == b"unknown option 'allow_root'"


def test_a_block_device_is_privileged() -> None:
    refused = refusal(b"ro,blkdev")
    assert (refused.errno, refused.text) == (errno.EPERM, b"option blkdev is privileged")


@pytest.mark.parametrize(
    "item",
    [
        *(b"user=me", b"context=x", b"umask=022", b"uid=0", b"ro\\", b"RO", b" ro", b"ro ", b"ro=1", b"allow_other=1"),
        *(b"nosuid=", b"suid=", b"x", b"xx-a", b"fsnam=x", b"fsnamex=y", b"\xff", b"=", b"=x", b"bind", b"remount"),
        *(b"move", b"mand", b"acl", b"shared", b"nonempty=1", b"blkdev=", b"\n", b"ro\0", b"auto_unmount=1"),
    ],
)
def test_anything_else_is_refused_by_name(item: bytes) -> None:
    refused = refusal(b"noexec," + item, may_allow_other=True)
    assert (refused.errno, refused.text) == (errno.EINVAL, b"unknown option '%b'" % item)


def test_the_first_mistake_is_the_one_reported_with_the_warnings_before_it() -> None:
    refused = refusal(b"suid,one,dev,two")
    assert refused.text == b"unknown option 'one'"
    assert refused.warnings == (b"unsafe option suid ignored",)


@pytest.mark.parametrize(
    ("first", "last", "attribute"),
    [
        (b"ro", b"rw", "read_only"),
        (b"noexec", b"exec", "noexec"),
        (b"sync", b"async", "sync"),
        (b"noatime", b"atime", "noatime"),
        (b"nodiratime", b"diratime", "nodiratime"),
        (b"strictatime", b"nostrictatime", "strictatime"),
        (b"lazytime", b"nolazytime", "lazytime"),
        (b"nosymfollow", b"symfollow", "nosymfollow"),
    ],
)
def test_a_later_option_overrides_an_earlier_one(first: bytes, last: bytes, attribute: str) -> None:
    assert getattr(parse(first + b"," + last), attribute) is False
    assert getattr(parse(last + b"," + first), attribute) is True


@pytest.mark.parametrize("name", [b"fsname", b"subtype", b"max_read"])
def test_of_two_values_the_last_wins(name: bytes) -> None:
    assert list(given_options(name + b"=1," + name + b"=2").values()) == [b"2"]


@pytest.mark.parametrize("name", [b"fsname", b"subtype"])
@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (rb"a\,b", b"a,b"),
        (rb"a\\b", rb"a\b"),
        (rb"a\\\,b", rb"a\,b"),
        (rb"a\bc", b"abc"),
        (b"a\\", b"a\\"),
        (rb"\,", b","),
        (b"a\\\nb", b"a\nb"),
        (rb"a=b\=c", b"a=b=c"),
    ],
)
def test_a_backslash_protects_the_next_character_of_a_name(name: bytes, written: bytes, meant: bytes) -> None:
    assert given_options(name + b"=" + written) == {name.decode(): meant}


def test_a_backslash_protects_nothing_elsewhere() -> None:
    assert refusal(rb"max_read=1\,2").text == b"unknown option '2'"
    assert refusal(rb"ro\,rw").text == b"unknown option 'ro\\'"


def test_options_for_user_space_are_split_off_before_escapes_are_seen() -> None:
    assert given_options(rb"fsname=a\,x-b,ro") == {"fsname": b"a,ro"}


def escape(value: bytes) -> bytes:
    """Escape a value as libfuse does (lib/mount.c, fuse_opt_add_opt_escaped)."""
    return value.replace(b"\\", b"\\\\").replace(b",", b"\\,")


@given(st.lists(st.sampled_from([b"\\", b",", b"=", b"a", b" ", b"\n", b"\xff", b"fsname="]), max_size=12))
def test_a_name_that_libfuse_escaped_is_read_as_it_was(parts: list[bytes]) -> None:
    value = b"".join(parts)
    assert parse(b"fsname=" + escape(value)).fsname == value
    assert parse(b"ro,subtype=" + escape(value) + b",noexec").subtype == value


items = st.sampled_from(
    [
        *mount_options._FLAGS,
        *mount_options._IGNORED,
        *mount_options._UNSAFE,
        *(name + b"=" for name in (*mount_options._DROPPED, *mount_options._ESCAPED, *mount_options._VALUES)),
        *(b"allow_other", b"allow_root", b"blkdev", b"large_read", b"x-", b"\\", b",", b"=", b""),
    ]
) | st.binary(max_size=5)


@given(st.lists(items, max_size=12).map(b",".join) | st.lists(items, max_size=12).map(b"".join), st.booleans())
def test_any_text_is_options_or_a_refusal(text: bytes, may_allow_other: bool) -> None:
    with suppress(Refusal):
        wanted = parse(text, may_allow_other=may_allow_other)
        assert may_allow_other or not wanted.allow_other
