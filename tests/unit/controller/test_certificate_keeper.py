"""The certificates in a cluster: replicas agree on them, the API server trusts them, connections see the newest."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import datetime
import ssl
from typing import TYPE_CHECKING

import pytest
from lightkube import ApiError

from fusermount3_controller import serving_certificates
from fusermount3_controller.certificate_keeper import CertificateKeeper, Names
from fusermount3_controller.serving_certificates import AUTHORITIES, AUTHORITY_LIFE, Certificates
from tests.unit.controller.api_server import NAMESPACE, ApiServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NAMES = Names(NAMESPACE, "tls", "webhooks", "controller.fusermount3-proxy.svc")
SECRET = f"/api/v1/namespaces/{NAMESPACE}/secrets/tls"
CONFIGURATION = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/webhooks"
OTHER = CONFIGURATION.replace("mutating", "validating")
NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)


@contextlib.asynccontextmanager
async def keepers(number: int) -> AsyncIterator[tuple[ApiServer, list[CertificateKeeper]]]:
    server = ApiServer()
    await server.put(SECRET, {"type": "Opaque", "later": 1})
    webhooks = [
        {
            "name": name,
            "later": 1,
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "clientConfig": {"later": 1, "service": {"name": "controller", "namespace": NAMESPACE}},
        }
        for name in ("a.dev", "b.dev")
    ]
    for path in (CONFIGURATION, OTHER):
        await server.put(path, {"webhooks": copy.deepcopy(webhooks)})
    async with server.client() as client:
        yield server, [CertificateKeeper(client, NAMES) for _ in range(number)]


def secret(server: ApiServer) -> dict[str, bytes]:
    return {name: base64.b64decode(text) for name, text in server.objects[SECRET]["data"].items()}


async def presented(port: int, authorities: bytes) -> bytes:
    """Connect as the API server does, with this trust; return the certificate."""
    context = ssl.create_default_context(cadata=authorities.decode())
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=NAMES.host)
    found: ssl.SSLObject = writer.get_extra_info("ssl_object")
    certificate = found.getpeercert(binary_form=True)
    writer.close()
    assert certificate is not None
    return certificate


def test_the_api_server_is_told_whom_to_trust_and_all_else_stays() -> None:
    async def run() -> None:
        async with keepers(1) as (server, (keeper,)):
            assert not keeper.is_trusted() and keeper.expiry() == 0
            await keeper.look(NOW)
            assert keeper.is_trusted() and keeper.expiry() > (NOW + 89 * DAY).timestamp()
            for webhook in (*server.objects[CONFIGURATION]["webhooks"], *server.objects[OTHER]["webhooks"]):
                assert base64.b64decode(webhook["clientConfig"]["caBundle"]) == secret(server)[AUTHORITIES]
                assert webhook["clientConfig"]["service"] == {"name": "controller", "namespace": NAMESPACE}
                assert webhook["later"] == webhook["clientConfig"]["later"] == 1
            assert (server.objects[SECRET]["later"], server.objects[SECRET]["type"]) == (1, "Opaque")

    asyncio.run(run())


def test_what_somebody_takes_away_is_put_back_and_else_nothing_is_written() -> None:
    async def run() -> None:
        async with keepers(1) as (server, (keeper,)):
            await keeper.look(NOW)
            written = {path: each["metadata"]["resourceVersion"] for path, each in server.objects.items()}
            await keeper.look(NOW)
            assert written == {path: each["metadata"]["resourceVersion"] for path, each in server.objects.items()}
            del server.objects[CONFIGURATION]["webhooks"][1]["clientConfig"]["caBundle"]
            await keeper.look(NOW)
            bundles = {each["clientConfig"]["caBundle"] for each in server.objects[CONFIGURATION]["webhooks"]}
            assert len(bundles) == 1

    asyncio.run(run())


def test_it_is_trusted_when_both_configurations_say_so() -> None:
    """Until then nobody may send it requests: the API server would refuse its certificate."""

    async def run() -> None:
        async with keepers(1) as (server, (keeper,)):
            other = server.objects[OTHER]
            await server.remove(OTHER)
            with pytest.raises(ApiError, match="not found"):
                await keeper.look(NOW)
            assert keeper.expiry() and not keeper.is_trusted()
            await server.put(OTHER, other)
            await keeper.look(NOW)
            assert keeper.is_trusted()

    asyncio.run(run())


def test_replicas_that_begin_at_once_agree() -> None:
    async def run() -> None:
        async with keepers(5) as (server, replicas):
            await asyncio.gather(*(each.look(NOW) for each in replicas))
            assert all(each.is_trusted() for each in replicas)
            for path in (CONFIGURATION, OTHER):
                bundles = {each["clientConfig"]["caBundle"] for each in server.objects[path]["webhooks"]}
                assert [base64.b64decode(each) for each in bundles] == [secret(server)[AUTHORITIES]]
            servers = [await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=r.context) for r in replicas]
            ports = [each.sockets[0].getsockname()[1] for each in servers]
            assert len({await presented(port, secret(server)[AUTHORITIES]) for port in ports}) == 1
            for each in servers:
                each.close()

    asyncio.run(run())


def test_a_certificate_is_renewed_while_connections_are_made() -> None:
    async def run() -> None:
        async with keepers(1) as (server, (keeper,)):
            await keeper.look(NOW)
            listening = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=keeper.context)
            port = listening.sockets[0].getsockname()[1]
            trusted = secret(server)[AUTHORITIES]
            seen, done = set(), asyncio.Event()

            async def connect() -> None:
                while not done.is_set():
                    seen.add(await presented(port, trusted))

            connecting = asyncio.create_task(connect())
            for number in range(5):
                count = len(seen)
                old = await expire(server)
                await keeper.look(NOW + datetime.timedelta(seconds=number))
                assert Certificates.of(secret(server)) != old
                async with asyncio.timeout(10):
                    while len(seen) == count:
                        await asyncio.sleep(0.01)
            done.set()
            await connecting
            assert len(seen) == 6
            listening.close()

    async def expire(server: ApiServer) -> Certificates:
        """Have the Secret be of 61 days ago: of the same authority, but due."""
        current = Certificates.of(secret(server))
        assert current is not None
        old = serving_certificates._signed(current, NAMES.host, NOW - 61 * DAY)
        data = {name: base64.b64encode(text).decode() for name, text in old.data().items()}
        await server.put(SECRET, {**server.objects[SECRET], "data": data})
        return old

    asyncio.run(run())


def test_an_authority_is_renewed_and_no_connection_is_refused_meanwhile() -> None:
    """Two replicas notice one after the other, and the API server may still trust what it did before."""

    async def run() -> None:
        async with keepers(2) as (server, replicas):
            then = NOW - 4 * serving_certificates.SETTLE  # what they make is valid today
            authority = serving_certificates._new(NAMES.host, then - AUTHORITY_LIFE * 2 / 3 - DAY)
            first = serving_certificates._signed(authority, NAMES.host, then - DAY)
            data = {name: base64.b64encode(text).decode() for name, text in first.data().items()}
            await server.put(SECRET, {"data": data})
            listening = [await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=r.context) for r in replicas]
            ports = [each.sockets[0].getsockname()[1] for each in listening]
            trusted, seen = first.authorities, []
            for hour in range(4):
                before = trusted
                # The first one also looks again before the other one has noticed.
                for replica in (replicas[0], replicas[0], replicas[1]):
                    await replica.look(then + hour * serving_certificates.SETTLE)
                    trusted = bundle(server)
                    loaded = [port for port, each in zip(ports, replicas, strict=True) if each.is_trusted()]
                    for port in loaded:
                        seen += [await presented(port, before), await presented(port, trusted)]
            assert len(set(seen)) == 2
            assert trusted.count(b"BEGIN") == 1 and trusted not in first.authorities
            for each in listening:
                each.close()

    def bundle(server: ApiServer) -> bytes:
        (text,) = {each["clientConfig"]["caBundle"] for each in server.objects[CONFIGURATION]["webhooks"]}
        return base64.b64decode(text)

    asyncio.run(run())


def test_without_its_secret_it_makes_none() -> None:
    """It has no right to create Secrets."""

    async def run() -> None:
        async with keepers(1) as (server, (keeper,)):
            await server.remove(SECRET)
            with pytest.raises(ApiError, match="not found"):
                await keeper.look(NOW)
            assert not keeper.is_trusted()
            task = asyncio.create_task(keeper.keep(interval=0.01))
            await asyncio.sleep(0.1)
            await server.put(SECRET, {})
            async with asyncio.timeout(10):
                while not keeper.is_trusted():
                    await asyncio.sleep(0.01)
            task.cancel()

    asyncio.run(run())
