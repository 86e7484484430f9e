"""The mountpoint: found with the caller's rights, working directory and root, and pinned.

The broker receives descriptors, never a path to resolve. The broker also decides which mountpoints are acceptable (a
directory or file that the caller may write); this module looks up a path as fusermount3 does: it resolves the
directory above, and keeps the last component as it is.
"""

from errno import EINVAL, ENAMETOOLONG
from posix import (
    O_CLOEXEC,
    O_DIRECTORY,
    O_NOFOLLOW,
    O_PATH,
    fchdir,
    getcwdb,
    getpid,
    getuid,
    open,
    readlink,
)

from fusermount3_proxy.failure import Failure, reason

#: From linux/magic.h.
PROC_SUPER_MAGIC = 0x9FA0
#: From linux/limits.h; PATH_MAX counts the NUL at the end.
NAME_MAX = 255
PATH_MAX = 4096


class Place:
    """A directory entry: the directory, opened O_PATH; the entry's name; the resolved path, for messages.

    If the directory can't be entered, `problem` says why, and the directory is not open: nothing can be found there.
    """

    __slots__ = ("directory", "name", "path", "problem")

    def __init__(self, directory: int, name: bytes, path: bytes, problem: OSError | None = None) -> None:
        self.directory = directory
        self.name = name
        self.path = path
        self.problem = problem


def locate(path: bytes) -> Place:
    """Return the entry that `path` names; the entry itself need not exist.

    Changes the working directory of the process. Raises Failure.
    """
    if not path:
        raise Failure(b"invalid mountpoint ''")
    try:
        if not path.startswith(b"/"):
            getcwdb()  # a removed directory has no path, and so nothing in it or above it has one
        return _locate(path)
    except OSError as error:
        raise Failure(b"bad mount point %b: %b" % (path, reason(error))) from None


def pin(place: Place) -> int:
    """Return the mountpoint at `place`, opened O_PATH, which sends no request to the filesystem mounted there.

    A symbolic link is pinned as such, and the broker refuses it; for root it is followed, as mount(2) does. Raises
    Failure.
    """
    flags = O_PATH | O_CLOEXEC | (O_NOFOLLOW if getuid() else 0)
    if place.path in _own_directories():
        raise Failure(b"mounting over filesystem type 0x%08x is forbidden" % PROC_SUPER_MAGIC)
    try:
        if place.problem:
            raise place.problem
        if len(place.path) >= PATH_MAX:
            raise OSError(ENAMETOOLONG, "")
        return open(place.name, flags, dir_fd=place.directory)
    except OSError as error:
        raise Failure(b"failed to access mountpoint %b: %b" % (place.path, reason(error))) from None


def _own_directories() -> tuple[bytes, ...]:
    """Return the directories that only this process may write (fs/proc/fd.c, proc_fd_permission).

    Any other process that checks whether the caller may write there, the broker included, finds that it may not,
    although the real obstacle is a different one.
    """
    own = b"/proc/%d" % getpid()
    return own + b"/fd", own + b"/map_files", b"%b/task/%d/fd" % (own, getpid())


def _locate(path: bytes) -> Place:
    """Do the work of `locate`. Raises OSError."""
    directory, slash, name = path.rstrip(b"/").rpartition(b"/")
    if name in (b"", b".", b".."):
        return _locate_directory(path)
    try:
        above = _enter(directory + slash or b".")
        return Place(above, name, getcwdb().rstrip(b"/") + b"/" + name)
    except (NotADirectoryError, PermissionError) as error:
        if not directory or (directory.endswith(b"/") and isinstance(error, NotADirectoryError)):
            raise
        return Place(-1, name, _resolve(directory) + b"/" + name, error)


def _resolve(path: bytes) -> bytes:
    """Return the path, without symbolic links, of a file that exists but can't be entered. Raises OSError."""
    while True:
        place = _locate(path)
        if place.problem:
            raise place.problem
        try:
            path = readlink(place.name)
        except OSError as error:
            if error.errno != EINVAL:
                raise
            return place.path


def _locate_directory(path: bytes) -> Place:
    """Do the work of `locate` for ``/`` or a path that ends in ``.`` or ``..``: resolve it whole."""
    _enter(path)
    path = getcwdb()
    return Place(_enter(b".."), path.rpartition(b"/")[2] or b".", path)


def _enter(path: bytes) -> int:
    """Make `path` the working directory; return a descriptor of it, opened O_PATH."""
    directory = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC)
    fchdir(directory)
    return directory
