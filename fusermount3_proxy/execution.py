"""Execution of a program that the user names: found as execvp(3) does, with the exit statuses of env(1) on failure."""

from errno import EACCES, ENOENT, ENOTDIR
from posix import X_OK, access, execve, stat

from fusermount3_proxy.failure import Failure, reason

#: Exit statuses: failure before execution; program found but not executable; program not found.
FAILED, NOT_EXECUTABLE, NOT_FOUND = 125, 126, 127

#: The search path if the environment has no PATH.
PATH = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_FILE_TYPE, _REGULAR = 0o170000, 0o100000


def find(program: bytes, environment: dict[bytes, bytes]) -> bytes:
    """Return the path of the file that `program` names, directly or through PATH. Raises Failure."""
    candidates = [program]
    if b"/" not in program:
        directories = environment.get(b"PATH", PATH).split(b":")
        candidates = [(directory or b".") + b"/" + program for directory in directories]
    problem = OSError(ENOENT, "")
    for path in candidates:
        try:
            _check(path)
            return path
        except OSError as error:
            if error.errno not in (ENOENT, ENOTDIR):
                problem = error
    raise _failure(program, problem)


def execute(path: bytes, words: list[bytes], environment: dict[bytes, bytes]) -> int:
    """Replace this process with the program at `path`; `words[0]` is its name. Raises Failure; never returns."""
    try:
        execve(path, words, environment)
    except OSError as error:
        raise _failure(path, error) from None


def _check(path: bytes) -> None:
    """Check that the file exists and may be executed. Raises OSError if not."""
    if stat(path).st_mode & _FILE_TYPE != _REGULAR or not access(path, X_OK):
        raise OSError(EACCES, "")


def _failure(program: bytes, error: OSError) -> Failure:
    status = NOT_FOUND if error.errno == ENOENT else NOT_EXECUTABLE
    return Failure(b"failed to execute %b: %b" % (program, reason(error)), status)
