"""Has one replica at a time do what needs no second one, as `election` decides.

What is done is right if two do it: a request may be on its way when its sender stops to lead. The election saves the
work, and the writes, of those that would come too late.
"""

import asyncio
import datetime
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from httpx2 import HTTPError
from lightkube import ApiError, AsyncClient
from lightkube.generic_resource import create_namespaced_resource
from lightkube.types import PatchType

from fusermount3_broker.messages.untrusted_text import visible
from fusermount3_controller import election
from fusermount3_controller.api_errors import CONFLICT
from fusermount3_controller.election import Lease, Move

#: With the texts of its times, which lightkube's own would parse.
_LEASE: Any = create_namespaced_resource("coordination.k8s.io", "v1", "Lease", "leases")

_log = logging.getLogger(__name__)


class LeaderElection:
    """Holds a Lease that exists, in turn with others that have other identities; `clock` is one that nobody sets."""

    def __init__(
        self,
        client: AsyncClient,
        namespace: str,
        name: str,
        identity: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._clock = clock
        #: The Lease as it is, and since when this process has seen it so.
        self._seen: tuple[Lease, float] | None = None
        #: Until when this replica leads, unless it renews the Lease.
        self._until = 0.0

    def is_leader(self) -> bool:
        return self._clock() < self._until

    async def keep(self, lead: Callable[[], Awaitable[NoReturn]], retry: float = election.RETRY) -> NoReturn:
        """Call `lead` when this replica leads, and cancel it before another one does; again and again.

        When this is cancelled, the Lease is released once `lead` has ended. Raises what `lead` raises.
        """
        try:
            while True:
                await self._look(retry)
                if self.is_leader():
                    _log.info("leads, as %s", self._identity)
                    await self._lead(lead, retry)
                    _log.warning("does not lead any more: the Lease %s was not renewed in time", self._name)
                else:
                    await asyncio.sleep(retry)
        finally:
            try:
                await self.release()
            except (HTTPError, ApiError) as error:
                _log.warning("%s", visible(f"can't release the Lease {self._name}: {error!r}"))

    async def _lead(self, lead: Callable[[], Awaitable[NoReturn]], retry: float) -> None:
        """Call `lead` until the Lease is not renewed in time."""
        leading = asyncio.ensure_future(lead())
        try:
            while (left := self._until - self._clock()) > 0:
                await asyncio.wait([leading], timeout=min(retry, left))
                if leading.done():
                    leading.result()
                await self._look(self._until - self._clock())
        finally:
            leading.cancel()
            await asyncio.gather(leading, return_exceptions=True)

    async def _look(self, patience: float) -> None:
        """Renew or take the Lease, if that is this replica's to do and can be done in so many seconds."""
        try:
            async with asyncio.timeout(patience):
                await self.ask()
        except (TimeoutError, HTTPError, ApiError) as error:
            if not (isinstance(error, ApiError) and error.status.code == CONFLICT):
                _log.warning("%s", visible(f"can't ask for the Lease {self._name}: {error!r}"))

    async def ask(self) -> None:
        """Renew or take the Lease, if that is this replica's to do.

        Raises ApiError, also if another one was faster, and httpx2.HTTPError.
        """
        found = await self._client.get(_LEASE, self._name, namespace=self._namespace)
        lease, now = election.parse(found.to_dict()), self._clock()
        if self._seen is None or not election.is_same_term(self._seen[0], lease):
            self._seen = lease, now
        match election.move(lease, self._identity, now - self._seen[1]):
            case Move.WAIT:
                self._until = 0.0
            case Move.RENEW | Move.TAKE:
                patch = election.held(lease, self._identity, datetime.datetime.now(datetime.UTC))
                await self._write(patch)
                # Others count from when they see it, which is later.
                self._until = now + election.DEADLINE

    async def release(self) -> None:
        """Give the Lease up, if this replica leads, so that no other one has to wait. Raises as `ask` does."""
        if not self.is_leader():
            return
        self._until = 0.0
        found = await self._client.get(_LEASE, self._name, namespace=self._namespace)
        lease = election.parse(found.to_dict())
        if lease.holder == self._identity:
            await self._write(election.released(lease))

    async def _write(self, patch: dict[str, object]) -> None:
        await self._client.patch(_LEASE, self._name, patch, namespace=self._namespace, patch_type=PatchType.MERGE)
