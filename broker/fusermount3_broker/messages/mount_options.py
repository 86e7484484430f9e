"""The argument of ``-o``: the grammar of fusermount3 3.18, as a pure function.

Tables map each option to its effect. The order of options matters: later options override earlier ones, and the first
error is the one reported.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from errno import EINVAL, EPERM
from itertools import chain
from typing import Any

from fusermount3_broker.messages.refusal import Refusal


@dataclass(frozen=True, slots=True)
class MountOptions:
    """The requested options, by the names of mount(8). `warnings` are lines for the user."""

    fsname: bytes | None = None
    subtype: bytes | None = None
    allow_other: bool = False
    default_permissions: bool = False
    max_read: bytes | None = None
    block_size: bytes | None = None
    auto_unmount: bool = False
    read_only: bool = False
    sync: bool = False
    dirsync: bool = False
    lazytime: bool = False
    noexec: bool = False
    noatime: bool = False
    nodiratime: bool = False
    strictatime: bool = False
    nosymfollow: bool = False
    warnings: tuple[bytes, ...] = field(default=())


#: The most warnings about one call: they must fit into a reply.
MOST_WARNINGS = 64

#: Options that set or clear one flag.
_FLAGS: dict[bytes, tuple[str, bool]] = {
    b"rw": ("read_only", False),
    b"ro": ("read_only", True),
    b"exec": ("noexec", False),
    b"noexec": ("noexec", True),
    b"async": ("sync", False),
    b"sync": ("sync", True),
    b"dirsync": ("dirsync", True),
    b"atime": ("noatime", False),
    b"noatime": ("noatime", True),
    b"diratime": ("nodiratime", False),
    b"nodiratime": ("nodiratime", True),
    b"strictatime": ("strictatime", True),
    b"nostrictatime": ("strictatime", False),
    b"lazytime": ("lazytime", True),
    b"nolazytime": ("lazytime", False),
    b"symfollow": ("nosymfollow", False),
    b"nosymfollow": ("nosymfollow", True),
    b"default_permissions": ("default_permissions", True),
    b"auto_unmount": ("auto_unmount", True),
}
#: Options that are always in force, or have no effect any more.
_IGNORED = frozenset([b"nosuid", b"nodev", b"nonempty", b"relatime", b"norelatime"])
#: Options that libfuse passes on although the helper sets them.
_DROPPED = frozenset([b"fd", b"rootmode", b"user_id", b"group_id"])
#: Options whose value goes to the kernel unchanged.
_VALUES = {b"max_read": "max_read", b"blksize": "block_size"}
#: Options that would weaken the mount: ignored with a warning.
_UNSAFE = frozenset([b"suid", b"dev"])
#: Options in whose value a backslash escapes the next character.
_ESCAPED = frozenset([b"fsname", b"subtype"])
#: The options without a value that go to the kernel (`kernel_data`).
_PASSED_ON = frozenset([b"allow_other", b"default_permissions"])
_NUMBER = re.compile(rb"\+?(?:0[xX](?P<_16>[0-9a-fA-F]{1,16})|(?P<_8>0[0-7]{0,16})|(?P<_10>[1-9][0-9]{0,16}))\n?")
_BASES = ("_16", "_8", "_10")
_ITEM = re.compile(rb"(?:fsname|subtype)=(?:\\.|[^,])*|[^,]*", re.DOTALL)


def parse(*texts: bytes, may_allow_other: bool, where_allowed: bytes, kernel: bytes) -> MountOptions:
    """Return the options that `texts` request, each adding to the ones before it.

    `may_allow_other`: the caller is root, or every user may; `where_allowed` is the file that would permit it, and
    `kernel` the version, ``6.18``, for the messages that name them. Raises Refusal.
    """
    wanted: dict[str, Any] = {}
    warnings: list[bytes] = []
    for item in chain.from_iterable(_split(_without_x_options(text)) for text in texts):
        name, equals, value = item.partition(b"=")
        if item in _FLAGS:
            attribute, wished = _FLAGS[item]
            wanted[attribute] = wished
        elif equals and name in _ESCAPED:
            wanted[name.decode()] = re.sub(rb"\\(.)", rb"\1", value, flags=re.DOTALL)
        elif equals and name in _VALUES:
            # The kernel parses each: if it refuses one, the mount is refused whatever follows.
            if is_number(wanted.get(_VALUES[name], b"0")):
                wanted[_VALUES[name]] = value
        elif item in _IGNORED or (equals and name in _DROPPED):
            pass
        elif item in (b"allow_other", b"allow_root") and not may_allow_other:
            reason = b"option %b only allowed if 'user_allow_other' is set in %b" % (item, where_allowed)
            raise Refusal(EPERM, reason, warnings=tuple(warnings))
        elif item == b"allow_other":
            wanted["allow_other"] = True
        elif item == b"blkdev":
            raise Refusal(EPERM, b"option blkdev is privileged", warnings=tuple(warnings))
        elif warning := _warning(item, kernel):
            if len(warnings) < MOST_WARNINGS:
                warnings.append(warning)
        else:
            raise Refusal(EINVAL, b"unknown option '%b'" % item, warnings=tuple(warnings))
    return MountOptions(warnings=tuple(warnings), **wanted)


def _warning(item: bytes, kernel: bytes) -> bytes:
    """Return the warning for an option that is ignored; empty for other options."""
    if item in _UNSAFE:
        return b"unsafe option %b ignored" % item
    if item == b"large_read":
        return b"note: 'large_read' mount option is deprecated for %b kernels" % kernel
    return b""


def kernel_data(text: bytes) -> bytes:
    """Return the options of `text` that the kernel gets as one string, where mount(2) is used."""
    items = _split(_without_x_options(text))
    return b",".join(item for item in items if item in _PASSED_ON or item.partition(b"=")[0] in _VALUES)


def is_number(value: bytes) -> bool:
    """Test whether the kernel accepts `value` as a number of 32 bits (kstrtouint() with base 0)."""
    match = _NUMBER.fullmatch(value)
    return match is not None and any(int(match[base], int(base[1:])) < 2**32 for base in _BASES if match[base])


def _without_x_options(text: bytes) -> bytes:
    """Drop options that begin with ``x-``, which are for user space. Escapes are not recognized here, as in
    fusermount3.
    """
    items = (item for item in text.split(b",") if not item.startswith(b"x-"))
    return b",".join(items).lstrip(b",")


def _split(text: bytes) -> Iterator[bytes]:
    """Yield the items between commas. Only in fsname= and subtype= does a backslash protect a comma."""
    position = 0
    while position < len(text):
        item = _ITEM.match(text, position)
        assert item is not None
        yield item[0]
        position = item.end() + 1
