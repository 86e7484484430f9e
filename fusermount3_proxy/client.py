"""The talk with the broker: wait for it within bounds, send one request, receive one reply.

No caller of fusermount3 has a timeout, so every step here has one. A broker that is not there yet, or that goes
away before it answers, is asked again: a request without a reply was not carried out, or is rolled back, because
a mount counts only when it was committed.
"""

from _socket import (
    AF_UNIX,
    MSG_CMSG_CLOEXEC,
    MSG_NOSIGNAL,
    SCM_RIGHTS,
    SO_SNDTIMEO,
    SOCK_CLOEXEC,
    SOCK_SEQPACKET,
    SOL_SOCKET,
    socket,
)
from errno import (
    EAGAIN,
    ECONNABORTED,
    ECONNREFUSED,
    ECONNRESET,
    EMSGSIZE,
    ENOENT,
    EPIPE,
    EPROTOTYPE,
    ETIMEDOUT,
    ETOOMANYREFS,
)
from posix import strerror
from sys import byteorder, maxsize
from time import monotonic, sleep

from fusermount3_proxy import wire
from fusermount3_proxy.failure import Failure, reason, say

# Only for the type checker: `typing` is a library, and there are none where this runs.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

#: What the name of the socket ends in where a socket of another type, for clients of another protocol, has the name.
BESIDE_ANOTHER = b".seqpacket"

#: Seconds that a broker which is not there is waited for.
PATIENCE = 10.0
#: Seconds that a reply may take. Longer than the broker's own deadlines, so that its refusal is what the user reads.
REPLY_TIMEOUT = 30.0

#: How long to wait in connect(2) for one's turn while very many others want to connect, as a struct timeval. With a
#: timeout of Python's own it would not wait, nor have a turn.
_LONG = 8 if maxsize > 2**32 else 4
_TURN = int(PATIENCE).to_bytes(_LONG, byteorder) + bytes(_LONG)

#: What connect(2) and the exchange fail with while a broker starts, restarts or has its hands full; ETOOMANYREFS, while
#: processes of the same uid, in whatever container, have too many descriptors on their way (unix(7)).
_NOT_YET = (EAGAIN, ECONNABORTED, ECONNREFUSED, ECONNRESET, ENOENT, EPIPE, ETOOMANYREFS)


def _failed(request: wire.Request) -> bytes:
    if isinstance(request, wire.UnmountRequest):
        return b"failed to unmount %b" % request.mountpoint
    return b"mount failed"


class Answer:
    """A reply, the descriptor that came with it (-1 if none), and the connection, for what is still to be said."""

    __slots__ = ("connection", "descriptor", "reply")

    def __init__(self, connection: socket, reply: wire.Reply, descriptor: int) -> None:
        self.connection = connection
        self.reply = reply
        self.descriptor = descriptor


def ask(
    path: bytes,
    request: wire.Request,
    descriptor: int,
    patience: float = PATIENCE,
    connection: socket | None = None,
) -> Answer:
    """Send `request` with `descriptor`, -1 if there is none, to the broker at `path`; return what it answers.

    Where a socket of another type has the name, the broker's is beside it. A broker that is not there is waited for
    `patience` seconds. The first attempt is made with `connection`, if there is one already. Raises Failure.
    """
    try:
        record = wire.encode_request(request)
    except wire.ProtocolError as error:
        raise Failure(error.text.encode()) from None
    give_up = monotonic() + patience
    pause = 0.005
    while True:
        try:
            return _exchange(path, connection, record, descriptor)
        except TimeoutError:
            raise Failure(b"%b: %b" % (_failed(request), strerror(ETIMEDOUT).encode())) from None
        except wire.ProtocolError as error:
            raise Failure(b"broker at %b: %b" % (path, error.text.encode())) from None
        except OSError as error:
            if error.errno == EPROTOTYPE and not path.endswith(BESIDE_ANOTHER):
                path += BESIDE_ANOTHER
                continue
            if error.errno not in _NOT_YET:
                raise Failure(b"broker at %b: %b" % (path, reason(error))) from None
            if monotonic() + pause > give_up:
                waited = b"waited %g seconds for it" % patience
                raise Failure(b"no broker at %b: %b, %b" % (path, reason(error), waited)) from None
        connection = None
        sleep(pause)
        pause = min(2 * pause, patience / 20)


def print_reply(program: bytes, reply: wire.Reply) -> None:
    """Print the warnings; and for a refusal its text, and the name under which it stands in the broker's log."""
    for warning in reply.warnings:
        say(2, b"%b: %b\n" % (program, warning))
    if reply.errno:
        say(2, b"%b: %b\n%b: broker request %b\n" % (program, reply.text, program, reply.id))


def commit(answer: Answer) -> None:
    """Tell the broker that the mount is in use. Raises Failure when the broker is gone, and the mount with it."""
    _tell(answer.connection, wire.CommitRequest())
    try:
        answer.connection.recv(1)  # the broker hangs up when it has let go of the mount, which is busy until then
    except OSError:
        pass


def proceed(answer: Answer, still_wanted: "Callable[[], bool]") -> wire.Reply:
    """Tell the broker that the FUSE program serves; return its second reply, which says whether it is mounted now.

    The broker bounds the time, for the kernel may wait for the program; when that is gone, `still_wanted` says so.
    Raises Failure.
    """
    _tell(answer.connection, wire.ProceedRequest())
    answer.connection.settimeout(0.5)
    while still_wanted():
        try:
            data = answer.connection.recv(wire.MAX_MESSAGE)
            if not data:
                raise ConnectionResetError(ECONNRESET, "the broker closed the connection")
            return wire.decode_reply(data)
        except TimeoutError:
            pass
        except wire.ProtocolError as error:
            raise Failure(b"broker: %b" % error.text.encode()) from None
        except OSError as error:
            raise Failure(b"broker: %b" % reason(error)) from None
    raise Failure(b"mount failed: the FUSE program is gone")


def _tell(connection: socket, request: wire.Request) -> None:
    try:
        connection.send(wire.encode_request(request), MSG_NOSIGNAL)
    except OSError as error:
        raise Failure(b"broker: %b" % reason(error)) from None


def _exchange(path: bytes, connection: socket | None, record: bytes, descriptor: int) -> Answer:
    """Raises OSError, TimeoutError among them, and ProtocolError."""
    connection = connection or _connect(path)
    connection.settimeout(REPLY_TIMEOUT)
    attached = [(SOL_SOCKET, SCM_RIGHTS, descriptor.to_bytes(4, byteorder))] if descriptor >= 0 else []
    try:
        connection.sendmsg([record], attached, MSG_NOSIGNAL)
    except BrokenPipeError:
        pass  # the broker may have refused before it heard what; then its answer is there
    data, ancillary, flags, _ = connection.recvmsg(wire.MAX_MESSAGE, wire.ANCILLARY_SPACE, MSG_CMSG_CLOEXEC)
    if not data:
        raise ConnectionResetError(ECONNRESET, "the broker closed the connection")
    wire.check_whole(flags)
    received = wire.descriptors(ancillary)
    if len(received) > 1:
        raise wire.ProtocolError(EMSGSIZE, "reply with surplus file descriptors")
    return Answer(connection, wire.decode_reply(data), received[0] if received else -1)


def _connect(path: bytes) -> socket:
    """Raises OSError."""
    connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC)
    connection.setsockopt(SOL_SOCKET, SO_SNDTIMEO, _TURN)
    connection.connect(path)
    return connection
