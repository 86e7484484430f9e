"""The kernel's errors as people read them: strerror(3), without Python's number of the error before it."""

import os


def of(error: Exception) -> str:
    """Return what `error` says; for a failed system call the file, if it has one, and the reason."""
    if not isinstance(error, OSError) or not error.errno:
        return str(error)
    reason = error.strerror or os.strerror(error.errno)
    if not isinstance(error.filename, str | bytes):
        return reason
    return f"{os.fsencode(error.filename).decode('utf-8', 'backslashreplace')}: {reason}"
