"""Test whether a Unix socket has a listener, without connecting to it.

The probe connects with a wrong socket type, which connect(2) always refuses: but it checks for a listener before it
checks the type (net/unix/af_unix.c, unix_find_bsd). The broker listens on no datagram sockets.
"""

import errno
import socket


def has_listener(path: bytes) -> bool:
    """Return whether the socket at `path` has a listener; False also if there is no socket, or this can't be tested."""
    return _refusal(path) == errno.EPROTOTYPE


def is_stale(path: bytes) -> bool:
    """Return whether there is a file at `path` that no process listens on, such as the socket of a killed process."""
    return _refusal(path) == errno.ECONNREFUSED


def _refusal(path: bytes) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(path)
        except OSError as error:
            return error.errno or errno.ENAMETOOLONG  # Python itself raises, without errno, if the path is too long
    return 0
