"""The images that the callers run in, and the image that they are built in.

Rust and Go programs are built in Debian trixie, whatever the host's distribution: its compilers are new enough for the
current release of each library, and they are the same everywhere. The resulting programs are static and run in the
image that contains nothing but busybox.
"""

from __future__ import annotations

from tests.lab.images import DebianRecipe

COMPILERS = DebianRecipe(
    "compilers",
    ("passwd", "cargo", "golang-go", "gcc", "libc6-dev", "ca-certificates", "pkgconf", "libfuse-dev"),
    suite="trixie",
)
"""With libfuse 2 and without libfuse 3, which the Rust libraries would link with if it were there."""

_LIBFUSE = ("passwd", "gcc", "libc6-dev", "pkgconf", "libfuse3-dev", "libfuse-dev")

BOOKWORM = DebianRecipe(
    "callers",
    (
        *_LIBFUSE,
        # libfuse 3
        "bindfs",
        "fuse-overlayfs",
        "sshfs",
        "squashfs-tools",
        # libfuse 2
        "archivemount",
        "s3fs",
        "squashfuse",
        "unionfs-fuse",
        # Go
        "gocryptfs",
        "rclone",
        "restic",
        # Python
        "borgbackup",
        "python3-pyfuse3",
        # their own libfuse
        "mergerfs",
    ),
)
"""libfuse 2.9.9 and 3.14, and Debian 12's own FUSE programs."""

OTHERS = DebianRecipe(
    "callers-others",
    (
        "passwd",
        "fuse3",
        # these request allow_other
        "exfat-fuse",
        "exfatprogs",
        "qemu-system-common",
        "s3backer",
        # these use no helper of libfuse's
        "davfs2",
        "glusterfs-client",
        "lxcfs",
        "ntfs-3g",
    ),
)
"""Programs that need the administrator's permission, or can't work."""

TRIXIE = DebianRecipe("callers-trixie", (*_LIBFUSE, "python3-pyfuse3"), suite="trixie")
"""libfuse 3.17, and a pyfuse3 that was built with it."""

SID = DebianRecipe("callers-sid", _LIBFUSE, suite="sid")
"""libfuse 3.18."""
