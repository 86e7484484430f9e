"""A caller's socket connection: who the caller is, what its call may take, and how it is answered.

When the connection ends, for whatever reason, everything that it holds (descriptors, the conversation with the mounter)
is closed, which undoes a mount that was not committed.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from errno import EIO
from functools import partial

from fusermount3_broker.front import hung_connections
from fusermount3_broker.front.context import Front
from fusermount3_broker.front.decisions.limits import GONE, Account, LimitReached, too_many_operations
from fusermount3_broker.front.mounter_client import MounterFailed, Operation
from fusermount3_broker.front.peer import Peer, command_of, identify
from fusermount3_broker.front.slots import Slots
from fusermount3_broker.kernel import error_texts
from fusermount3_broker.messages import mounter
from fusermount3_broker.messages.refusal import Refusal
from fusermount3_broker.service import log
from fusermount3_broker.service.channel import Channel, HungUp
from fusermount3_proxy import wire
from fusermount3_proxy.wire import Reply

#: The longest refusal text that is sent: a refusal may quote as much as a whole message, and a reply has to hold it.
_LONGEST_TEXT = 16 * 1024


class CallerConnection:
    """A connection, and all that is known so far of the call on it; `call` carries that out.

    `id` is the request ID in the log and in messages to the user.
    """

    def __init__(self, front: Front, channel: Channel) -> None:
        self.id = secrets.token_hex(4)
        self.held = ExitStack()
        self._front = front
        self._channel = channel
        self._begun = time.monotonic()
        self._name = "request"
        self._operation: Operation | None = None
        self._account_name = GONE
        #: To be called when the socket connection is closed: until then it counts against the account.
        self._leave: Callable[[], None] = lambda: None
        self._caller: tuple[Peer, Account]
        self._known: dict[str, log.Value] = {}
        self._command = ""
        self._warnings: tuple[bytes, ...] = ()

    def enter(self) -> None:
        """Identify the caller and charge the call to its account.

        Does no more than necessary, because very many callers may be waiting. Raises Refusal, PeerGone.
        """
        try:
            peer = identify(self._channel.socket, self._front.open_proc, self._front.subordinates)
        except OSError as error:  # no descriptors left, for example
            raise Refusal(
                error.errno or EIO, f"the broker can't identify its caller: {error_texts.of(error)}".encode()
            ) from None
        self.held.callback(os.close, peer.pidfd)
        self._account_name = peer.account
        accounts = self._front.accounts
        account = accounts.enter(peer.account, self._front.configuration, self._begun)
        self._leave = partial(accounts.leave, account)
        self._caller = peer, account
        self._pause = account.pause(self._front.configuration, self._begun)

    async def wait_for_turn(self) -> None:
        """Pause if the account has made many requests just now, so that other accounts don't suffer."""
        if self._pause:
            await asyncio.sleep(self._pause)

    async def _begin(self, peer: Peer, start: mounter.Start, *descriptors: int) -> Operation:
        """Start an operation of the mounter as soon as a slot is free; it ends with the call at the latest.

        Raises MounterFailed, LimitReached.
        """
        slots = self._front.slots
        await self._take_slot(slots)
        try:
            self._operation = await self._front.mounter.begin(
                start, [self._channel.socket.fileno(), peer.pidfd, *descriptors]
            )
        except BaseException:
            slots.give_back(peer.account)
            raise
        self.held.callback(self._end_operation)
        return self._operation

    def _end_operation(self) -> None:
        """Give back the operation's slot when its child has ended; `hung_connections` unblocks a child that hangs."""
        operation, self._operation = self._operation, None
        if operation:
            ended = hung_connections.ended(self._front, operation)
            self._front.slots.give_back_after(self._account_name, operation, ended)

    async def _take_slot(self, slots: Slots) -> None:
        """Take a slot for the caller's account. Raises LimitReached, before the caller gives up.

        A call takes a second one if its first operation was left to another child, which soon gives its slot back.
        """
        configuration = self._front.configuration
        left = 2 * configuration.deadlines.operation - (time.monotonic() - self._begun)
        try:
            await slots.take(self._account_name, max(left, 1))
        except TimeoutError:
            raise too_many_operations(self._account_name, configuration) from None

    def _describe(self, peer: Peer) -> None:
        """Look up the caller's command name for the log. This takes a while, so call it while the mounter works."""
        self._known["caller_command"] = self._command = command_of(peer.pid, self._front.open_proc)

    # Answers ---------------------------------------------------------------------------------------------------

    def turn_away(self, reached: LimitReached) -> None:
        """Refuse to admit the caller. `Server` writes one log record for many such refusals."""
        self.id = self._front.refusals.add(self._account_name, reached, self.id)
        self._front.limits_hit[reached.limit] += 1
        self._front.requests["request refused"] += 1
        self._answer(reached)

    def refuse(self, refusal: Refusal) -> None:
        """Send the refusal to the caller and log it."""
        if isinstance(refusal, LimitReached):
            self._front.limits_hit[refusal.limit] += 1
        self.decided(log.NOTICE, "refused", errno=refusal.errno, text=refusal.text)
        self._answer(refusal)

    def failed(self, error: MounterFailed) -> None:
        """Report a failure of the broker itself to the caller and to the log."""
        self._front.log(log.ERROR, str(error))
        self.refuse(Refusal(EIO, b"the broker's mounter takes no requests"))

    def _answer(self, refusal: Refusal) -> None:
        warnings = refusal.warnings or self._warnings
        self._send(Reply(self.id.encode(), refusal.errno, refusal.text[:_LONGEST_TEXT], warnings))

    def _send(self, reply: Reply) -> None:
        """Send the reply to the caller, unless it has hung up."""
        with suppress(HungUp):
            self._channel.send(wire.encode_reply(reply))

    async def let_go(self) -> None:
        """End the operation, so that it has ended before the caller reads the refusal."""
        if self._operation:
            await self._operation.let_go()

    def end(self) -> None:
        """Release everything. The caller's connection is closed before the conversation ends."""
        with self.held, self._channel:
            self._hang_up()

    def _hang_up(self) -> None:
        """Shut down the caller's connection; see `channel` for why a child of the mounter closes it last."""
        self._channel.shut()
        if self._operation and self._operation.alive:
            self._leave()
        else:
            self._front.closer.add(self._account_name, self._channel.give_away(), self._leave)

    def decided(self, priority: int, result: str, **fields: log.Value) -> None:
        """Write the call's only log record, and count the call."""
        took = time.monotonic() - self._begun
        self._front.requests[f"{self._name} {result.partition(':')[0]}"] += 1
        self._front.latency.labels(self._name).observe(took)
        message, milliseconds = f"{self._name} {result}", round(1000 * took, 2)
        self._front.log(priority, message, request_id=self.id, milliseconds=milliseconds, **self._known, **fields)
