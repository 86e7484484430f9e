"""The sockets on which callers come: handed over by systemd, or made here and removed at the end.

The directory of such a socket stays, for it is what containers have been given, and a new one of the same name would
not be seen by them. Other directories that the broker makes it marks with an extended attribute, so that only such a
one is removed again.
"""

import errno
import os
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import xattr
from systemd import daemon

from broker.config import Socket

#: Set on directories that the broker made. Users can't set attributes of the trusted namespace (xattr(7)).
MARK = b"trusted.fusermount3-broker"
#: Where SELinux keeps the label of a file (xattr(7)).
SELINUX = b"security.selinux"
BACKLOG = 4096


class SocketError(Exception):
    """A socket can't be had; the message names it."""


def inherited() -> list[socket.socket]:
    """Return the sockets that systemd passed (sd_listen_fds(3)). Raises SocketError for a wrong kind."""
    found = []
    for descriptor in daemon.listen_fds():
        if not daemon.is_socket(descriptor, socket.AF_UNIX, socket.SOCK_SEQPACKET, 1):
            raise SocketError("systemd passed a socket that is not ListenSequentialPacket=")
        found.append(socket.socket(fileno=descriptor))
    return found


class Listeners:
    """Listening sockets made here. `close` removes them."""

    def __init__(self, wanted: Iterable[Socket]) -> None:
        """Raises SocketError; nothing is left then."""
        self.sockets: list[socket.socket] = []
        self._paths: list[Path] = []
        try:
            for each in wanted:
                self._listen(each)
        except OSError as error:
            self.close()
            raise SocketError(f"{each.path}: {error.strerror or error}") from None

    def close(self) -> None:
        for listener in self.sockets:
            listener.close()
        for path in self._paths:
            path.unlink(missing_ok=True)

    def _listen(self, wanted: Socket) -> None:
        wanted.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        remove_stale(wanted.path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sockets.append(listener)
        before = os.umask(0o177)  # nobody connects before mode and owner are right
        try:
            listener.bind(bytes(wanted.path))
        finally:
            os.umask(before)
        self._paths.append(wanted.path)
        shutil.chown(wanted.path, wanted.owner, wanted.group)
        wanted.path.chmod(wanted.mode)
        if wanted.selinux_label:
            xattr.set(wanted.path, SELINUX, wanted.selinux_label.encode())
        listener.listen(BACKLOG)


@contextmanager
def listening_for_administrators(path: Path) -> Iterator[socket.socket]:
    """Make a stream socket at `path` to which only its owner and root may connect; remove it at the end.

    Raises SocketError.
    """
    made = []
    try:
        made = make_directory(path.parent)
        remove_stale(path, socket.SOCK_STREAM)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            listener.bind(bytes(path))
        finally:
            os.umask(before)
        listener.listen()
    except OSError as error:
        raise SocketError(f"{path}: {error.strerror or error}") from None
    try:
        with listener:
            yield listener
    finally:
        path.unlink(missing_ok=True)
        for directory in reversed(made):
            remove_directory(directory)


def make_directory(path: Path) -> list[Path]:
    """Make the directory `path` and those above it that are missing; return the ones made, marked."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o755)
        try:
            xattr.set(each, MARK, b"1", nofollow=True)
        except OSError:
            pass  # no such attributes there: the directory will stay
    return missing[::-1]


def remove_directory(path: Path) -> None:
    """Remove the directory if the broker made it and it is empty."""
    try:
        xattr.get(path, MARK, nofollow=True)
        path.rmdir()
    except OSError:
        pass


def remove_stale(path: Path, kind: socket.SocketKind = socket.SOCK_SEQPACKET) -> None:
    """Remove a socket on which nobody listens. Raises OSError (EADDRINUSE) when somebody does."""
    if not path.is_socket():
        return  # nothing there, or bind(2) will say what is in the way
    with socket.socket(socket.AF_UNIX, kind) as probe:
        try:
            probe.connect(bytes(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise OSError(errno.EADDRINUSE, "another broker listens there")
