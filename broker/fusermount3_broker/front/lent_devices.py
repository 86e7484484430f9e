"""Block volumes: they get the device that a program in a mount pod offers.

The program has opened the device, sends the descriptor to the socket of its pod's volume, which is a source, and stays
connected: as long as it is, the device is offered. The mounter has looked at the descriptor; what the front keeps is a
node that proves it (`messages.mounter.Offered`). If the broker is restarted, the program offers the device again.

A volume keeps the device that it has, as its containers do, until it is unpublished, or until the device is gone.
"""

import asyncio
import os
import time
from collections import Counter
from dataclasses import dataclass
from errno import ENODEV, ENOENT, EROFS

from fusermount3_broker.front.borrowed_volumes import RETIRES, RETIRING, Establish
from fusermount3_broker.front.context import Front
from fusermount3_broker.front.decisions import policy
from fusermount3_broker.front.decisions.limits import AccountName
from fusermount3_broker.front.model import Volume
from fusermount3_broker.front.tables.volume_table import Volumes
from fusermount3_broker.front.volume_operations import VolumeOperations
from fusermount3_broker.front.waiting_volumes import Wait, WaitingVolumes, not_ready
from fusermount3_broker.messages.mounter import Lent, Offered, StartLend, StartStat, StartUnpublish, Stated, Unpublished
from fusermount3_broker.messages.refusal import Refusal
from fusermount3_broker.service.channel import Channel, has_hung_up


@dataclass(eq=False)
class Offer:
    """A device that is offered for as long as the connection of its program lives, which `account` pays for.

    `node` is the descriptor that proves it to the mounter. It retires, as a source does, until `retires`, in monotonic
    seconds.
    """

    source: Volume
    said: Offered
    node: int
    connection: Channel
    account: AccountName
    watch: "asyncio.Task[None] | None" = None
    retires: float = 0.0


class Lending:
    """Gives block volumes the devices that sources offer. For use in a running event loop."""

    def __init__(self, front: Front, volumes: Volumes, operations: VolumeOperations, establish: Establish) -> None:
        self._front = front
        self._volumes = volumes
        self._operations = operations
        self._establish = establish
        self._offers: dict[bytes, Offer] = {}
        #: The sources whose device volumes are about to have.
        self._promised: Counter[bytes] = Counter()
        self._waiting = WaitingVolumes()

    # Offers ----------------------------------------------------------------------------------------------------

    def is_offered(self, target: bytes) -> bool:
        """Return whether the source at that target offers a device: the program that does so is still connected."""
        offer = self._offers.get(target)
        if offer and has_hung_up(offer.connection.socket):
            self.withdraw(target)
        return target in self._offers

    def offer(self, offer: Offer) -> None:
        """Take an offer, in place of an earlier one of the same volume."""
        self.withdraw(offer.source.target)
        self._offers[offer.source.target] = offer
        offer.watch = asyncio.get_running_loop().create_task(self._watch(offer))
        offer.watch.add_done_callback(lambda _: self._close(offer))
        self._waiting.tell()

    async def _watch(self, offer: Offer) -> None:
        await offer.connection.closed()
        if self._offers.get(offer.source.target) is offer:
            self.withdraw(offer.source.target)

    def _close(self, offer: Offer) -> None:
        """Close the connection of an offer, which nobody watches any more."""
        offer.connection.shut()
        self._front.closer.add(offer.account, offer.connection.give_away())

    def withdraw(self, target: bytes) -> None:
        """End what the source at that target offers, if it offers anything; who has the device keeps it."""
        if offer := self._offers.pop(target, None):
            os.close(offer.node)
            if offer.watch:
                offer.watch.cancel()

    def retire(self, target: bytes) -> int:
        """Give nobody else the device of the source at that target for `RETIRING` seconds.

        Return how many volumes are about to have it.
        """
        if offer := self._offers.get(target):
            offer.retires = time.monotonic() + RETIRING
        return self._promised[target]

    def end(self) -> None:
        """Withdraw all."""
        for target in list(self._offers):
            self.withdraw(target)

    # Block volumes ---------------------------------------------------------------------------------------------

    async def publish(self, volume: Volume) -> str:
        """Publish a block volume as soon as a device is offered; return the result in a word.

        Raises Refusal: EAGAIN if none was offered in time.
        """
        borrower = volume.as_borrower()
        if self._volumes.find(volume.target) and self._volumes.is_taken(volume.target):
            return await self._establish(borrower, self._kept)

        async def attempt(wait: Wait) -> str:
            if not self._lender(borrower):
                raise Refusal(ENOENT, b"")
            return await self._establish(borrower, lambda known, _: self._lend(known, wait))

        return await self._waiting.publish(volume.target, attempt, lambda: self._problem(borrower))

    def forget(self, target: bytes) -> None:
        """The volume at that target is being removed."""
        self.withdraw(target)
        self._waiting.forget(target)

    def _lender(self, borrower: Volume) -> Offer | None:
        """Return the offer that the volume would get now, if there is one."""
        now = time.monotonic()
        return next((offer for offer in self._offers_for(borrower) if offer.retires <= now), None)

    def _offers_for(self, borrower: Volume) -> list[Offer]:
        return [self._offers[each.target] for each in self._sources(borrower) if each.target in self._offers]

    def _sources(self, borrower: Volume) -> list[Volume]:
        sources = self._volumes.sources(borrower.keys)
        return policy.sources_for(borrower, sources, self._front.mount_namespaces)

    def _problem(self, borrower: Volume) -> bytes:
        if self._offers_for(borrower):
            return RETIRES
        return b"it offers no device yet" if self._sources(borrower) else b"none on this node offers the volume"

    async def _lend(self, borrower: Volume, wait: Wait | None) -> bool:
        """Make a block volume that has no device, as `Make`. Raises Refusal, with ENOENT if none is offered."""
        offer = self._lender(borrower)
        if not offer or (wait and wait.is_over):
            raise Refusal(ENOENT, b"")
        if offer.said.read_only and not borrower.read_only:
            raise Refusal(EROFS, b"its mount pod offers the device for reading only, and the volume is not readOnly")
        start = StartLend(self._operations.publish_seconds, offer.source.target, borrower.target, borrower.read_only)
        node = os.dup(offer.node)  # the offer may end meanwhile
        self._promised[offer.source.target] += 1
        try:
            async with self._operations.begin(b"cannot publish the volume", borrower, start, node) as operation:
                await operation.expect(Lent)
            self._volumes.note_taken(borrower.target)
        finally:
            os.close(node)
            self._promised -= Counter([offer.source.target])
        return True

    async def _kept(self, borrower: Volume, is_new: bool) -> bool:
        """Make a volume that has had a device, as `Make`: give it another one if that is gone."""
        if is_new:  # it was unpublished meanwhile
            raise not_ready(self._problem(borrower))
        start = StartStat(self._operations.seconds, borrower.target)
        async with self._operations.begin(b"cannot look at the volume", borrower, start) as operation:
            stated = await operation.expect(Stated)
        if stated.served:
            return False
        if stated.errno == ENODEV:  # no container may start with another disk that has its number
            take_away = StartUnpublish(self._operations.seconds, borrower.target, b"", b"", b"", borrowed=True)
            async with self._operations.begin(b"cannot publish the volume", borrower, take_away) as operation:
                await operation.expect(Unpublished)
        if not self._lender(borrower):
            raise not_ready(b"the device that it had offered is gone")
        return await self._lend(borrower, None)
