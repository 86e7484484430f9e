"""HTTP for monitoring: /metrics and /healthz on one listening socket, for GET only.

h11 parses the requests; this module keeps clients from becoming a burden. A connection carries one request and must
finish within a few seconds. The number of connections is small; when it is reached, a new client displaces the oldest
one, so silent clients can't lock others out. New clients are accepted at a pace that leaves the event loop to the
callers.
"""

import asyncio
import socket
from contextlib import suppress
from http import HTTPStatus
from typing import NamedTuple

import h11

from fusermount3_broker.front.context import Front
from fusermount3_broker.front.health import Health
from fusermount3_broker.front.metrics import Exposition
from fusermount3_broker.kernel import error_texts
from fusermount3_broker.service import log

#: The largest number of simultaneous connections.
PLACES = 8
#: Seconds between accepting two connections.
PACE = 0.01
#: Seconds for one connection, from start to end.
DEADLINE = 5.0
#: The largest size of a request line and its headers, in bytes.
LONGEST_REQUEST = 8192
#: Bytes to read after a client's request. If some stay unread, TCP may discard the answer.
LONGEST_REST = 65536


class Answer(NamedTuple):
    status: HTTPStatus
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"


class Endpoint:
    """Answers requests about `front`; `health` checks whether it can serve."""

    def __init__(self, front: Front, health: Health) -> None:
        self._front = front
        self._health = health
        self._exposition = Exposition(front)
        #: The connections, oldest first.
        self._tasks: dict[asyncio.Task[None], None] = {}

    async def serve(self, listener: socket.socket) -> None:
        """Serve on `listener` until cancelled, which also ends the connections."""
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError as error:  # no descriptors left, for example; this is temporary
                    self._front.log(log.ERROR, f"cannot accept a client of the metrics: {error_texts.of(error)}")
                    await asyncio.sleep(1)
                    continue
                if len(self._tasks) >= PLACES:
                    next(iter(self._tasks)).cancel()
                task = loop.create_task(self._serve_client(connection))
                self._tasks[task] = None
                task.add_done_callback(self._finished)
                await asyncio.sleep(PACE)
        finally:
            for task in self._tasks:
                task.cancel()

    def _finished(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()):
            self._front.log(log.ERROR, f"internal error: {error!r}")

    async def _serve_client(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, TimeoutError):
            async with asyncio.timeout(DEADLINE):
                await self._converse(connection)

    async def _converse(self, connection: socket.socket) -> None:
        """Read one request, answer it, and wait for the client to disconnect. Raises OSError."""
        loop = asyncio.get_running_loop()
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=LONGEST_REQUEST)
        try:
            request = await _request(connection, http)
            if request is None:
                return
            answer = await self._answer(request)
        except h11.RemoteProtocolError as error:
            status = HTTPStatus(error.error_status_hint)
            answer = Answer(status, f"{status.phrase}\n".encode())
        await loop.sock_sendall(connection, _encoded(http, answer))
        connection.shutdown(socket.SHUT_WR)
        for _ in range(LONGEST_REST // 4096):
            if not await loop.sock_recv(connection, 4096):
                return

    async def _answer(self, request: h11.Request) -> Answer:
        if request.method != b"GET":
            return Answer(HTTPStatus.METHOD_NOT_ALLOWED)
        match request.target.partition(b"?")[0]:
            case b"/metrics":
                accept = b",".join(value for name, value in request.headers if name == b"accept")
                content_type, text = self._exposition.text(accept.decode("ascii", "replace"))
                return Answer(HTTPStatus.OK, text, content_type)
            case b"/healthz":
                problem = await self._health.problem()
                status = HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK
                return Answer(status, f"{problem or 'ok'}\n".encode())
        return Answer(HTTPStatus.NOT_FOUND, b"/metrics and /healthz are here\n")


async def _request(connection: socket.socket, http: h11.Connection) -> h11.Request | None:
    """Return the request, or None if the client sends none. Raises h11.RemoteProtocolError, OSError."""
    loop = asyncio.get_running_loop()
    while (event := http.next_event()) is h11.NEED_DATA:
        http.receive_data(await loop.sock_recv(connection, 4096))
    return event if isinstance(event, h11.Request) else None


def _encoded(http: h11.Connection, answer: Answer) -> bytes:
    """Return the whole answer, encoded."""
    headers = [
        ("Content-Type", answer.content_type),
        ("Content-Length", str(len(answer.body))),
        ("Cache-Control", "no-store"),
        ("Connection", "close"),
    ]
    if answer.status is HTTPStatus.METHOD_NOT_ALLOWED:
        headers.append(("Allow", "GET"))
    response = h11.Response(status_code=answer.status, headers=headers, reason=answer.status.phrase)
    parts = (response, h11.Data(data=answer.body), h11.EndOfMessage())
    return b"".join(http.send(part) or b"" for part in parts)
