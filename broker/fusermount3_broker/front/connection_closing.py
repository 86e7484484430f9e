"""Close ended socket connections that no child of the mounter holds, here or in a child.

The front may receive records without descriptors, and close a connection that has nothing unread in it. Closing
descriptors can take for ever (see `channel`), so a child does that. A flood of such connections must not become a flood
of processes: each account has one child at a time, in a slot, for all connections that have ended meanwhile. While that
child hangs, or no slot is free, the other connections stay open and count against their account.
"""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from fusermount3_broker.front.decisions.limits import AccountName
from fusermount3_broker.front.mounter_client import Mounter, MounterFailed, Operation
from fusermount3_broker.front.slots import Slots
from fusermount3_broker.kernel import syscalls
from fusermount3_broker.service import log
from fusermount3_broker.service.log import Log

#: The most connections for one child: the descriptors that a record may have, except that of the conversation.
_MOST_AT_ONCE = syscalls.SCM_MAX_FD - 1
#: Seconds that a child may take to close the descriptors that came with them.
_SECONDS = 5
#: Seconds between the end of a child and the start of the next: operations wait for the same children
#: (`mounter.daemon`).
_PAUSE = 0.1
#: Seconds before the next attempt if no slot was free or the mounter failed.
_TRY_AGAIN = 1.0
#: Records without descriptors that the front receives from a connection before it leaves it to a child, too.
_MOST_TAKEN = 8
#: Plain integers, because there may be very many connections.
_LOOK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
_CUT = int(socket.MSG_CTRUNC)


class _Ended(NamedTuple):
    """An ended connection, and the function to call when it is closed."""

    connection: socket.socket
    closed: Callable[[], None]


class ConnectionCloser:
    """Closes ended connections: at once where nothing is unread, otherwise by a child of the mounter."""

    def __init__(self, mounter: Mounter, slots: Slots, write_log: Log) -> None:
        self._mounter = mounter
        self._slots = slots
        self._log = write_log
        self._ended: dict[AccountName, list[_Ended]] = {}
        self._working: dict[AccountName, asyncio.Task[None]] = {}

    def add(self, account: AccountName, connection: socket.socket, closed: Callable[[], None] = lambda: None) -> None:
        """Close `connection`, on which nothing can be sent any more; then call `closed`."""
        if _is_drained(connection):
            connection.close()
            closed()
            return
        self._ended.setdefault(account, []).append(_Ended(connection, closed))
        if account not in self._working:
            self._working[account] = asyncio.get_running_loop().create_task(self._dismiss_all(account))

    async def _dismiss_all(self, account: AccountName) -> None:
        """Have children close the account's connections, one child at a time."""
        try:
            while self._ended.get(account):
                try:
                    await self._dismiss(account)
                    pause = _PAUSE
                except TimeoutError:
                    pause = 0
                except MounterFailed as error:
                    self._log(log.ERROR, str(error))
                    pause = _TRY_AGAIN
                await asyncio.sleep(pause)
        finally:
            for each in self._ended.pop(account, []):  # the front is ending
                each.connection.close()
            del self._working[account]

    async def _dismiss(self, account: AccountName) -> None:
        """Have a child close as many of the account's connections as it takes; return when the child has ended.

        Raises TimeoutError if no slot is free, MounterFailed.
        """
        await self._slots.take(account, _TRY_AGAIN)
        over = self._ended[account][:_MOST_AT_ONCE]
        try:
            operation = await self._mounter.dismiss([each.connection for each in over], _SECONDS)
        except BaseException:
            self._slots.give_back(account)
            raise
        del self._ended[account][: len(over)]
        for each in over:
            each.connection.close()
        ended = asyncio.Event()
        self._slots.give_back_after(account, operation, _note_end(ended, operation))
        await ended.wait()
        for each in over:
            each.closed()


async def _note_end(ended: asyncio.Event, operation: Operation) -> None:
    """Set `ended` when the operation's child has ended."""
    try:
        await operation.ended()
    finally:
        ended.set()


def _is_drained(connection: socket.socket) -> bool:
    """Receive records without descriptors from an ended connection; return whether nothing is left unread."""
    with suppress(OSError):
        for _ in range(_MOST_TAKEN):
            try:
                data, cut = _peek(connection)
            except ConnectionResetError:  # reported once: the peer closed without reading all that was sent
                continue
            if cut:  # descriptors, for which there is no room here
                return False
            if not data:
                return _at_end(connection)
            connection.recv(1, socket.MSG_DONTWAIT)
    return False


def _at_end(connection: socket.socket) -> bool:
    """Return whether an apparent end of the connection is one, and not an empty record.

    An empty record has its sender's credentials, which are "cut" for want of room (net/unix/af_unix.c,
    unix_dgram_recvmsg).
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    try:
        return _peek(connection) == (b"", False)
    finally:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)


def _peek(connection: socket.socket) -> tuple[bytes, bool]:
    data, _, flags, _ = connection.recvmsg(1, 0, _LOOK)
    return data, bool(flags & _CUT)
