"""The comm socket: the way back to the FUSE program, which waits there for its /dev/fuse descriptor.

What travels is one byte with one descriptor. On failure nothing is written; the end of this process closes the
socket, and that is how the caller learns of it.
"""

from _socket import MSG_NOSIGNAL, SCM_RIGHTS, SOL_SOCKET, socket
from sys import byteorder

from fusermount3_proxy.failure import Failure, reason

VARIABLE = b"_FUSE_COMMFD"


def find(argument: bytes | None, environment: dict[bytes, bytes]) -> socket:
    """Return the comm socket that ``--comm-fd`` or else the environment names. Raises Failure."""
    text = argument if argument is not None else environment.get(VARIABLE)
    if text is None:
        raise Failure(b"old style mounting not supported")
    if not text.isdigit() or len(text) > 9:
        raise Failure(b"invalid %b: %b" % (VARIABLE, text))
    try:
        return socket(fileno=int(text))
    except OSError:
        raise Failure(b"file descriptor %b is not a socket, can't send fuse fd" % text) from None


def send(comm: socket, descriptor: int) -> None:
    """Hand the /dev/fuse descriptor to the FUSE program. Raises Failure, when the program is gone for example."""
    try:
        comm.sendmsg([b"\0"], [(SOL_SOCKET, SCM_RIGHTS, descriptor.to_bytes(4, byteorder))], MSG_NOSIGNAL)
    except OSError as error:
        raise Failure(b"sending file descriptor: %b" % reason(error)) from None
