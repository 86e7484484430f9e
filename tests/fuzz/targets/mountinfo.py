"""The mounter's parser of /proc/self/mountinfo: an input is the names in a line that a caller can choose.

The line has them as the kernel writes them (fs/proc_namespace.c, show_mountinfo), so the parser must read each name as
a name, and as no other name.
"""

from __future__ import annotations

from unittest import mock

from fusermount3_broker.mounter import mount_tree
from fusermount3_broker.mounter.mount_tree import Fuse

WORDS = [
    *(b" - fuse ", b"fuse.", b"\n36 35 ", b"user_id=0", b",allow_other", b"\\040", b"\\134", b"\\012", b"//deleted"),
    *(b"0:36", b" shared:1 ", b" rw", b"#", b"\t", b"/"),
]
SEEDS: list[bytes] = []

_MOUNT, _BELOW = 36, 35


def check(data: bytes) -> None:
    """Check a line made of `data`: place, source and subtype, separated by NUL bytes, and bytes to choose the rest."""
    place, source, subtype, choices = (*data.split(b"\0", 3), b"", b"", b"")[:4]
    uid, gid = int.from_bytes(choices[:4], "little"), int.from_bytes(choices[4:8], "little")
    allow_other = bool(choices[8:9])
    line = (
        b"%d %d 0:36 / /%b rw,nosuid,nodev shared:1 master:2 - fuse%b %b rw,user_id=%d,group_id=%d%b,max_read=4096"
        % (
            *(_MOUNT, _BELOW, _mangled(place, b" \t\n\\"), b"." + _mangled(subtype) if subtype else b""),
            *(_mangled(source), uid, gid, b",default_permissions,allow_other" if allow_other else b""),
        )
    )
    root = b"%d 1 0:35 / / rw - ext4 %b rw" % (_BELOW, _mangled(source))
    with mock.patch.object(mount_tree, "_mountinfo", lambda: b"\n%b\n%b\n" % (root, line)):
        assert mount_tree.fuse_of(_MOUNT) == Fuse(uid, gid, allow_other)
        assert mount_tree.fuse_of(_BELOW) is None
        assert mount_tree._parent_of(_MOUNT) == _BELOW
        assert mount_tree._is_covered(_BELOW) == (not place)
        assert not mount_tree._is_covered(_MOUNT)
        assert mount_tree._unescaped(line.split(b" ")[4]) == b"/" + place


def _mangled(name: bytes, escaped: bytes = b" \t\n\\#") -> bytes:
    """Return the name as fs/proc_namespace.c (mangle) and fs/seq_file.c (mangle_path) write it."""
    return b"".join(b"\\%03o" % byte if byte in escaped else bytes([byte]) for byte in name)
