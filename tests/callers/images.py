"""The images that the callers run in, and the one they are built in.

What is written in Rust and Go is built in Debian trixie, whatever the host has: its compilers are new enough for the
current release of each library, and they are the same everywhere. The programs that come out are static and run in
the image that holds nothing but busybox.
"""

from __future__ import annotations

from tests.lab.images import DebianRecipe

COMPILERS = DebianRecipe(
    "compilers", ("passwd", "cargo", "golang-go", "gcc", "libc6-dev", "ca-certificates"), suite="trixie"
)

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
    ),
)
"""libfuse 2.9.9 and 3.14, and Debian 12's own FUSE programs."""

TRIXIE = DebianRecipe("callers-trixie", (*_LIBFUSE, "python3-pyfuse3"), suite="trixie")
"""libfuse 3.17, and a pyfuse3 that was built with it."""

SID = DebianRecipe("callers-sid", _LIBFUSE, suite="sid")
"""libfuse 3.18."""
