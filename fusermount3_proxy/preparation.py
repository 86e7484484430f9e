"""``run``: prepares a container into which nothing can be mounted, and executes the command there.

Two obstacles separate a FUSE program from the broker if the image is not prepared for the proxy. Programs with libfuse
3 or fuser give up unless they can open /dev/fuse, whatever it is. And they have to find this executable when they
search for their helper: libfuse in /usr/bin first, where the genuine one may be, then in PATH.

`run` prepares as much as it can. For the rest it prints a line that says what to do, and executes the command all the
same: not every program needs everything.
"""

import sys
from errno import EEXIST, ENOENT
from posix import (
    O_CLOEXEC,
    O_RDONLY,
    O_RDWR,
    close,
    environ,
    getpid,
    getuid,
    lstat,
    mkdir,
    open,
    read,
    readlink,
    rename,
    stat,
    symlink,
    unlink,
)

from fusermount3_proxy import arguments, execution
from fusermount3_proxy.failure import Failure, reason, say

DEVICE = b"/dev/fuse"
#: Stand-in for /dev/fuse: a program that tests for a character device finds one, and writes to it are discarded.
STAND_IN = b"/dev/null"
#: The variable with the path that libfuse opens instead of /dev/fuse, since 3.18; from 3.19 on it must be a character
#: device in /dev.
DEVICE_VARIABLE = b"FUSE_KERN_DEVICE"

#: mergerfs has its own libfuse, for which its package brings this helper.
OF_MERGERFS = b"mergerfs-fusermount"
#: The helpers that libfuse 3, libfuse 2 and mergerfs call, as in fusermount3_broker/injection/container_edits.py.
NAMES = (b"fusermount3", b"fusermount", OF_MERGERFS)
#: The directories in which FUSE programs search for their helper before they search PATH.
DIRECTORIES = (b"/usr/bin", b"/bin")
#: Candidates for a directory of links; the first writable one is used.
PLACES = (b"/run", b"/dev/shm", b"/tmp", b"/var/tmp")

_CAP_SYS_ADMIN = 21
_FILE_TYPE, _DIRECTORY, _WRITABLE_BY_OTHERS = 0o170000, 0o040000, 0o022

USAGE = b"""\
run [--] COMMAND ARGS...
Execute a command, after what FUSE programs need was prepared as far as it can be: /dev/fuse, and fusermount3,
fusermount and mergerfs-fusermount.
"""


def main(program: bytes, words: list[bytes]) -> int:
    """Prepare the container and execute the command. Raises Failure."""
    given, command = arguments.split(words, {})
    if arguments.HELP in given:
        say(1, USAGE)
        return 0
    if not command:
        raise Failure(b"run: missing command")
    if not getattr(sys, "frozen", False):
        raise Failure(b"run: only the static executable can stand in for fusermount3")
    environment = dict(environ)
    own = readlink(b"/proc/self/exe")
    for problem in (*prepare_device(environment), *prepare_helper(own, environment)):
        say(2, b"%b: %b\n" % (program, problem))
    return execution.execute(execution.find(command[0], environment), command, environment)


# /dev/fuse -----------------------------------------------------------------------------------------------------


def prepare_device(environment: dict[bytes, bytes]) -> list[bytes]:
    """Make /dev/fuse a file that can be opened, else point libfuse to another; return the messages to print."""
    problem = _problem_with_device()
    if problem and problem.errno == ENOENT:
        try:
            symlink(STAND_IN, DEVICE)
        except OSError as error:
            problem = problem if error.errno == EEXIST else error
        else:
            problem = _problem_with_device()
    if not problem:
        return []
    environment.setdefault(DEVICE_VARIABLE, STAND_IN)
    return [
        b"%b can't be opened or made: %b; a program with libfuse before 3.18, or with fuser, may need it: "
        b"start the container with -v %b:%b:ro" % (DEVICE, reason(problem), STAND_IN, DEVICE)
    ]


def _problem_with_device() -> OSError | None:
    try:
        close(open(DEVICE, O_RDWR | O_CLOEXEC))
        return None
    except OSError as error:
        return error


# fusermount3 ---------------------------------------------------------------------------------------------------


def prepare_helper(own: bytes, environment: dict[bytes, bytes]) -> list[bytes]:
    """Make FUSE programs find the executable `own` as their helper; return the messages to print."""
    directories = DIRECTORIES[:1] if _is_same(*DIRECTORIES) else DIRECTORIES
    problems: list[bytes] = []
    for directory in directories:
        for name in NAMES:
            problems += _take_place(directory + b"/" + name, own)
    if any(_is_missed(name, own, environment) for name in NAMES):
        directory_of_links = _make_links(own)
        if directory_of_links:
            environment[b"PATH"] = directory_of_links + b":" + environment.get(b"PATH", execution.PATH)
        else:
            problems.append(b"no fusermount3 in PATH: none of %b can be written" % b", ".join(PLACES))
    return problems


def _take_place(path: bytes, own: bytes) -> list[bytes]:
    """Make `path` a link to `own`, unless a genuine helper could mount here; return the messages to print."""
    if _is_same(path, own):
        return []
    if _may_have_privilege():
        problem = b"the container has CAP_SYS_ADMIN, so it may mount by itself"
    else:
        try:
            _replace(path, own)
            return []
        except OSError as error:
            problem = reason(error)
    if not _exists(path):
        return []  # then programs search PATH for it
    return [b"%b is another program, which programs with libfuse will use: %b" % (path, problem)]


def _replace(path: bytes, own: bytes) -> None:
    """Replace `path`, whatever it was, by a link to `own`. Raises OSError."""
    new = b"%b.%d" % (path, getpid())
    symlink(own, new)
    try:
        rename(new, path)
    except OSError:
        unlink(new)
        raise


def _may_have_privilege() -> bool:
    """Return whether a program that is setuid root has CAP_SYS_ADMIN here: see CapBnd in proc_pid_status(5)."""
    for line in _read(b"/proc/self/status").split(b"\n"):
        if line.startswith(b"CapBnd:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1)
    return False


def _is_missed(name: bytes, own: bytes, environment: dict[bytes, bytes]) -> bool:
    """Return whether a search for `name` in PATH misses `own`; false for mergerfs's helper if PATH has none."""
    try:
        return not _is_same(execution.find(name, environment), own)
    except Failure:
        return name != OF_MERGERFS


def _make_links(own: bytes) -> bytes:
    """Return a directory with links to `own` that only this user may write; empty if there is none."""
    for place in PLACES:
        directory = b"%b/fusermount3-proxy-%d" % (place, getuid())
        try:
            _make_directory(directory)
            for name in NAMES:
                if not _is_same(directory + b"/" + name, own):
                    _replace(directory + b"/" + name, own)
            return directory
        except OSError:
            pass  # try the next directory
    return b""


def _make_directory(path: bytes) -> None:
    """Make the directory. Raises OSError, also if it exists and other users may write it."""
    try:
        mkdir(path, 0o755)
    except FileExistsError:
        status = lstat(path)
        ours = status.st_uid == getuid() and not status.st_mode & _WRITABLE_BY_OTHERS
        if not ours or status.st_mode & _FILE_TYPE != _DIRECTORY:
            raise


# Files ---------------------------------------------------------------------------------------------------------


def _exists(path: bytes) -> bool:
    try:
        lstat(path)
        return True
    except OSError:
        return False


def _is_same(path: bytes, own: bytes) -> bool:
    """Return whether `path` is the file `own` or a copy of it."""
    try:
        one, other = stat(path), stat(own)
        if (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino):
            return True
        return one.st_size == other.st_size and _read(path) == _read(own)
    except OSError:
        return False


def _read(path: bytes) -> bytes:
    file = open(path, O_RDONLY | O_CLOEXEC)
    try:
        parts = []
        while part := read(file, 1 << 20):
            parts.append(part)
        return b"".join(parts)
    finally:
        close(file)
