"""Connections that are over and that no child of the mounter has: they are closed here, or by one.

The front may take what came without descriptors, and close what has nothing unread in it. To close descriptors can
take for ever (see `channel`), so that is a child's business. A flood of such connections must not become a flood of
processes: each account has one child at a time for all that have come together meanwhile, a second one only if they are
very many.
"""

import asyncio
import socket
from contextlib import suppress

from broker import log, syscalls
from broker.limits import AccountName
from broker.log import Log
from broker.operations import Mounter, MounterFailed

#: Connections that a child is given: descriptors of a record, but for the conversation.
_MOST_AT_ONCE = syscalls.SCM_MAX_FD - 1
#: Seconds that a child may take to close what came with them.
_SECONDS = 5
#: Seconds after a child's end before there is another one: it is one of those that operations wait for (`mounter`).
_PAUSE = 0.1
#: Records without descriptors that are taken from a connection before it is a child's business, too.
_MOST_TAKEN = 8
#: Plain numbers, for there may be very many connections.
_LOOK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
_CUT = int(socket.MSG_CTRUNC)


class Dismissals:
    def __init__(self, mounter: Mounter, write_log: Log) -> None:
        self._mounter = mounter
        self._log = write_log
        self._over: dict[AccountName, list[socket.socket]] = {}
        self._children: set[asyncio.Task[None]] = set()
        self._busy: set[AccountName] = set()

    def add(self, account: AccountName, connection: socket.socket) -> None:
        """Close `connection`, on which nothing can be said any more."""
        if _emptied(connection):
            connection.close()
            return
        over = self._over.setdefault(account, [])
        over.append(connection)
        if account not in self._busy or len(over) == _MOST_AT_ONCE:
            self._dismiss(account)

    def _dismiss(self, account: AccountName) -> None:
        """Have a child close the account's connections."""
        self._busy.add(account)
        child = asyncio.get_running_loop().create_task(self._have_closed(self._over.pop(account)))
        self._children.add(child)
        child.add_done_callback(lambda _: self._ended(account, child))

    async def _have_closed(self, over: list[socket.socket]) -> None:
        """Return a moment after the end of a child that has closed these connections; without one, close them here."""
        try:
            operation = await self._mounter.dismiss(over, _SECONDS)
        except MounterFailed as error:
            self._log(log.ERROR, str(error))
            return
        finally:
            for connection in over:
                connection.close()
        with operation:
            operation.hang_up()
            await operation.ended()
        await asyncio.sleep(_PAUSE)

    def _ended(self, account: AccountName, child: asyncio.Task[None]) -> None:
        self._children.discard(child)
        self._busy.discard(account)
        if account in self._over and not child.cancelled():
            self._dismiss(account)


def _emptied(connection: socket.socket) -> bool:
    """Whether nothing is unread in a connection on which nothing can be said any more; take what may be taken here."""
    with suppress(OSError):
        for _ in range(_MOST_TAKEN):
            try:
                data, cut = _peek(connection)
            except ConnectionResetError:  # reported once: the peer went without reading what it was told
                continue
            if cut:  # there is no room for descriptors
                return False
            if not data:
                return _at_end(connection)
            connection.recv(1, socket.MSG_DONTWAIT)
    return False


def _at_end(connection: socket.socket) -> bool:
    """Whether what looks like the end is none of an empty record's.

    That comes with its sender's credentials, which are "cut" for want of room (net/unix/af_unix.c, unix_dgram_recvmsg).
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    try:
        return _peek(connection) == (b"", False)
    finally:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)


def _peek(connection: socket.socket) -> tuple[bytes, bool]:
    data, _, flags, _ = connection.recvmsg(1, 0, _LOOK)
    return data, bool(flags & _CUT)
