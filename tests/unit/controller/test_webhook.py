"""The webhook as the API server, kubelet and Prometheus see it: answers, deadlines, readiness, metrics, its end."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from typing import TYPE_CHECKING, NamedTuple

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from fusermount3_controller.cluster_cache import ClusterCache
from fusermount3_controller.controller_metrics import Metrics
from fusermount3_controller.webhook import Webhook, health
from tests.unit.controller.api_server import TEMPLATES, ApiServer
from tests.unit.controller.samples import Manifest, claimed, inline, pod, review, template

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Served(NamedTuple):
    """A webhook, and clients for its two servers."""

    api: ApiServer
    webhook: Webhook
    asks: TestClient[web.Request, web.Application]
    asks_health: TestClient[web.Request, web.Application]


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[Served]:
    """A webhook whose cache is still empty: whatever it needs, it has to look up."""
    api, metrics = ApiServer(), Metrics()
    await api.put(f"{TEMPLATES}/s3", template())
    async with api.client() as client:
        cache = ClusterCache(client)
        webhook = Webhook(cache, metrics)
        metrics.show_cache(cache.sizes, cache.age)
        metrics.show_certificate(lambda: 1.0)
        applications = (webhook.application(), health(webhook, metrics, cache.is_full))
        async with TestClient(TestServer(applications[0])) as asks, TestClient(TestServer(applications[1])) as other:
            yield Served(api, webhook, asks, other)


def response_of(review: Manifest) -> Manifest:
    response: Manifest = review["response"]
    return response


def test_a_pod_gets_its_patch_and_a_refusal_its_sentence() -> None:
    async def run() -> None:
        async with served() as it:
            answer = await it.asks.post("/inject?timeout=5s", json=review(pod(inline())))
            assert (answer.status, answer.content_type) == (200, "application/json")
            patch = json.loads(base64.b64decode(response_of(await answer.json())["patch"]))
            assert "/spec/initContainers" in [each["path"] for each in patch]
            answer = await it.asks.post("/inject?timeout=5s", json=review(pod(inline(bucket="X"))))
            message = response_of(await answer.json())["status"]["message"]
            assert message.endswith("'X' does not match [a-z0-9.-]{3,63}")
            exposition = await (await it.asks_health.get("/metrics")).text()
            for result, number in (("injected", 1.0), ("refused", 1.0), ("unchanged", 0.0)):
                assert f'fusermount3_controller_admissions_total{{result="{result}"}} {number}' in exposition
            assert "fusermount3_controller_admission_seconds_count 2.0" in exposition
            assert 'fusermount3_controller_cached_objects{kind="StorageClass"} 0.0' in exposition
            assert "fusermount3_controller_certificate_expiry_timestamp_seconds 1.0" in exposition

    asyncio.run(run())


def test_a_template_is_accepted_or_refused() -> None:
    async def run() -> None:
        async with served() as it:
            for image, allowed in (("example/s3fs:1.0", True), ("{{ nothing }}", False)):
                answer = await it.asks.post("/check?timeout=5s", json=review(template(image=image)))
                assert response_of(await answer.json())["allowed"] == allowed
            assert (await it.asks.post("/check", json=review(pod()))).status == 400

    asyncio.run(run())


def test_what_can_not_be_answered_is_an_error_of_http() -> None:
    """So the API server does as failurePolicy says."""

    async def run() -> None:
        async with served() as it:
            for body in (b"", b"{}", b"[" * 100000, b"\xff", b'{"kind": "AdmissionReview"}'):
                assert (await it.asks.post("/inject", data=body)).status == 400
            it.api.is_broken = True
            answer = await it.asks.post("/inject", json=review(pod(claimed())))
            assert answer.status == 503
            assert "can't ask the API server" in await answer.text()
            it.api.is_broken, it.api.slowness = False, 30
            answer = await it.asks.post("/inject?timeout=1s", json=review(pod(claimed())))
            assert (answer.status, await answer.text()) == (504, "the API server did not answer in time\n")
            exposition = await (await it.asks_health.get("/metrics")).text()
            assert 'fusermount3_controller_admissions_total{result="failed"} 2.0' in exposition
            assert 'fusermount3_controller_admissions_total{result="malformed"} 5.0' in exposition

    asyncio.run(run())


def test_it_is_ready_when_the_cache_is_full_until_it_ends() -> None:
    async def run() -> None:
        api, metrics = ApiServer(), Metrics()
        async with api.client() as client:
            cache = ClusterCache(client)
            webhook = Webhook(cache, metrics)
            async with TestClient(TestServer(health(webhook, metrics, cache.is_full))) as asks:
                assert (await asks.get("/healthz")).status == 200
                assert (await asks.get("/readyz")).status == 503
                task = asyncio.create_task(cache.follow())
                async with asyncio.timeout(10):
                    while (await asks.get("/readyz")).status != 200:
                        await asyncio.sleep(0.01)
                webhook.drain()
                assert (await asks.get("/readyz")).status == 503
                task.cancel()

    asyncio.run(run())


def test_a_connection_ends_with_the_next_answer_when_the_process_is_to_end() -> None:
    async def run() -> None:
        async with served() as it:
            answer = await it.asks.post("/inject", json=review(pod()))
            assert "close" not in answer.headers.get("Connection", "")
            it.webhook.drain()
            answer = await it.asks.post("/inject", json=review(pod()))
            assert (answer.status, answer.headers["Connection"]) == (200, "close")

    asyncio.run(run())
