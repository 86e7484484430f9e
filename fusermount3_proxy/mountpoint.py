"""Where the FUSE program wants its filesystem: found with the caller's rights, directory and root, and pinned.

The broker gets descriptors, never a path to resolve. What a mountpoint must be like (a directory or file, the
caller's to write) is decided there; here a path is looked up, as fusermount3 does it: the directory above is
resolved, the last component is kept as it is.
"""

from errno import EINVAL, ENAMETOOLONG
from posix import (
    O_CLOEXEC,
    O_DIRECTORY,
    O_NOFOLLOW,
    O_PATH,
    fchdir,
    getcwdb,
    getuid,
    open,
    readlink,
)

from fusermount3_proxy.failure import Failure, reason

#: Of linux/limits.h; the second counts the NUL at the end.
NAME_MAX = 255
PATH_MAX = 4096


class Place:
    """A directory entry: the directory, opened O_PATH; the entry's name; the resolved path, for messages.

    Where the directory can't be entered, `problem` says why, and it is not open: nothing is to be found there.
    """

    __slots__ = ("directory", "name", "path", "problem")

    def __init__(self, directory: int, name: bytes, path: bytes, problem: OSError | None = None) -> None:
        self.directory = directory
        self.name = name
        self.path = path
        self.problem = problem


def locate(path: bytes) -> Place:
    """Return the entry that `path` names; the entry itself need not exist.

    The working directory of the process is moved. Raises Failure.
    """
    if not path:
        raise Failure(b"invalid mountpoint ''")
    try:
        if not path.startswith(b"/"):
            getcwdb()  # a directory that was removed has no path, and so nothing in it or above it
        return _locate(path)
    except OSError as error:
        raise Failure(b"bad mount point %b: %b" % (path, reason(error))) from None


def pin(place: Place) -> int:
    """Return the mountpoint at `place`, opened O_PATH, which asks nothing of what is mounted there.

    A symbolic link is pinned as such, and refused by the broker; for root it is followed, as mount(2) does.
    Raises Failure.
    """
    flags = O_PATH | O_CLOEXEC | (O_NOFOLLOW if getuid() else 0)
    try:
        if place.problem:
            raise place.problem
        if len(place.path) >= PATH_MAX:
            raise OSError(ENAMETOOLONG, "")
        return open(place.name, flags, dir_fd=place.directory)
    except OSError as error:
        raise Failure(b"failed to access mountpoint %b: %b" % (place.path, reason(error))) from None


def _locate(path: bytes) -> Place:
    """As `locate`. Raises OSError."""
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
    """Return the path of what exists and can't be entered, without symbolic links. Raises OSError."""
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
    """As `locate`, for a path that ends in ``.``, ``..`` or is ``/``: no name of its own, so it is resolved whole."""
    _enter(path)
    path = getcwdb()
    return Place(_enter(b".."), path.rpartition(b"/")[2] or b".", path)


def _enter(path: bytes) -> int:
    """Make `path` the working directory; return it, opened O_PATH."""
    directory = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC)
    fchdir(directory)
    return directory
