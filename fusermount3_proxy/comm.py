"""The comm socket: the way back to the FUSE program, which waits there for its /dev/fuse descriptor.

The message is one byte with one descriptor. On failure nothing is written; when this process ends, the kernel closes
the socket, and the FUSE program sees the failure by that. With ``--sync-init`` (libfuse 3.19) the program answers with
a byte when it is ready to serve, and then receives a C int: 0 if the filesystem is mounted, else the negative errno.
"""

from _socket import MSG_DONTWAIT, MSG_NOSIGNAL, MSG_PEEK, SCM_RIGHTS, SOL_SOCKET, socket
from errno import EBADF, ENOTSOCK, ETOOMANYREFS
from posix import strerror
from sys import byteorder
from time import monotonic, sleep

from fusermount3_proxy.failure import Failure, reason

VARIABLE = b"_FUSE_COMMFD"

#: Seconds that a FUSE program has to get ready once it has its descriptor, as in fusermount3.
READY_TIMEOUT = 300.0
#: Seconds to retry sending a descriptor while processes of the same uid, in whatever container, have too many in
#: flight (unix(7), ETOOMANYREFS). Less than the broker waits for the commit that follows.
SEND_TIMEOUT = 5.0


def find(argument: bytes | None, environment: dict[bytes, bytes]) -> socket:
    """Return the comm socket that ``--comm-fd`` or else the environment names. Raises Failure."""
    text = argument if argument is not None else environment.get(VARIABLE)
    if text is None:
        raise Failure(b"old style mounting not supported")
    number = _number(text)
    try:
        return socket(fileno=number)
    except (OSError, OverflowError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == ENOTSOCK:
            raise Failure(b"file descriptor %d is not a socket, can't send fuse fd" % number) from None
        raise Failure(b"fstat of comm fd %d failed: %b" % (number, strerror(EBADF).encode())) from None


def _number(text: bytes) -> int:
    """Parse the whole of `text` as strtol(3) does. Raises Failure."""
    digits = text.lstrip(b" \t\n\v\f\r")
    sign, digits = (digits[:1], digits[1:]) if digits[:1] in (b"+", b"-") else (b"", digits)
    if not digits.isdigit() or len(digits.lstrip(b"0")) > 18:
        raise Failure(b"invalid %b: %b" % (VARIABLE, text))
    return int(sign + digits)


def send(comm: socket, descriptor: int) -> None:
    """Send the /dev/fuse descriptor to the FUSE program. Raises Failure, for example if the program is gone."""
    give_up = monotonic() + SEND_TIMEOUT
    while True:
        try:
            comm.sendmsg([b"\0"], [(SOL_SOCKET, SCM_RIGHTS, descriptor.to_bytes(4, byteorder))], MSG_NOSIGNAL)
            return
        except OSError as error:
            if error.errno != ETOOMANYREFS or monotonic() > give_up:
                raise Failure(b"sending file descriptor: %b" % reason(error)) from None
        sleep(0.01)


def wait_until_ready(comm: socket) -> None:
    """Wait until the FUSE program is ready to serve. Raises Failure if it is gone, or not ready in time."""
    comm.settimeout(READY_TIMEOUT)
    try:
        if not comm.recv(1):
            raise Failure(b"connection closed while waiting for signal")
    except TimeoutError:
        raise Failure(b"timed out after %d seconds waiting for signal" % READY_TIMEOUT) from None
    except OSError as error:
        raise Failure(b"error receiving signal: %b" % reason(error)) from None
    finally:
        comm.settimeout(None)


def is_open(comm: socket) -> bool:
    """Return whether the FUSE program still holds the other end."""
    try:
        return comm.recv(1, MSG_PEEK | MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def send_status(comm: socket, errno: int) -> None:
    """Send the FUSE program the result of its mount: `errno`, 0 on success. Raises Failure if the program is gone."""
    try:
        comm.send((-errno).to_bytes(4, byteorder, signed=True), MSG_NOSIGNAL)
    except OSError as error:
        raise Failure(b"failed to send mount status: %b" % reason(error)) from None
