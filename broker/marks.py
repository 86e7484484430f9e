"""What the broker has made in directories of others is marked with an extended attribute, so that it is known again.

For the mounter's children, whose working directory is the mounter's /proc.
"""

import os

#: Users can't set attributes of the trusted namespace (xattr(7)).
MARK = b"trusted.fusermount3-broker"


def mark(entry: int) -> None:
    """Mark what a descriptor stands for, which may have been opened with O_PATH. Raises OSError."""
    os.setxattr(b"self/fd/%d" % entry, MARK, b"1")


def is_marked(entry: int) -> bool:
    """Whether it is marked. Asks the filesystem on which it is."""
    try:
        os.getxattr(b"self/fd/%d" % entry, MARK)
    except OSError:
        return False
    return True
