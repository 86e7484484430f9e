"""The conversation of a mounter's child with the front: how a step fails, and when the conversation ends."""

import errno
import select
import signal
import socket
import struct
from contextlib import suppress

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.messages import mounter
from fusermount3_broker.messages.mounter import Record
from fusermount3_proxy import wire


class BadRequest(Exception):
    """The caller sent `count` descriptors instead of one opened with O_PATH, or one that was opened without it."""

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
    """The front or the caller is gone: no process waits for the operation any more."""


class Dismissed(Exception):
    """The front has refused the request."""


class Conversation:
    """The child's end of the conversation. The front hangs up when it ends or dies, so no wait lasts for ever."""

    def __init__(self, descriptor: int, seconds: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self.seconds = seconds

    def say(self, record: Record, *descriptors: int) -> None:
        """Send a record, with these descriptors. Raises HungUp."""
        ancillary = [rights(*descriptors)] if descriptors else []
        try:
            self._socket.sendmsg([mounter.dump(record)], ancillary, socket.MSG_NOSIGNAL)
        except OSError:
            raise HungUp from None

    def hear(self) -> Record:
        """Return the front's next record. Raises HungUp; Dismissed when there is nothing more to do."""
        try:
            record = mounter.load(self._socket.recv(wire.MAX_MESSAGE))
        except (OSError, wire.ProtocolError):
            raise HungUp from None
        if isinstance(record, mounter.LetGo):
            raise Dismissed
        return record

    def is_over(self, seconds: float) -> bool:
        """Wait up to `seconds`; return whether the front has hung up or sent a record that it has no reason to send."""
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        return bool(waiting.poll(1000 * seconds))

    def wait_for_end(self) -> None:
        """Wait until the front has hung up."""
        with suppress(OSError):
            while self._socket.recv(wire.MAX_MESSAGE):
                pass

    def fileno(self) -> int:
        """Return the descriptor; it hangs up when the front does."""
        return self._socket.fileno()

    def bounded(self, step: str, seconds: int = 0) -> "_Bounded":
        """Bound a step that may block: if it takes too long, the process is killed. Its OSError becomes a StepError."""
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


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next record and all descriptors that came with it. Raises OSError, ProtocolError."""
    data, ancillary = receive_all(connection)
    return data, wire.descriptors(ancillary)


def receive_all(connection: socket.socket) -> tuple[bytes, list[tuple[int, int, bytes]]]:
    space = socket.CMSG_SPACE(4 * syscalls.SCM_MAX_FD) + socket.CMSG_SPACE(_SIZE_OF_CREDENTIALS)
    data, ancillary, cut, _ = connection.recvmsg(wire.MAX_MESSAGE, space, socket.MSG_CMSG_CLOEXEC)
    wire.check_whole(cut)
    return data, ancillary


_SIZE_OF_CREDENTIALS = struct.calcsize("iII")


def rights(*descriptors: int) -> tuple[int, int, bytes]:
    return (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))
