"""The talk of a child of the mounter's with the front, how a step of its work fails, and when it is over."""

import errno
import select
import signal
import socket
import struct
from contextlib import suppress

from broker import plan, syscalls
from broker.plan import Record
from fusermount3_proxy import wire


class BadRequest(Exception):
    """The caller did not send one descriptor opened with O_PATH, but `count` of them, or one that is not so."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


class StepError(Exception):
    """A step of the operation failed with `errno`."""

    def __init__(self, errno: int, step: str) -> None:
        super().__init__(errno, step)
        self.errno = errno
        self.step = step


class HungUp(Exception):
    """The front or the caller has gone: the operation is nobody's any more."""


class Dismissed(Exception):
    """The front has refused the request."""


class Conversation:
    """The child's end of the talk with the front. The front hangs up when it is over, or dies: no wait is for ever."""

    def __init__(self, descriptor: int, seconds: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self.seconds = seconds

    def say(self, record: Record, *descriptors: int) -> None:
        """Raises HungUp."""
        ancillary = [rights(*descriptors)] if descriptors else []
        try:
            self._socket.sendmsg([plan.dump(record)], ancillary, socket.MSG_NOSIGNAL)
        except OSError:
            raise HungUp from None

    def hear(self) -> Record:
        """Return what the front says. Raises HungUp, and Dismissed when there is nothing more to do."""
        try:
            record = plan.load(self._socket.recv(wire.MAX_MESSAGE))
        except (OSError, wire.ProtocolError):
            raise HungUp from None
        if isinstance(record, plan.LetGo):
            raise Dismissed
        return record

    def is_over(self, seconds: float) -> bool:
        """Wait for so many seconds; whether the front has hung up, or said what it has no reason to say."""
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        return bool(waiting.poll(1000 * seconds))

    def wait_for_end(self) -> None:
        """Return when the front has hung up."""
        with suppress(OSError):
            while self._socket.recv(wire.MAX_MESSAGE):
                pass

    def fileno(self) -> int:
        """Return the descriptor; it hangs up when the front does."""
        return self._socket.fileno()

    def bounded(self, step: str, seconds: int = 0) -> "_Bounded":
        """A step that may block: the process is killed when it takes too long. An OSError in it is a StepError."""
        return _Bounded(step, seconds or self.seconds)


class _Bounded:
    def __init__(self, step: str, seconds: int) -> None:
        self._step = step
        self._seconds = seconds

    def __enter__(self) -> None:
        signal.alarm(self._seconds)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        signal.alarm(0)
        if isinstance(error, OSError):
            raise StepError(error.errno or errno.EIO, self._step) from None


def receive(connection: socket.socket, flags: int = 0) -> tuple[bytes, list[int]]:
    """Return the next record, and all descriptors that came with it. Raises OSError, ProtocolError."""
    data, ancillary = receive_all(connection, flags)
    return data, wire.descriptors(ancillary)


def receive_all(connection: socket.socket, flags: int = 0) -> tuple[bytes, list[tuple[int, int, bytes]]]:
    space = socket.CMSG_SPACE(4 * syscalls.SCM_MAX_FD) + socket.CMSG_SPACE(_SIZE_OF_CREDENTIALS)
    data, ancillary, cut, _ = connection.recvmsg(wire.MAX_MESSAGE, space, socket.MSG_CMSG_CLOEXEC | flags)
    wire.check_whole(cut)
    return data, ancillary


_SIZE_OF_CREDENTIALS = struct.calcsize("iII")


def rights(*descriptors: int) -> tuple[int, int, bytes]:
    return (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))
