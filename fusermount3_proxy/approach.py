"""Where the broker is, and the first attempt to connect to it, made before what is needed to talk with it is loaded.

So the broker wakes up and finds out who calls while the proxy imports `client` and `wire`.
"""

from _socket import AF_UNIX, SOCK_CLOEXEC, SOCK_SEQPACKET, socket
from posix import O_CLOEXEC, O_RDONLY, close, getppid, open, read

from fusermount3_proxy import comm

VARIABLE = b"FUSERMOUNT3PROXY_FDPASSING_SOCKPATH"
CONFIGURATION = b"/etc/fusermount3-proxy/socket"
DEFAULT_PATH = b"/run/fusermount3-proxy/broker.sock"


def socket_path(environment: dict[bytes, bytes]) -> bytes:
    """Return where the broker listens: what the environment says, else the file in /etc, else the default.

    go-fuse leaves its helper nothing of the environment but the comm socket's number; then what the FUSE program was
    started with counts.
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
    """Return what is in the file, nothing if that can't be read."""
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


def connect(path: bytes) -> socket | None:
    """Return a connection to the broker at `path`, None if it is not to be had at once; then `client.ask` sees why."""
    connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC)
    connection.setblocking(False)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        return None
    return connection
