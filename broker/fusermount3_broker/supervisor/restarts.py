"""Start, end and restart of the supervisor's processes: failed starts, exit statuses, pauses between starts."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from fusermount3_broker.kernel import error_texts

#: Seconds in which a process must end after it has hung up.
_LAST_MOMENT = 5.0
#: Seconds before a process that has ended is restarted; doubled each time that it ends while starting.
_PAUSE = 0.05


class NotBegun(Exception):
    """A process did not begin to serve; the message says why. `killed`: the process itself did not cause this."""

    def __init__(self, text: str, *, killed: bool) -> None:
        super().__init__(text)
        self.killed = killed


class Backoff:
    """The pause before a process is restarted: longer each time, unless it has served successfully in between."""

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._pause = 0.0
        #: When to restart the process, by the monotonic clock; None while it runs.
        self.due: float | None = None

    @property
    def are_over(self) -> bool:
        """Whether the process is to be started now."""
        return self.due is not None and self.due <= time.monotonic()

    def seconds_left(self) -> float:
        return max(0.0, self.due - time.monotonic()) if self.due is not None else 0.0

    @contextmanager
    def starting(self, name: str) -> Iterator[None]:
        """Start the process in the block. Turns an OSError into NotBegun; either of them begins the next pause."""
        self.due = None
        try:
            yield
        except OSError as error:
            self.begin()
            raise NotBegun(f"the {name} can't be started: {error_texts.of(error)}", killed=False) from None
        except NotBegun:
            self.begin()
            raise

    def begin(self) -> None:
        """Begin the next pause: the process has ended."""
        self._pause = min(2 * self._pause, self._longest) if self._pause else _PAUSE
        self.due = time.monotonic() + self._pause

    def forget(self) -> None:
        """Reset the pause to the shortest: the process has served successfully."""
        self._pause = 0.0


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def start(module: str, *descriptors: int, arguments: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start a Python process of the broker, and pass it these descriptors and arguments. Raises OSError."""
    numbers = [str(each) for each in descriptors]
    return subprocess.Popen(
        [sys.executable, "-I", "-m", module, *numbers, *arguments],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


def ended(process: subprocess.Popen[bytes] | None, pauses: Backoff) -> int | None:
    """Return the exit status of a process, once, and begin the pause after it; None if the process still runs."""
    status = process.poll() if process and pauses.due is None else None
    if status is not None:
        pauses.begin()
    return status


def not_begun(name: str, process: subprocess.Popen[bytes]) -> NotBegun:
    """End a process that has not reported that it serves; return the exception to raise."""
    with suppress(subprocess.TimeoutExpired):
        status = process.wait(_LAST_MOMENT)
        return NotBegun(f"the {name} ended with status {status} when it was started", killed=status < 0)
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_LAST_MOMENT)
    return NotBegun(f"the {name} said nothing when it was started", killed=True)


def wait_for(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait until the process has ended, and kill it after `seconds`."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # it hangs closing descriptors from callers, and delays no one
            process.wait(_LAST_MOMENT)
