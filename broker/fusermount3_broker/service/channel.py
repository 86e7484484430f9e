"""SOCK_SEQPACKET sockets in the event loop, for whole records.

The front receives no descriptor from callers. Closing one can block for ever (a file of a FUSE filesystem is flushed, a
socket may linger, a detached mount ends with it), and even an unrequested descriptor must be closed by the process that
receives its record, or that closes the connection last. So the front only peeks at a caller's record; a child of the
mounter receives it, and is the last process to hold the connection.
"""

import asyncio
import os
import socket
from contextlib import suppress
from types import TracebackType

from fusermount3_proxy import wire

#: Bytes of a descriptor in a message: a C int on Linux.
_INT = 4


class HungUp(Exception):
    """The peer has closed its end."""


def has_hung_up(connection: socket.socket) -> bool:
    """Return whether the peer has closed its end, and nothing that it has sent is left to be received."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


class Channel:
    """Owner of one socket: leaving the ``with`` block closes it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection

    def __enter__(self) -> "Channel":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.socket.close()

    def give_away(self) -> socket.socket:
        """Return the socket, which the caller of this method must close from now on."""
        return socket.socket(fileno=self.socket.detach())

    async def receive(self) -> bytes:
        """Return the next record. Raises HungUp, and ProtocolError for a record that is too long."""
        data, _ = await self._next(0)
        return data

    async def receive_with_descriptors(self, most: int) -> tuple[bytes, list[int]]:
        """Like `receive`, but also return the descriptors that came with the record, which the caller must close.

        Only for records of the mounter. More than `most` descriptors are a ProtocolError.
        """
        while True:
            try:
                data, ancillary, flags, _ = self.socket.recvmsg(
                    wire.MAX_MESSAGE, socket.CMSG_LEN(_INT * most), socket.MSG_CMSG_CLOEXEC
                )
                break
            except BlockingIOError:
                await self._readable()
            except OSError:
                raise HungUp from None
        descriptors = wire.descriptors(ancillary)
        try:
            wire.check_whole(flags)
            if not data:
                raise HungUp
        except (HungUp, wire.ProtocolError):
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return data, descriptors

    async def peek(self) -> tuple[bytes, bool]:
        """Return the next record, and whether descriptors came with it, without receiving it. Raises as `receive`."""
        return await self._next(socket.MSG_PEEK)

    async def _next(self, how: int) -> tuple[bytes, bool]:
        while True:
            try:
                data, _, flags, _ = self.socket.recvmsg(wire.MAX_MESSAGE, 0, how)
                break
            except BlockingIOError:
                await self._readable()
            except ConnectionResetError:
                pass  # reported once: the peer closed with records of ours unread; its own records follow
            except OSError:
                raise HungUp from None
        wire.check_whole(flags & socket.MSG_TRUNC)
        if not data:
            raise HungUp
        return data, bool(flags & socket.MSG_CTRUNC)  # no buffer for descriptors, so they are "cut"

    async def closed(self) -> None:
        """Return when the peer has closed its end and no record of it remains to be received."""
        while True:
            try:
                await self.peek()
            except HungUp:
                return
            await asyncio.sleep(0.2)

    def send(self, record: bytes) -> None:
        """Send one record without waiting: a peer whose buffer is full has not read for long, and counts as gone.

        Raises HungUp.
        """
        try:
            self.socket.send(record, socket.MSG_NOSIGNAL)
        except OSError:
            raise HungUp from None

    def shut(self) -> None:
        """Shut the connection down: the peer sees its end and can send nothing more."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        number = self.socket.fileno()  # with a socket object, the selector asks the kernel for both addresses each time
        loop.add_reader(number, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(number)
