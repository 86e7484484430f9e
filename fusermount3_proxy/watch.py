"""The watcher of auto_unmount: a process that waits until the FUSE program is gone, and then unmounts what it left.

The watcher is the process that the FUSE program started; some programs wait for it to end. There is one for each such
mount, perhaps for months, so it must wait at almost no cost: it executes itself again, and `launcher.c` waits for the
comm socket to close before it starts an interpreter. State that must survive the execution travels in arguments and
environment.
"""

import sys
from _signal import SIG_BLOCK, pthread_sigmask, valid_signals
from _socket import socket
from errno import ETIMEDOUT
from posix import O_RDWR, chdir, close, closerange, dup, dup2, environ, execve, open, set_inheritable, setsid

from fusermount3_proxy import approach, client, mountpoint, wire
from fusermount3_proxy.failure import Failure

#: The comm socket's number, on which `launcher.c` waits. Once Python runs, the FUSE program is gone.
SOCKET_VARIABLE = b"FUSERMOUNT3PROXY_WATCH"
#: The id of the watched mount; empty for one that the FUSE program made without the proxy.
MOUNT_VARIABLE = b"FUSERMOUNT3PROXY_WATCHED_MOUNT"

#: Seconds to wait for a broker that is down just when the FUSE program ends.
PATIENCE = 3600.0
_LARGEST_DESCRIPTOR = 2**31 - 1


def has_waited() -> bool:
    """Return whether this process is a watcher whose FUSE program is gone."""
    return SOCKET_VARIABLE in environ


def become_watcher(program: bytes, comm: socket, path: bytes, mount: bytes) -> int:
    """Watch the mount at `path` until `comm` is closed, then unmount it if it is dead.

    `mount` is the id in the reply to its mount, or empty. Returns the exit status if it returns at all: where the
    program can execute itself, `unmount_dead` does the rest in the executed program.
    """
    watched = comm.fileno()
    if watched < 3:
        closerange(3, _LARGEST_DESCRIPTOR)  # there may be no room for another descriptor
        watched = dup(watched)
        set_inheritable(watched, True)
    _detach(watched)
    environment = {
        **environ,
        approach.VARIABLE: approach.socket_path(environ),  # which may come from elsewhere
        SOCKET_VARIABLE: b"%d" % watched,
        MOUNT_VARIABLE: mount,
    }
    if getattr(sys, "frozen", False):  # else it would execute some Python
        try:
            execve(b"/proc/self/exe", [program, b"--auto-unmount", b"--", path], environment)
        except OSError:
            pass  # no /proc here: then this interpreter waits
    _wait_for_close(watched)
    return unmount_dead(path, mount)


def unmount_dead(path: bytes, mount: bytes) -> int:
    """Unmount the filesystem at `path` if it is `mount` and dead; return the exit status, 0 in any case."""
    socket_path = approach.socket_path(environ)
    try:
        while True:
            place = mountpoint.locate(path)
            if place.problem:
                return 0
            request = wire.UnmountRequest(path, place.name, only_dead=True, mount=mount)
            answer = client.ask(socket_path, request, place.directory, PATIENCE)
            if answer.reply.errno != ETIMEDOUT:  # it hangs: a process that the FUSE program left holds it open
                return 0
    except Failure:
        return 0  # nothing reads a message any more


def _detach(comm: int) -> None:
    """Detach this process from the caller's terminal, signals, directory and pipes."""
    pthread_sigmask(SIG_BLOCK, valid_signals())
    try:
        setsid()
    except OSError:
        pass  # it is a session leader already
    chdir(b"/")
    closerange(3, comm)
    closerange(max(comm, 2) + 1, _LARGEST_DESCRIPTOR)
    try:
        null = open(b"/dev/null", O_RDWR)
    except OSError:
        closerange(0, 3)  # `launcher.c` opens something harmless in their place
        return
    for stream in range(3):
        dup2(null, stream)
    if null > 2:
        close(null)


def _wait_for_close(watched: int) -> None:
    comm = socket(fileno=watched)
    comm.settimeout(None)
    try:
        while comm.recv(256):
            pass
    except OSError:
        pass
