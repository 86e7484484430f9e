"""The one way in which a call fails."""

from posix import strerror


class Failure(Exception):
    """The call fails: nothing is mounted, the exit status is 1.

    `text` is what the user reads after the program's name; it may hold any bytes of a path.
    """

    def __init__(self, text: bytes) -> None:
        super().__init__(text)
        self.text = text


def reason(error: OSError) -> bytes:
    """Return what strerror(3) says of `error`, or what Python says where no system call failed."""
    return (strerror(error.errno) if error.errno else str(error)).encode()
