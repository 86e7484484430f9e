"""Extended attribute that marks files that the broker has made in directories of others, to recognize them later.

For the mounter's children, whose working directory is the mounter's /proc.
"""

import os

#: Users can't set attributes of the trusted namespace (xattr(7)).
MARK = b"trusted.fusermount3-broker"


def mark(entry: int) -> None:
    """Mark the file of a descriptor, which may have been opened with O_PATH. Raises OSError."""
    os.setxattr(b"self/fd/%d" % entry, MARK, b"1")


def is_marked(entry: int) -> bool:
    """Return whether the file of a descriptor is marked. Queries its filesystem."""
    try:
        os.getxattr(b"self/fd/%d" % entry, MARK)
    except OSError:
        return False
    return True
