"""FUSE connections as the kernel shows them to who has the privilege: in fusectl, and in /proc/PID/fdinfo.

A connection is a directory of fusectl, named by its device number. `waiting` in it is the number of requests that the
kernel has for the FUSE program, answered to nobody yet; `abort` ends the connection, so that all who wait get an error.
Both belong to the user of the mount (fs/fuse/control.c). Which process serves a connection, Linux tells in the fdinfo
of its /dev/fuse descriptor (fs/fuse/dev.c, fuse_dev_show_fdinfo). Nothing here asks a FUSE filesystem, so nothing
blocks. For the mounter's children.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from broker import syscalls

_READ = os.O_RDONLY | os.O_CLOEXEC
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_FUSE_DEVICE = "/dev/fuse"
_FDINFO = b"fuse_connection:\t"
#: Seconds between two looks at the number of waiting requests, when somebody waits for it to move. A program that takes
#: one request at a time shows a change only for as long as the kernel takes to send it the next.
_LOOK_AGAIN = 0.002


class Served(NamedTuple):
    """Who serves a connection: a process, and its descriptor."""

    pid: int
    descriptor: int


NOBODY = Served(0, 0)


class Connection:
    """One connection, of which it is sure that it still is the one that is meant."""

    def __init__(self, fusectl: int, device: int, inode: int | None = None) -> None:
        """Open its directory below `fusectl`; without `inode`, that of whichever it is now.

        Raises OSError, FileNotFoundError if another has its number now.
        """
        self._directory = os.open(f"{device}", _DIRECTORY, dir_fd=fusectl)
        if inode not in (None, os.fstat(self._directory).st_ino):
            self.close()
            raise FileNotFoundError(errno.ENOENT, "the connection is gone")

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._directory)

    def fileno(self) -> int:
        """Return the descriptor of its directory."""
        return self._directory

    def waiting(self) -> int:
        """Return how many requests wait to be answered. Raises FileNotFoundError when the connection has ended."""
        return int(_content("waiting", self._directory))

    def abort(self) -> None:
        """Abort it. This process has the rights of the mount's user from then on. Raises OSError.

        Only that user may write there; root may with CAP_DAC_OVERRIDE, which the mounter does without.
        """
        owner = os.stat("abort", dir_fd=self._directory)
        syscalls.setfsids(owner.st_uid, owner.st_gid)
        _abort(self._directory)


def exists(fusectl: int, device: int) -> bool:
    """Whether `device` is that of a FUSE filesystem."""
    return os.access(f"{device}", os.F_OK, dir_fd=fusectl)


def is_waited_for(fusectl: int, device: int) -> bool:
    """Whether a request waits to be answered in the connection of that device."""
    try:
        with Connection(fusectl, device) as connection:
            return connection.waiting() > 0
    except FileNotFoundError:
        return False


def abort_own(fusectl: int, proc: int, descriptor: int) -> None:
    """Abort the connection that a /dev/fuse descriptor of this process serves, with the rights of its user.

    Raises OSError; FileNotFoundError if it serves none.
    """
    device = served_device(proc, "self", descriptor)
    if device is None:
        raise FileNotFoundError(errno.ENOENT, "the descriptor serves no connection")
    directory = os.open(f"{device}", _DIRECTORY, dir_fd=fusectl)
    try:
        _abort(directory)
    finally:
        os.close(directory)


def _abort(directory: int) -> None:
    abort = os.open("abort", os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        os.write(abort, b"1")
    finally:
        os.close(abort)


def hangs(connection: Connection, seconds: float, called_off: Callable[[float], bool]) -> bool:
    """Return True once requests have waited in it for so many seconds and their number has not moved.

    `called_off` waits for as many seconds as it is told, and says whether nobody wants to know any more; then False.
    Raises FileNotFoundError when the connection has ended.
    """
    last = connection.waiting()
    moved = time.monotonic()
    while not called_off(_LOOK_AGAIN):
        now = connection.waiting()
        if now != last or not now:
            last, moved = now, time.monotonic()
        if time.monotonic() - moved >= seconds:
            return True
    return False


def survey(fusectl: int, proc: int, lines: bytes, search: bool) -> bytes:
    """Return what `plan.Surveyed` has, for the lines of `plan.StartSurvey`."""
    waiting: dict[int, int] = {}
    served: dict[int, Served] = {}
    for line in lines.splitlines():
        device, inode, pid, descriptor = map(int, line.split())
        try:
            with Connection(fusectl, device, inode) as connection:
                waiting[device] = connection.waiting()
        except OSError:
            continue  # it has ended
        if pid and served_device(proc, pid, descriptor) == device:
            served[device] = Served(pid, descriptor)
    if search:
        served = dict(descriptors(proc)) | served
    found = [(device, count, *served.get(device, NOBODY)) for device, count in waiting.items()]
    return b"".join(b"%d %d %d %d\n" % each for each in found)


def served_device(proc: int, pid: int | str, descriptor: int) -> int | None:
    """Return the device of the connection that a descriptor of a process serves; None if none."""
    try:
        data = _content(f"{pid}/fdinfo/{descriptor}", proc)
    except OSError:
        return None
    _, found, rest = data.partition(_FDINFO)
    return int(rest.partition(b"\n")[0]) if found else None


def descriptors(proc: int) -> Iterator[tuple[int, Served]]:
    """Yield the connection of each /dev/fuse descriptor on the machine, and whose it is."""
    for pid in processes(proc):
        for descriptor in _descriptors_of(proc, pid):
            device = served_device(proc, pid, descriptor)
            if device is not None:
                yield device, Served(pid, descriptor)


def served(proc: int, device: int) -> Served | None:
    """Return who serves the connection of that device; None if nobody who is to be seen in `proc`."""
    return next((each for number, each in descriptors(proc) if number == device), None)


def _descriptors_of(proc: int, pid: int) -> Iterator[int]:
    """Yield the /dev/fuse descriptors of a process."""
    try:
        directory = os.open(f"{pid}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
    except OSError:
        return  # it has ended
    try:
        for name in os.listdir(directory):
            if os.readlink(name, dir_fd=directory) == _FUSE_DEVICE:
                yield int(name)
    except OSError:
        pass  # it ends just now
    finally:
        os.close(directory)


def process_in(proc: int, mount_namespace: int) -> int:
    """Return the pidfd of a process in the mount namespace of that inode. Raises ProcessLookupError for none."""
    for pid in processes(proc):
        try:
            if os.stat(f"{pid}/ns/mnt", dir_fd=proc).st_ino == mount_namespace:
                return os.pidfd_open(pid)
        except OSError:
            pass
    raise ProcessLookupError(errno.ESRCH, "nobody is in the mount namespace")


def processes(proc: int) -> Iterator[int]:
    """Yield the pids of the processes that are to be seen in `proc`."""
    directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
    try:
        names = os.listdir(directory)
    finally:
        os.close(directory)
    return (int(name) for name in names if name.isdecimal())


def _content(path: str, directory: int) -> bytes:
    with open(os.open(path, _READ, dir_fd=directory), "rb", buffering=0) as file:
        return file.readall()
