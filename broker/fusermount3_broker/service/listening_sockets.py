"""Listening sockets of the broker: passed by systemd, or made here and removed at the end.

The directory of such a socket stays, because containers have it mounted and would not see a new one of the same name.
The broker marks other directories that it makes with an extended attribute, and removes only marked ones.
"""

import errno
import ipaddress
import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import xattr
from systemd import daemon

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.kernel.ownership_marks import MARK
from fusermount3_broker.service.configuration import Loopback, Socket

#: Callers that wait in the socket. Others wait in connect(2), in turn (see `fusermount3_proxy.client`). A small backlog
#: shortens the queue in which one caller can stand before the others; the broker accepts connections quickly.
BACKLOG = 16
#: FileDescriptorName= of the socket for metrics; all others are for callers.
METRICS = "metrics"
METRICS_BACKLOG = 64
#: Seconds in which the rest of a broker is gone after one of its processes was killed, and between two checks.
_GONE_IN = 3.0
_LOOK_AGAIN = 0.1
#: Name of the root of fusectl in systemd's file descriptor store.
FUSECTL = "fusectl"


class SocketError(Exception):
    """A socket can't be made or used; the message names it. `errno`: the kernel's reason, 0 if there is none."""

    def __init__(self, text: str, errno: int | None = 0) -> None:
        super().__init__(text)
        self.errno = errno or 0


@dataclass
class Listening:
    """The front's listening sockets: those for callers, and the one for metrics."""

    callers: list[socket.socket] = field(default_factory=list)
    metrics: socket.socket | None = None
    #: Whether systemd holds a descriptor of fusectl; see `keep_fusectl`.
    fusectl_is_kept: bool = False


def inherited() -> Listening:
    """Return the sockets that systemd passed (sd_listen_fds_with_names(3)). Raises SocketError for a wrong kind."""
    found = Listening()
    for descriptor, name in daemon.listen_fds_with_names().items():
        if name == FUSECTL:
            found.fusectl_is_kept = True
            os.close(descriptor)
        elif name == METRICS:
            found.metrics = _inherited_metrics(descriptor)
        elif daemon.is_socket(descriptor, socket.AF_UNIX, socket.SOCK_SEQPACKET, 1):
            found.callers.append(socket.socket(fileno=descriptor))
        else:
            raise SocketError("systemd passed a socket that is not ListenSequentialPacket=")
    return found


def systemd_keeps_descriptors() -> bool:
    """Return whether systemd has started this process itself (SYSTEMD_EXEC_PID in systemd.exec(5), since systemd 248).

    Who merely has a NOTIFY_SOCKET may be in a container whose engine passes on that it is ready, and no descriptor.
    """
    return "NOTIFY_SOCKET" in os.environ and os.environ.get("SYSTEMD_EXEC_PID") == str(os.getpid())


def keep_fusectl(root: int) -> None:
    """Have systemd keep a descriptor of fusectl while the broker restarts (sd_pid_notify_with_fds(3)).

    The inodes that identify connections belong to its superblock, which ends when its last user closes it.
    """
    directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)
    try:
        daemon.notify(f"FDSTORE=1\nFDNAME={FUSECTL}", fds=[directory])
    finally:
        os.close(directory)


def _inherited_metrics(descriptor: int) -> socket.socket:
    if not daemon.is_socket(descriptor, socket.AF_UNSPEC, socket.SOCK_STREAM, 1):
        raise SocketError("systemd passed a socket for metrics that is not ListenStream=")
    listener = socket.socket(fileno=descriptor)
    if listener.family != socket.AF_UNIX:
        host = listener.getsockname()[0]
        if not ipaddress.ip_address(host).is_loopback:
            listener.close()
            raise SocketError(
                f"systemd passed a socket for metrics on {host}, which others than this machine may reach"
            )
    return listener


class Listeners:
    """Listening sockets that the broker makes itself. `close` removes them."""

    def __init__(self, wanted: Iterable[Socket]) -> None:
        """Make and bind the sockets. Raises SocketError, and leaves nothing behind then."""
        self.sockets: list[socket.socket] = []
        self._paths: list[Path] = []
        try:
            for each in wanted:
                self._listen(each)
        except OSError as error:
            self.close()
            raise SocketError(f"{each.path}: {error.strerror or error}") from None

    def close(self) -> None:
        # First: a later broker takes a place where nobody listens any more (`remove_stale`), and has its socket there.
        for path in self._paths:
            path.unlink(missing_ok=True)
        for listener in self.sockets:
            listener.close()

    def _listen(self, wanted: Socket) -> None:
        wanted.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        remove_stale(wanted.path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sockets.append(listener)
        before = os.umask(0o177)  # no caller connects before mode and owner are right
        try:
            listener.bind(bytes(wanted.path))
        finally:
            os.umask(before)
        self._paths.append(wanted.path)
        shutil.chown(wanted.path, wanted.owner, wanted.group)
        wanted.path.chmod(wanted.mode)
        if wanted.selinux_label:
            xattr.set(wanted.path, syscalls.XATTR_NAME_SELINUX, wanted.selinux_label.encode())
        listener.listen(BACKLOG)


@contextmanager
def listening_for_administrators(path: Path) -> Iterator[socket.socket]:
    """Make a stream socket at `path` to which only its owner and root may connect; remove it at the end.

    Raises SocketError.
    """
    with _listening_at(path, 0o177) as listener:
        yield listener


@contextmanager
def listening_for_metrics(address: Path | Loopback) -> Iterator[socket.socket]:
    """Make the stream socket for metrics; remove it at the end. Raises SocketError.

    One at a path has mode 0660: for its owner and its group, which is the directory's if that has the setgid bit.
    """
    if isinstance(address, Path):
        with _listening_at(address, 0o117) as listener:
            yield listener
        return
    try:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        listener = socket.create_server((address.host, address.port), family=family, backlog=METRICS_BACKLOG)
    except OSError as error:
        hint = "; see fusermount3-broker-metrics.socket" if error.errno == errno.EAFNOSUPPORT else ""
        reason = os.strerror(error.errno) if error.errno else error  # without what create_server adds
        raise SocketError(f"{address}: {reason}{hint}", error.errno) from None
    with listener:
        yield listener


@contextmanager
def _listening_at(path: Path, umask: int) -> Iterator[socket.socket]:
    made = []
    try:
        made = make_directory(path.parent)
        remove_stale(path, socket.SOCK_STREAM)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(umask)
        try:
            listener.bind(bytes(path))
        finally:
            os.umask(before)
        listener.listen()
    except OSError as error:
        raise SocketError(f"{path}: {error.strerror or error}") from None
    with listener:
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)  # before nobody listens, see Listeners.close
            for directory in reversed(made):
                remove_directory(directory)


def make_directory(path: Path) -> list[Path]:
    """Make the directory `path` and its missing parents; mark and return those made."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o755)
        try:
            xattr.set(each, MARK, b"1", nofollow=True)
        except OSError:
            pass  # no extended attributes there: the directory will stay
    return missing[::-1]


def remove_directory(path: Path) -> None:
    """Remove the directory if the broker made it and it is empty."""
    try:
        xattr.get(path, MARK, nofollow=True)
        path.rmdir()
    except OSError:
        pass


def remove_stale(path: Path, kind: socket.SocketKind = socket.SOCK_SEQPACKET) -> None:
    """Remove a socket without a listener. Raises OSError (EADDRINUSE) if it keeps having one for `_GONE_IN` seconds."""
    if not path.is_socket():
        return  # it doesn't exist, or bind(2) will report the obstacle
    give_up = time.monotonic() + _GONE_IN
    while _is_listened_on(path, kind):
        if time.monotonic() > give_up:
            raise OSError(errno.EADDRINUSE, "another broker listens there")
        time.sleep(_LOOK_AGAIN)
    path.unlink(missing_ok=True)


def _is_listened_on(path: Path, kind: socket.SocketKind) -> bool:
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.setblocking(False)
        try:
            probe.connect(bytes(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except BlockingIOError:  # its backlog is full
            return True
    return True
