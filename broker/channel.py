"""SOCK_SEQPACKET sockets in the event loop, for whole records.

The front takes no descriptor from callers. Closing one can take for ever (a file of a FUSE filesystem is flushed, a
socket may linger, a mount that was detached ends with it), and even a descriptor that was not asked for has to be
closed by whoever takes the record that it came with, or closes the connection last. So what a caller says is only
looked at here; a child of the mounter takes it, and is the last who has the connection.
"""

import asyncio
import os
import socket
from contextlib import suppress
from types import TracebackType

from fusermount3_proxy import wire

#: Bytes of a descriptor in a message: a C int of Linux.
_INT = 4


class HungUp(Exception):
    """The peer has closed its end."""


class Channel:
    """One socket, whose owner this is: leaving the ``with`` block closes it."""

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
        """Return the socket, which is the taker's to close from now on."""
        return socket.socket(fileno=self.socket.detach())

    async def receive(self) -> bytes:
        """Return the next record. Raises HungUp, and ProtocolError for a record that is too long."""
        data, _ = await self._next(0)
        return data

    async def receive_with_descriptors(self, most: int) -> tuple[bytes, list[int]]:
        """As `receive`; return the descriptors that came with the record, too, which are the taker's to close.

        Only for what the mounter says. More than `most` are a ProtocolError.
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
        """Return the next record, and whether descriptors came with it; leave it where it is. Raises as `receive`."""
        return await self._next(socket.MSG_PEEK)

    async def _next(self, how: int) -> tuple[bytes, bool]:
        while True:
            try:
                data, _, flags, _ = self.socket.recvmsg(wire.MAX_MESSAGE, 0, how)
                break
            except BlockingIOError:
                await self._readable()
            except ConnectionResetError:
                pass  # reported once: the peer went without reading all of ours, and what it said is still to come
            except OSError:
                raise HungUp from None
        wire.check_whole(flags & socket.MSG_TRUNC)
        if not data:
            raise HungUp
        return data, bool(flags & socket.MSG_CTRUNC)  # there is no room for descriptors, so they are "cut"

    async def closed(self) -> None:
        """Return when the peer has closed its end and nothing of what it said is left to be taken."""
        while True:
            try:
                await self.peek()
            except HungUp:
                return
            await asyncio.sleep(0.2)

    def send(self, record: bytes) -> None:
        """Send one record, now: a peer whose buffer is full has not read for long, and counts as gone.

        Raises HungUp.
        """
        try:
            self.socket.send(record, socket.MSG_NOSIGNAL)
        except OSError:
            raise HungUp from None

    def shut(self) -> None:
        """Tell the peer that it is over; it can say no more."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self.socket, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self.socket)
