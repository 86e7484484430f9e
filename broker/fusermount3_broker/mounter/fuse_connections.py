"""FUSE connections as the kernel shows them to a privileged process: in fusectl and in /proc/PID/fdinfo.

A FUSE connection is a directory of fusectl, named by its device number. Its file `waiting` has the number of requests
that the FUSE program has not answered yet; its file `abort` ends the connection, and all waiting processes get an
error. Both belong to the user of the mount (fs/fuse/control.c). Since Linux 6.16, the fdinfo of a /dev/fuse descriptor
shows which connection its process serves (`features.CONNECTION`). Nothing here asks a FUSE filesystem, so nothing
blocks. For the mounter's children.
"""

import errno
import os
import select
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from fusermount3_broker.kernel import features, syscalls

_READ = os.O_RDONLY | os.O_CLOEXEC
#: The most bytes of one read.
_AT_ONCE = 4096
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_FUSE_DEVICE = "/dev/fuse"
#: Seconds between two reads of the number of waiting requests. A FUSE program that takes one request at a time shows a
#: change only for as long as the kernel takes to send it the next.
_LOOK_AGAIN = 0.002
#: Seconds for which a number of waiting requests must never be zero to prove that a process holds the descriptor.
_PROOF = 0.25


class Served(NamedTuple):
    """The server of a FUSE connection: a process and its descriptor."""

    pid: int
    descriptor: int


#: The device of a /dev/fuse descriptor that serves no FUSE connection, or no visible one; and of any other descriptor.
NOTHING, OTHER = -1, -2


class Connection:
    """One FUSE connection, which can't be mistaken for a later one with the same number."""

    def __init__(self, fusectl: int, device: int, inode: int | None = None) -> None:
        """Open its directory below `fusectl`; without `inode`, that of the connection that has the number now.

        Raises OSError; FileNotFoundError if another connection has its number now.
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
        return _waiting("waiting", self._directory)

    def abort(self) -> None:
        """Abort the connection. This process has the rights of the mount's user from then on. Raises OSError.

        Only that user may write to `abort`; root may with CAP_DAC_OVERRIDE, which the mounter does without.
        """
        owner = os.stat("abort", dir_fd=self._directory)
        syscalls.setfsids(owner.st_uid, owner.st_gid)
        _abort(self._directory)


def exists(fusectl: int, device: int) -> bool:
    """Return whether `device` is that of a FUSE filesystem."""
    return os.access(f"{device}", os.F_OK, dir_fd=fusectl)


def is_connection(fusectl: int, device: int, inode: int) -> bool:
    """Return whether a FUSE connection with this device number still exists, and not a later one with that number."""
    try:
        with Connection(fusectl, device, inode):
            return True
    except OSError:
        return False


def inode_of(fusectl: int, device: int) -> int:
    """Return the inode by which a connection can be told from later ones. Raises FileNotFoundError."""
    return os.stat(f"{device}", dir_fd=fusectl).st_ino


def alive(fusectl: int, devices: Iterable[int]) -> set[int]:
    """Return those of the connections in which requests wait for a while: a process holds their descriptor.

    A connection ends when the last holder closes the descriptor, and all its requests with it. But the kernel counts a
    request before it finds that the connection has ended (fs/fuse/dev.c, fuse_get_req), so a number from a single look
    may be that of processes that try a dead filesystem again and again.
    """
    give_up = time.monotonic() + _PROOF
    waited_for = {each for each in devices if _is_waited_for(fusectl, each)}
    while waited_for and time.monotonic() < give_up:
        time.sleep(_LOOK_AGAIN)
        waited_for = {each for each in waited_for if _is_waited_for(fusectl, each)}
    return waited_for


def _is_waited_for(fusectl: int, device: int) -> bool:
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
    """Return True once requests have waited in the connection for `seconds` without a change of their number.

    `called_off` waits for the seconds that it is given, and returns whether to stop waiting; then return False. Raises
    FileNotFoundError when the connection has ended.
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


def survey(fusectl: int, proc: int, lines: bytes) -> bytes:
    """Return the lines of `maintenance.Surveyed` for those of `maintenance.StartSurvey`."""
    found = []
    for line in lines.splitlines():
        device, inode, pid, descriptor = map(int, line.split())
        try:
            waiting = _waiting(f"{device}/waiting", fusectl)
            if inode_of(fusectl, device) != inode:  # looked at last: what was read before is not a later connection's
                continue
        except OSError:
            continue  # it has ended
        served = bool(pid) and served_device(proc, pid, descriptor) == device
        found.append(b"%d %d %d\n" % (device, waiting, served))
    return b"".join(found)


def search(
    proc: int, devices: bytes, pids: bytes, seconds: float, is_connected: Callable[[Served, int], bool]
) -> bytes:
    """Return the lines of `maintenance.Found` for those of `maintenance.StartSearch`: what was found in `seconds`."""
    wanted = set(map(int, devices.splitlines()))
    give_up = time.monotonic() + seconds
    found = []
    for device, server in descriptors(proc, map(int, pids.splitlines())):
        if device in wanted and is_connected(server, device):
            wanted.remove(device)
            found.append(b"%d %d %d\n" % (device, *server))
        if not wanted or time.monotonic() > give_up:
            break
    return b"".join(found)


def served_device(proc: int, pid: int | str, descriptor: int) -> int | None:
    """Return the device of the connection that a descriptor of a process serves; None if it serves none."""
    try:
        data = _content(f"{pid}/fdinfo/{descriptor}", proc)
    except OSError:
        return None
    _, found, rest = data.partition(features.CONNECTION)
    return int(rest.partition(b"\n")[0]) if found else None


def descriptors(proc: int, pids: Iterable[int]) -> Iterator[tuple[int, Served]]:
    """Yield the device that each descriptor of these processes serves, `NOTHING` or `OTHER`, and the descriptor."""
    for pid in pids:
        for descriptor, is_fuse in _descriptors_of(proc, pid):
            device = served_device(proc, pid, descriptor) if is_fuse else OTHER
            yield NOTHING if device is None else device, Served(pid, descriptor)


def is_connected(proc: int, server: Served, device: int) -> bool:
    """Return whether the descriptor's connection, which has the number `device`, has not ended.

    A descriptor shows the number even then, and a later connection may have got it. Only poll(2) of the descriptor
    itself tells (fs/fuse/dev.c, fuse_dev_poll), so this process has a copy for a moment; meanwhile the connection can't
    end. Return True where nobody may take copies (pidfd_getfd(2); Yama's ptrace_scope 3).

    If the process exchanges the descriptor meanwhile, closing the copy may block for as long as the process's own FUSE
    filesystem chooses. So this is only for operations that count against the account of that process.
    """
    try:
        pidfd = os.pidfd_open(server.pid)
    except OSError:
        return False  # it has ended
    try:
        copy = syscalls.pidfd_getfd(pidfd, server.descriptor)
    except OSError as error:
        return error.errno == errno.EPERM
    finally:
        os.close(pidfd)
    try:
        if served_device(proc, "self", copy) != device:
            return False
        asking = select.poll()
        asking.register(copy, 0)
        return not asking.poll(0)
    finally:
        os.close(copy)


def may_serve(
    proc: int, device: int, pids: Iterable[int], is_connected: Callable[[Served], bool] = lambda _: True
) -> Served | None:
    """Return which of these processes serves the connection of `device`; None if none does, as far as `is_connected`
    tells.

    Before Linux 6.16, the kernel shows no process's connection; then return one that has a descriptor of any.
    """
    possible = None
    for number, each in descriptors(proc, pids):
        if number == device and is_connected(each):
            return each
        if number == NOTHING:
            possible = each
    return possible


def _descriptors_of(proc: int, pid: int) -> Iterator[tuple[int, bool]]:
    """Yield the descriptors of a process, the last opened first, and whether each is one of /dev/fuse."""
    try:
        directory = os.open(f"{pid}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
    except OSError:
        return  # it has ended
    try:
        for name in sorted(map(int, os.listdir(directory)), reverse=True):
            yield name, os.readlink(f"{name}", dir_fd=directory) == _FUSE_DEVICE
    except OSError:
        pass  # it is just ending
    finally:
        os.close(directory)


def descriptors_in_flight(proc: int, connection: int) -> int:
    """Return how many descriptors wait in a Unix socket of this process; 0 where the kernel does not show it.

    See net/unix/af_unix.c, unix_show_fdinfo.
    """
    try:
        data = _content(f"self/fdinfo/{connection}", proc)
    except OSError:
        return 0
    _, found, rest = data.partition(b"scm_fds: ")
    return int(rest.partition(b"\n")[0]) if found else 0


def mount_namespace(proc: int, inode: int) -> int:
    """Return a descriptor of the mount namespace with this inode. Raises ProcessLookupError if no process is in it.

    A process may end during the search, succeeded by one that started after the processes were listed. So the namespace
    counts as empty only if a second search finds no process either.
    """
    for pid in (pid for _ in range(2) for pid in processes(proc)):
        name = f"{pid}/ns/mnt"
        try:
            if os.stat(name, dir_fd=proc).st_ino != inode:
                continue
            namespace = os.open(name, _READ, dir_fd=proc)
        except OSError:
            continue  # it has ended
        if os.fstat(namespace).st_ino == inode:
            return namespace
        os.close(namespace)
    raise ProcessLookupError(errno.ESRCH, "nobody is in the mount namespace")


def processes(proc: int) -> Iterator[int]:
    """Yield the pids of the processes that `proc` shows when the first pid is requested."""
    directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
    try:
        names = os.listdir(directory)
    finally:
        os.close(directory)
    yield from (int(name) for name in names if name.isdecimal())


def _waiting(path: str, directory: int) -> int:
    """Return the number in the file `waiting` of a connection. Raises FileNotFoundError when the connection has ended,
    OSError."""
    data = _content(path, directory)
    if not data:  # it has ended since the file was opened (fs/fuse/control.c, fuse_conn_waiting_read)
        raise FileNotFoundError(errno.ENOENT, "the connection has ended")
    return int(data)


def _content(path: str, directory: int) -> bytes:
    """Return what a file of the kernel has; with fewer system calls than a file object takes, for a survey reads two
    files for each mount. Raises OSError."""
    file = os.open(path, _READ, dir_fd=directory)
    try:
        data = part = os.read(file, _AT_ONCE)
        while len(part) == _AT_ONCE:  # a file of fusectl or fdinfo ends where a read returns less than was asked for
            data += (part := os.read(file, _AT_ONCE))
        return data
    finally:
        os.close(file)
