"""Writes events, each once, also if it is to be told again at each look."""

import logging
from typing import Any

from lightkube import ApiError, AsyncClient

from fusermount3_broker.messages.untrusted_text import visible
from fusermount3_controller.api_errors import CONFLICT
from fusermount3_controller.cluster_cache import EVENT

#: Events that are known to be there, so they are not tried again.
_MOST_TOLD = 10000

_log = logging.getLogger(__name__)


class EventWriter:
    """Writes events; what can't be written is not tried again."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        #: Namespaces and names.
        self._told: set[tuple[str, str]] = set()

    async def write(self, event: dict[str, Any]) -> None:
        """Write an event (`events.event`), unless it is there. Raises httpx2.HTTPError, if nobody answers."""
        name = event["metadata"]["namespace"], event["metadata"]["name"]
        if name in self._told:
            return
        if len(self._told) >= _MOST_TOLD:
            self._told.clear()
        self._told.add(name)
        try:
            await self._client.create(EVENT(event))
        except ApiError as error:
            if error.status.code != CONFLICT:
                _log.warning("%s", visible(f"can't write an event: {error}"))
