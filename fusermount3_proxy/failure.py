"""The one way in which a call fails, and how its user is told."""

from posix import strerror, write


class Failure(Exception):
    """The call fails: nothing is mounted, the exit status is 1.

    `text` is what the user reads after the program's name; it may hold any bytes of a path. `status` is the exit
    status where it is another one.
    """

    def __init__(self, text: bytes, status: int = 0) -> None:
        super().__init__(text)
        self.text = text
        self.status = status


def reason(error: OSError) -> bytes:
    """Return what strerror(3) says of `error`, or what Python says where no system call failed."""
    return (strerror(error.errno) if error.errno else str(error)).encode()


def say(stream: int, text: bytes) -> None:
    """Write `text`; a stream that is closed or full is no reason for a call to fail."""
    try:
        write(stream, text)
    except OSError:
        pass
