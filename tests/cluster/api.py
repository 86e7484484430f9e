"""An asynchronous client of a node's API server, with its administrator's rights, for requests by the thousand."""

from __future__ import annotations

import json
import ssl
from typing import TYPE_CHECKING, Any, NamedTuple

from aiohttp import ClientSession, ClientTimeout, TCPConnector

from tests.cluster import configuration

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path
    from types import TracebackType

    from tests.kubernetes.objects import Object

MERGE_PATCH = "application/merge-patch+json"
_AT_ONCE = 100
"""Requests; the others wait."""


class Answer(NamedTuple):
    """What the API server has answered; a failure has an object of the kind Status."""

    status: int
    body: Any

    @property
    def good(self) -> bool:
        return self.status < 300


class Api:
    """The API server of the node with this root filesystem, to a process on its network."""

    def __init__(self, root: Path) -> None:
        directory = root / configuration.DIRECTORY.relative_to("/")
        context = ssl.create_default_context(cafile=str(directory / "ca.crt"))
        context.load_cert_chain(directory / "admin.crt", directory / "admin.key")
        self._context = context
        self._url = f"https://{configuration.ADDRESS}:6443"

    async def __aenter__(self) -> Api:
        # A watch ends when it is told.
        timeout = ClientTimeout(total=None, sock_connect=30)
        self._session = ClientSession(connector=TCPConnector(limit=_AT_ONCE, ssl=self._context), timeout=timeout)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        await self._session.close()

    async def ask(self, method: str, path: str, body: Object | None = None, form: str = "application/json") -> Answer:
        """Send one request; `path` with its parameters."""
        data = None if body is None else json.dumps(body)
        async with self._session.request(method, self._url + path, data=data, headers={"Content-Type": form}) as answer:
            return Answer(answer.status, await answer.json())

    async def made(self, path: str, *manifests: Object) -> list[Object]:
        """Create objects, one after the other; return them."""
        return [_good(await self.ask("POST", path, each)).body for each in manifests]

    async def listed(self, path: str) -> list[Object]:
        items: list[Object] = _good(await self.ask("GET", path)).body["items"]
        return items

    async def text(self, path: str) -> str:
        async with self._session.get(self._url + path) as answer:
            return await answer.text()

    async def watch(self, path: str) -> AsyncIterator[tuple[str, Object]]:
        """Yield the kind of each event and its object; first those that there are, as ADDED."""
        async with self._session.get(f"{self._url}{path}?watch=true", read_bufsize=1 << 24) as answer:
            while line := await answer.content.readline():
                event = json.loads(line)
                yield event["type"], event["object"]


def _good(answer: Answer) -> Answer:
    assert answer.good, answer
    return answer
