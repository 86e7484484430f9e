"""``--wait-unused``, for the preStop hook of a mount pod: waits until no other pod uses the filesystem of its volume.

The broker knows who does. Once asked, it gives the filesystem to no other pod, so the wait comes to an end. A question
may be repeated, so a broker that is being restarted is asked again.
"""

from _socket import AF_UNIX, MSG_NOSIGNAL, SOCK_CLOEXEC, SOCK_SEQPACKET, socket
from errno import EBUSY, ECONNRESET
from posix import environ
from time import monotonic, sleep

from fusermount3_proxy import approach, arguments, client, wire
from fusermount3_proxy.failure import Failure, in_seconds, reason, say

USAGE = b"""\
--wait-unused [--timeout S]
Exit with 0 as soon as no other pod uses the volume of this pod, with 1 if one still does after S seconds (600).
"""

#: Seconds to wait if the command line does not say it; as long as a mount pod may take to end.
TIMEOUT = 600.0
#: Seconds between two questions, and for an answer.
PAUSE, ANSWER = 1.0, 5.0

_OPTIONS = {b"timeout": b"timeout"}


def main(program: bytes, words: list[bytes]) -> int:
    """Return 0 once the volume is not used any more, 1 if the broker refuses to say. Raises Failure if it still is."""
    given, rest = arguments.split(words, _OPTIONS)
    if arguments.HELP in given:
        say(1, USAGE)
        return 0
    if rest:
        raise Failure(b"extra argument: %b" % rest[0])
    timeout = arguments.seconds(given[b"timeout"]) if b"timeout" in given else TIMEOUT
    path = approach.socket_path(environ)
    give_up = monotonic() + timeout
    while True:
        problem, reply = _ask(path)
        if reply and reply.errno != EBUSY:
            client.print_reply(program, reply)
            return 1 if reply.errno else 0
        if monotonic() + PAUSE > give_up:
            raise Failure(b"%b, waited %b" % (problem, in_seconds(timeout)))
        sleep(PAUSE)


def _ask(path: bytes) -> "tuple[bytes, wire.Reply | None]":
    """Return the problem, empty if there is none, and the broker's reply, if there is one. Raises Failure."""
    connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC)
    connection.settimeout(ANSWER)
    try:
        connection.connect(path)
        connection.send(wire.encode_request(wire.UnusedRequest()), MSG_NOSIGNAL)
        data = connection.recv(wire.MAX_MESSAGE)
        if not data:
            raise ConnectionResetError(ECONNRESET, "the broker closed the connection")
        reply = wire.decode_reply(data)
        return reply.text, reply
    except OSError as error:
        return b"no broker at %b: %b" % (path, reason(error)), None
    except wire.ProtocolError as error:
        raise Failure(b"broker at %b: %b" % (path, error.text.encode())) from None
    finally:
        connection.close()
