"""The exception with which a call fails, and the output of messages."""

from errno import ENOMEM
from posix import strerror, write


class Failure(Exception):
    """The call fails: nothing is mounted, the exit status is 1.

    `text` is the message after the program's name; it may hold any bytes of a path. `status` is the exit status if it
    is not 1.
    """

    def __init__(self, text: bytes, status: int = 0) -> None:
        super().__init__(text)
        self.text = text
        self.status = status


def reason(error: OSError | MemoryError) -> bytes:
    """Return the message of strerror(3) for `error`, or Python's own if no system call failed."""
    if isinstance(error, MemoryError):
        return strerror(ENOMEM).encode()
    return (strerror(error.errno) if error.errno else str(error)).encode()


def in_seconds(number: float) -> bytes:
    """Return a time as people write it: ``1 second``, ``2.5 seconds``."""
    return b"%g second" % number if number == 1 else b"%g seconds" % number


def say(stream: int, text: bytes) -> None:
    """Write `text`; ignore a stream that is closed or full."""
    try:
        write(stream, text)
    except OSError:
        pass
