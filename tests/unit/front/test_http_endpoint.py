"""The HTTP endpoint, over real sockets: its answers, and how little a client can do to it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from fusermount3_broker.front import http_endpoint
from fusermount3_broker.front.health import Health
from fusermount3_broker.front.http_endpoint import DEADLINE, LONGEST_REQUEST, PLACES, Endpoint
from tests.unit.fronts import FrontWithoutMounter

#: Seconds within which a test must see what it waits for; far more than a busy machine needs.
PATIENCE = 60
GET = b"GET %b HTTP/1.1\r\nHost: broker\r\n\r\n"


class FakeHealth(Health):
    """Reports the problem that a test sets."""

    def __init__(self) -> None:
        self.said = ""

    async def problem(self) -> str:
        return self.said


class Client:
    """A test's connection to the endpoint."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body, once the endpoint has hung up."""
        head, _, body = (await self.reader.read()).partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        assert int(headers["content-length"]) == len(body)
        assert headers["connection"] == "close"
        return int(status.split()[1]), headers, body

    async def is_hung_up_on(self) -> bool:
        """Return whether the endpoint hangs up without an answer."""
        try:
            return await self.reader.read() == b""
        except ConnectionResetError:
            return True


class Served:
    """An endpoint that serves on a socket in `directory`, or on a port."""

    def __init__(self, directory: Path) -> None:
        self.part = FrontWithoutMounter(directory)
        self.health = FakeHealth()
        self.tasks = 0
        self._path = directory / "metrics.sock"
        self._port = 0
        self._clients: list[asyncio.StreamWriter] = []

    async def connect(self) -> Client:
        if self._port:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        else:
            reader, writer = await asyncio.open_unix_connection(self._path)
        self._clients.append(writer)
        return Client(reader, writer)

    async def ask(self, request: bytes) -> tuple[int, dict[str, str], bytes]:
        client = await self.connect()
        await client.say(request)
        return await client.answer()

    def run(self, body: Callable[[], Awaitable[None]], *, tcp: bool = False) -> None:
        async def main() -> None:
            with socket.socket(socket.AF_INET if tcp else socket.AF_UNIX) as listener:
                listener.bind(("127.0.0.1", 0) if tcp else bytes(self._path))
                listener.listen(64)
                self._port = listener.getsockname()[1] if tcp else 0
                serving = asyncio.create_task(Endpoint(self.part.front, self.health).serve(listener))
                try:
                    async with asyncio.timeout(PATIENCE):
                        await body()
                finally:
                    for writer in self._clients:
                        writer.close()
                    serving.cancel()
                    await asyncio.wait([serving])
                assert serving.cancelled()

        asyncio.run(main())
        assert self.part.logged == []


@pytest.fixture
def served(tmp_path: Path) -> Served:
    return Served(tmp_path)


@pytest.mark.parametrize("tcp", [False, True])
def test_metrics_and_health_are_told(served: Served, tcp: bool) -> None:
    async def body() -> None:
        status, headers, text = await served.ask(GET % b"/metrics")
        assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert b'fusermount3_broker_mounts{state="live"} 0.0\n' in text
        assert (await served.ask(GET % b"/metrics?x=y"))[0] == 200
        assert (await served.ask(GET % b"/healthz"))[::2] == (200, b"ok\n")

    served.run(body, tcp=tcp)


def test_an_accept_header_chooses_the_format(served: Served) -> None:
    async def body() -> None:
        accept = b"Accept: application/openmetrics-text; version=1.0.0\r\n"
        _, headers, text = await served.ask(b"GET /metrics HTTP/1.1\r\nHost: x\r\n" + accept + b"\r\n")
        assert headers["content-type"].startswith("application/openmetrics-text; version=1.0.0; charset=utf-8")
        assert text.endswith(b"# EOF\n")

    served.run(body)


def test_a_problem_is_503_and_the_reason(served: Served) -> None:
    async def body() -> None:
        served.health.said = "the mounter is away"
        assert (await served.ask(GET % b"/healthz"))[::2] == (503, b"the mounter is away\n")
        served.health.said = ""
        assert (await served.ask(GET % b"/healthz"))[0] == 200

    served.run(body)


@pytest.mark.parametrize("target", [b"/", b"/metrics/", b"//metrics", b"/%6detrics", b"http://x/metrics", b"*"])
def test_other_paths_are_not_found(served: Served, target: bytes) -> None:
    async def body() -> None:
        assert (await served.ask(GET.replace(b"%b", target)))[0] == 404

    served.run(body)


@pytest.mark.parametrize("method", [b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"CONNECT", b"get"])
def test_other_methods_are_not_allowed(served: Served, method: bytes) -> None:
    async def body() -> None:
        rest = b" /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
        status, headers, text = await served.ask(method + rest)
        assert (status, headers["allow"], text) == (405, "get", b"")

    served.run(body)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\n\r\n", 400),  # no Host:
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nA b: c\r\n\r\n", 400),
        (b"GET /met\x00rics HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),  # TLS
        (b"GET /" + b"a" * LONGEST_REQUEST, 431),
        (b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * LONGEST_REQUEST, 431),
        (b"GET /metrics HTTP/1.0\r\n\r\n", 200),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 1000, 200),  # pipelined: only one is answered
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n", 200),
    ],
)
@pytest.mark.parametrize("tcp", [False, True])
def test_every_request_gets_one_answer(served: Served, request_: bytes, status: int, tcp: bool) -> None:
    async def body() -> None:
        assert (await served.ask(request_))[0] == status

    served.run(body, tcp=tcp)


def test_a_request_may_come_in_pieces(served: Served) -> None:
    async def body() -> None:
        client = await served.connect()
        for byte in GET % b"/healthz":
            await client.say(bytes([byte]))
            await asyncio.sleep(0)
        assert (await client.answer())[0] == 200

    served.run(body)


@pytest.mark.parametrize("said", [b"", b"GET /metrics HTTP/1.1\r\nHost: x\r\n"])
def test_who_goes_away_early_leaves_nothing(served: Served, said: bytes) -> None:
    async def body() -> None:
        for _ in range(3 * PLACES):
            client = await served.connect()
            await client.say(said)
            client.writer.close()
        assert (await served.ask(GET % b"/healthz"))[0] == 200

    served.run(body)


@pytest.mark.parametrize("said", [b"", b"GET /metrics HTTP/1.1\r\n", GET % b"/metrics" + b"more"])
def test_who_holds_on_to_a_connection_loses_it_at_the_deadline(
    served: Served, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_endpoint, "DEADLINE", 0.2)

    async def body() -> None:
        client = await served.connect()
        await client.say(said)
        await client.reader.read()

    served.run(body)


def test_who_never_stops_talking_is_hung_up_on(served: Served) -> None:
    async def body() -> None:
        client = await served.connect()
        await client.say(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999999\r\n\r\n")
        with pytest.raises(ConnectionError):
            while True:
                await client.say(b"x" * 65536)

    served.run(body, tcp=True)


def test_silent_clients_in_all_places_keep_nobody_out(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_endpoint, "DEADLINE", 10 * PATIENCE)

    async def body() -> None:
        silent = [await served.connect() for _ in range(4 * PLACES)]
        for _ in range(10):
            assert (await served.ask(GET % b"/healthz"))[0] == 200
        assert await silent[0].is_hung_up_on(), "the one that has been there the longest has to go"

    served.run(body)


def test_who_does_not_read_the_answer_keeps_nobody_out(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_endpoint, "DEADLINE", 10 * PATIENCE)
    monkeypatch.setattr(
        "fusermount3_broker.front.http_endpoint.Exposition.text", lambda *_: ("text/plain", b"x" * 10_000_000)
    )

    async def body() -> None:
        for _ in range(4 * PLACES):
            client = await served.connect()
            await client.say(GET % b"/metrics")
        assert (await served.ask(GET % b"/healthz"))[0] == 200

    served.run(body)


def test_new_clients_come_at_a_pace(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that connects without end gets a limited number of answers."""
    monkeypatch.setattr(http_endpoint, "PACE", 0.05)

    async def body() -> None:
        begun = asyncio.get_running_loop().time()
        for _ in range(10):
            assert (await served.ask(GET % b"/healthz"))[0] == 200
        assert asyncio.get_running_loop().time() - begun >= 9 * 0.05

    served.run(body)


def test_an_answer_within_the_deadline_is_possible_while_the_mounter_is_asked() -> None:
    from fusermount3_broker.front import health

    assert health.PATIENCE < DEADLINE
