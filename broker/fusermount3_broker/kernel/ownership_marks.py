"""Extended attribute that marks files that the broker has made in directories of others, to recognize them later.

For the mounter's children, whose working directory is the mounter's /proc.
"""

import errno
import os

#: Users can't set attributes of the trusted namespace (xattr(7)).
MARK = b"trusted.fusermount3-broker"

#: On the directory of a volume: it was published to be shared with other pods.
SHARED = b"trusted.fusermount3-broker.shared"


def mark(entry: int, name: bytes = MARK) -> None:
    """Mark the file of a descriptor, which may have been opened with O_PATH. Raises OSError."""
    os.setxattr(b"self/fd/%d" % entry, name, b"1")


def unmark(entry: int, name: bytes) -> None:
    """Remove a mark from the file of a descriptor, if it has that. Raises OSError."""
    try:
        os.removexattr(b"self/fd/%d" % entry, name)
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.ENOTSUP):
            raise


def is_marked(entry: int, name: bytes = MARK) -> bool:
    """Return whether the file of a descriptor is marked. Queries its filesystem."""
    try:
        os.getxattr(b"self/fd/%d" % entry, name)
    except OSError:
        return False
    return True
