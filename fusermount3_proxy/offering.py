"""``--offer-device``, for a mount pod: offers a block device to the volumes of other pods for as long as it runs.

The descriptor that it sends proves to the broker that this container may open the device. If the broker is restarted,
it offers the device again.
"""

from _signal import SIGINT, SIGTERM, signal
from _socket import socket
from posix import O_CLOEXEC, O_RDONLY, O_RDWR, _exit, close, environ, open
from time import sleep

from fusermount3_proxy import approach, arguments, client, wire
from fusermount3_proxy.failure import Failure, reason, say

USAGE = b"""\
--offer-device PATH [--read-only]
Offer the block device at PATH to volumes of other pods with volumeMode Block, through the socket of this pod's volume,
until SIGTERM comes. With --read-only, only readOnly volumes get it.
"""

_READ_ONLY = b"--read-only"
#: Seconds to wait for a broker that does not run, and between two offers.
PATIENCE, PAUSE = 600.0, 0.5


def main(program: bytes, words: list[bytes]) -> int:
    """Return 1 if the broker refuses the device; else run until a signal comes. Raises Failure."""
    given, rest = arguments.split([word for word in words if word != _READ_ONLY], {})
    if arguments.HELP in given:
        say(1, USAGE)
        return 0
    if len(rest) != 1:
        raise Failure(b"exactly one device is required")
    for number in (SIGTERM, SIGINT):
        signal(number, _end)  # the first process of a container has no default action
    device = _open(rest[0], O_RDONLY if _READ_ONLY in words else O_RDWR)
    path = approach.socket_path(environ)
    while True:
        answer = client.ask(path, wire.DeviceRequest(), device, PATIENCE)
        if answer.descriptor >= 0:
            close(answer.descriptor)
        client.print_reply(program, answer.reply)
        if answer.reply.errno:
            return 1
        _wait_for_close(answer.connection)
        sleep(PAUSE)


def _open(path: bytes, flags: int) -> int:
    try:
        return open(path, flags | O_CLOEXEC)
    except OSError as error:
        raise Failure(b"can't open %b: %b" % (path, reason(error))) from None


def _wait_for_close(connection: socket) -> None:
    """Return when the broker has closed the connection."""
    connection.settimeout(None)
    try:
        while connection.recv(wire.MAX_MESSAGE):
            pass
    except OSError:
        pass
    connection.close()


def _end(*_: object) -> None:
    _exit(0)
