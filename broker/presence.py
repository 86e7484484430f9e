"""Whether somebody has a Unix socket, without a word to who has it.

A connection of another type is refused either way: connect(2) finds out whether somebody has the socket before it finds
the type wrong (net/unix/af_unix.c, unix_find_bsd). The broker's own sockets are none of datagrams.
"""

import errno
import socket


def is_had(path: bytes) -> bool:
    """Whether somebody has the socket at `path`; false also where none is, or where that is not to be known."""
    return _refusal(path) == errno.EPROTOTYPE


def is_left(path: bytes) -> bool:
    """Whether there is a file at `path` through which nobody can be reached, such as the socket of who was killed."""
    return _refusal(path) == errno.ECONNREFUSED


def _refusal(path: bytes) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(path)
        except OSError as error:
            return error.errno or errno.ENAMETOOLONG  # Python's own word, for a path that no socket has
    return 0
