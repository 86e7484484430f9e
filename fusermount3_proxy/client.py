"""The exchange with the broker: wait for the broker within bounds, send one request, receive one reply.

Callers of fusermount3 set no timeout, so every step here has one. If the broker does not run yet, or goes away before
it answers, the proxy repeats the request: a request without a reply was not carried out, or is rolled back, because a
mount counts only once it is committed.
"""

from _socket import (
    AF_UNIX,
    MSG_CMSG_CLOEXEC,
    MSG_CTRUNC,
    MSG_NOSIGNAL,
    SCM_RIGHTS,
    SHUT_WR,
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
    EMFILE,
    EMSGSIZE,
    ENFILE,
    ENOBUFS,
    ENOENT,
    ENOMEM,
    EPIPE,
    EPROTOTYPE,
    ETIMEDOUT,
    ETOOMANYREFS,
)
from posix import strerror
from sys import byteorder, maxsize
from time import monotonic, sleep

from fusermount3_proxy import wire
from fusermount3_proxy.failure import Failure, in_seconds, reason, say

# For the type checker only: `typing` is a library, and this interpreter has none.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

#: Suffix of the broker's socket where a socket of another type, for clients of another protocol, has the plain name.
BESIDE_ANOTHER = b".seqpacket"

#: Seconds to wait for a broker that does not run.
PATIENCE = 10.0
#: Seconds to wait for a reply. Longer than the broker's own deadlines, so that the user reads the broker's refusal.
REPLY_TIMEOUT = 30.0
#: Seconds to wait until the broker has undone a mount that the FUSE program did not receive.
WITHDRAW_TIMEOUT = 5.0

#: How long connect(2) may wait for its turn while very many other clients want to connect, as a struct timeval. With a
#: timeout of Python's own, connect(2) would neither wait nor get a turn.
_LONG = 8 if maxsize > 2**32 else 4
_TURN = int(PATIENCE).to_bytes(_LONG, byteorder) + bytes(_LONG)

#: Errors of connect(2) and of the exchange while a broker starts, restarts or is overloaded; ETOOMANYREFS, while
#: processes of the same uid, in whatever container, have too many descriptors in flight (unix(7)).
_NOT_YET = (EAGAIN, ECONNABORTED, ECONNREFUSED, ECONNRESET, ENOENT, EPIPE, ETOOMANYREFS)

#: Errors that mean that the caller itself has no room left, for a descriptor for example.
_NO_ROOM = (EMFILE, ENFILE, ENOBUFS, ENOMEM)


def _failed(request: wire.Request) -> bytes:
    if isinstance(request, wire.UnmountRequest):
        return b"failed to unmount %b" % request.mountpoint
    if isinstance(request, wire.DeviceRequest):
        return b"can't offer the device"
    return b"mount failed"


class Answer:
    """A reply, its descriptor (-1 if none), and the socket connection, for the messages that follow."""

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
    is_sent: bool = False,
) -> Answer:
    """Send `request` with `descriptor`, -1 if there is none, to the broker at `path`; return its answer.

    Where a socket of another type has the name, connect to the broker's socket beside it. Wait `patience` seconds for
    a broker that does not run. The first attempt uses `connection`, if given, and does not send the request
    if it `is_sent` there. Raises Failure.
    """
    try:
        record = wire.encode_request(request)
    except wire.ProtocolError as error:
        raise Failure(error.text.encode()) from None
    give_up = monotonic() + patience
    pause = 0.005
    while True:
        try:
            return _exchange(path, connection, b"" if is_sent else record, descriptor)
        except TimeoutError:
            raise Failure(b"%b: %b" % (_failed(request), strerror(ETIMEDOUT).encode())) from None
        except wire.ProtocolError as error:
            raise Failure(b"broker at %b: %b" % (path, error.text.encode())) from None
        except OSError as error:
            if error.errno == EPROTOTYPE and not path.endswith(BESIDE_ANOTHER):
                path += BESIDE_ANOTHER
                continue
            if error.errno in _NO_ROOM:
                raise Failure(b"%b: %b" % (_failed(request), reason(error))) from None
            if error.errno not in _NOT_YET:
                raise Failure(b"broker at %b: %b" % (path, reason(error))) from None
            if monotonic() + pause > give_up:
                waited = b"waited %b for it" % in_seconds(patience)
                raise Failure(b"no broker at %b: %b, %b" % (path, reason(error), waited)) from None
        connection, is_sent = None, False
        sleep(pause)
        pause = min(2 * pause, patience / 20)


def print_reply(program: bytes, reply: wire.Reply) -> None:
    """Print the warnings; for a refusal, its text and the request ID under which the broker's log has it."""
    for warning in reply.warnings:
        say(2, b"%b: %b\n" % (program, warning))
    if reply.errno:
        say(2, b"%b: %b\n%b: broker request %b\n" % (program, reply.text, program, reply.id))


def commit(answer: Answer) -> None:
    """Tell the broker that the mount is in use. Raises Failure if the broker is gone, and the mount with it."""
    _tell(answer.connection, wire.CommitRequest())
    try:
        answer.connection.recv(1)  # the broker hangs up once it has released the mount, which is busy until then
    except OSError:
        pass


def withdraw(connection: socket) -> None:
    """Wait until the broker has undone a mount that won't be committed: as after fusermount3's failure, none is left.

    The caller of this function has closed the descriptor, if it received one.
    """
    connection.settimeout(WITHDRAW_TIMEOUT)
    try:
        connection.shutdown(SHUT_WR)
        while connection.recv(wire.MAX_MESSAGE):
            pass
    except OSError:
        pass  # the broker is gone, and the mount with it, or it takes long to undo the mount


def proceed(answer: Answer, still_wanted: "Callable[[], bool]") -> wire.Reply:
    """Tell the broker that the FUSE program serves; return its second reply: whether the filesystem is mounted now.

    The broker limits the time, because the kernel may wait for the program; `still_wanted` tests whether the program
    is still there. Raises Failure.
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
    """Exchange one request, empty if it has been sent, and its reply.

    Raises OSError, including TimeoutError, and ProtocolError.
    """
    connection = connection or _connect(path)
    connection.settimeout(REPLY_TIMEOUT)
    attached = [(SOL_SOCKET, SCM_RIGHTS, descriptor.to_bytes(4, byteorder))] if descriptor >= 0 else []
    try:
        if record:
            connection.sendmsg([record], attached, MSG_NOSIGNAL)
    except BrokenPipeError:
        pass  # the broker may have refused before it read the request; then its answer is there
    try:
        message = connection.recvmsg(wire.MAX_MESSAGE, wire.ANCILLARY_SPACE, MSG_CMSG_CLOEXEC)
    except ConnectionResetError:  # reported once: the broker hung up before it read the request; its answer follows
        message = connection.recvmsg(wire.MAX_MESSAGE, wire.ANCILLARY_SPACE, MSG_CMSG_CLOEXEC)
    data, ancillary, flags, _ = message
    if not data:
        raise ConnectionResetError(ECONNRESET, "the broker closed the connection")
    received = wire.descriptors(ancillary)
    if flags & MSG_CTRUNC and len(received) < wire.MAX_DESCRIPTORS:
        withdraw(connection)
        raise OSError(EMFILE, "")  # the kernel could not install all descriptors in this process (unix(7))
    wire.check_whole(flags)
    if len(received) > 1:
        raise wire.ProtocolError(EMSGSIZE, "reply with surplus file descriptors")
    return Answer(connection, wire.decode_reply(data), received[0] if received else -1)


def _connect(path: bytes) -> socket:
    """Connect to the broker at `path`. Raises OSError."""
    connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC)
    connection.setsockopt(SOL_SOCKET, SO_SNDTIMEO, _TURN)
    connection.connect(path)
    return connection
