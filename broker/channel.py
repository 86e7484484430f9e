"""SOCK_SEQPACKET sockets in the event loop: whole records with their descriptors, in and out."""

import asyncio
import os
import socket
from collections.abc import Sequence
from types import TracebackType

from fusermount3_proxy import wire


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

    async def receive(self) -> tuple[bytes, list[int]]:
        """Return the next record and its descriptors, which are the caller's to close.

        Raises HungUp, and ProtocolError for a record that did not fit; its descriptors are closed then.
        """
        while True:
            try:
                data, ancillary, flags, _ = self.socket.recvmsg(
                    wire.MAX_MESSAGE, wire.ANCILLARY_SPACE, socket.MSG_CMSG_CLOEXEC
                )
                break
            except BlockingIOError:
                await self._readable()
            except ConnectionResetError:
                pass  # reported once: the peer went without reading all of ours, and what it said is still to come
            except OSError:
                raise HungUp from None
        descriptors = wire.descriptors(ancillary)
        try:
            wire.check_whole(flags)
        except wire.ProtocolError:
            close_all(descriptors)
            raise
        if not data:
            close_all(descriptors)
            raise HungUp
        return data, descriptors

    def send(self, record: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send one record, now: a peer whose buffer is full has not read for long, and counts as gone.

        Raises HungUp.
        """
        try:
            socket.send_fds(self.socket, [record], list(descriptors), socket.MSG_NOSIGNAL)
        except OSError:
            raise HungUp from None

    async def closed(self) -> None:
        """Return when the peer has closed its end, or says something, which nobody expects of it."""
        await self._readable()

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self.socket, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self.socket)


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
