"""The broker's address, and the first attempt to connect, made before the modules that talk to the broker are loaded.

The broker thus wakes up and identifies the caller while the proxy imports `client` and `wire`. In the static
executable, ``fast_path.c`` comes first, and has sent the request already if the call seemed plain.
"""

import sys
from _socket import AF_UNIX, SOCK_CLOEXEC, SOCK_SEQPACKET, socket
from posix import O_CLOEXEC, O_RDONLY, close, getppid, open, read

from fusermount3_proxy import comm

VARIABLE = b"FUSERMOUNT3PROXY_FDPASSING_SOCKPATH"
CONFIGURATION = b"/etc/fusermount3-proxy/socket"
DEFAULT_PATH = b"/run/fusermount3-proxy/broker.sock"

#: Seconds that fast_path.c waits for the reply before it starts Python, which then waits on.
AT_ONCE = 1.0


def socket_path(environment: dict[bytes, bytes]) -> bytes:
    """Return the path of the broker's socket: from the environment, else from the file in /etc, else the default.

    go-fuse passes its helper no environment but the comm socket's number; then the environment with which the FUSE
    program was started counts.
    """
    named = environment.get(VARIABLE)
    if environment.keys() == {comm.VARIABLE}:
        named = _variable_of_parent()
    return named or _contents(CONFIGURATION).partition(b"\n")[0].strip() or DEFAULT_PATH


def _variable_of_parent() -> bytes:
    for variable in _contents(b"/proc/%d/environ" % getppid()).split(b"\0"):
        name, _, value = variable.partition(b"=")
        if name == VARIABLE:
            return value
    return b""


def _contents(path: bytes) -> bytes:
    """Return the contents of the file, empty if it can't be read."""
    contents = b""
    try:
        file = open(path, O_RDONLY | O_CLOEXEC)
    except OSError:
        return b""
    try:
        while part := read(file, 65536):
            contents += part
        return contents
    except OSError:
        return b""
    finally:
        close(file)


def asked() -> socket | None:
    """Return the connection on which fast_path.c has sent the request of this call; None if it has not sent it."""
    number = getattr(sys, "asked", -1)
    return socket(fileno=number) if number >= 0 else None


def connect(path: bytes) -> socket | None:
    """Return a connection to the broker at `path`, None if the attempt fails; then `client.ask` finds out why."""
    try:
        connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC)
    except OSError:
        return None
    connection.setblocking(False)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        return None
    return connection
