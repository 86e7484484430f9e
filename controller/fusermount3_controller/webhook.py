"""The server that the API server asks about pods and templates, and the one that kubelet and Prometheus ask how it is.

`admission` decides, by what `cluster_cache` knows. The API server says in each request how long it waits: what takes
longer than most of that is answered as a failure, of which the webhook's failurePolicy says what it means.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial

from aiohttp import web
from httpx2 import HTTPError

from fusermount3_broker.messages.untrusted_text import visible
from fusermount3_controller import admission, served_volumes
from fusermount3_controller.cluster_cache import ClusterCache
from fusermount3_controller.controller_metrics import FAILED, MALFORMED, Metrics
from fusermount3_controller.faults import Invalid

INJECT, CHECK = "/inject", "/check"
#: Bytes of a request: etcd limits an object to 1.5 MiB, which JSON may escape.
_LONGEST_REQUEST = 8 << 20
#: Seconds that an API server waits that does not say so (admissionregistration.k8s.io/v1, timeoutSeconds).
_DEFAULT_TIMEOUT = 10.0
#: The part of this time after which no answer is better than one that comes too late.
_PART = 0.8

#: Returns what an AdmissionReview asks, and the answer. Raises Invalid, if it is none, and HTTPError.
Decide = Callable[[object], Awaitable[tuple[admission.Request, admission.Answer]]]

_log = logging.getLogger(__name__)


class Webhook:
    """Answers AdmissionReviews; after `drain`, connections end with the next answer."""

    def __init__(self, cache: ClusterCache, metrics: Metrics) -> None:
        self._cache = cache
        self._metrics = metrics
        self._is_draining = False

    def application(self) -> web.Application:
        application = web.Application(client_max_size=_LONGEST_REQUEST)
        application.router.add_post(INJECT, partial(self._answer, self._injected))
        application.router.add_post(CHECK, partial(self._answer, self._checked))
        return application

    def drain(self) -> None:
        """Let clients go elsewhere with their next request."""
        self._is_draining = True

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    async def _answer(self, decide: Decide, request: web.Request) -> web.Response:
        begin = time.monotonic()
        try:
            async with asyncio.timeout(_deadline(request.query.get("timeout", ""))):
                result, response = await _reviewed(decide, request)
        except TimeoutError:
            result, response = FAILED, _failure(504, "the API server did not answer in time")
        self._metrics.count(result, time.monotonic() - begin)
        if self._is_draining:
            response.force_close()
        return response

    async def _injected(self, review: object) -> tuple[admission.Request, admission.Answer]:
        request = admission.about_pod(review)
        known = await self._cache.looked_up(partial(served_volumes.missing, request.manifest))
        return request, admission.injected(request, known)

    async def _checked(self, review: object) -> tuple[admission.Request, admission.Answer]:
        request = admission.about_template(review)
        return request, admission.checked(request)


async def _reviewed(decide: Decide, request: web.Request) -> tuple[str, web.Response]:
    try:
        asked, answer = await decide(json.loads(await request.read()))
    except HTTPError as error:
        return FAILED, _failure(503, f"can't ask the API server: {error!r}")
    except (Invalid, ValueError, RecursionError) as error:
        return MALFORMED, _failure(400, f"not an AdmissionReview that can be answered: {error}")
    if answer.result != admission.UNCHANGED:
        _log.info("%s", visible(f"{_name(asked.manifest)}: {answer.result}{answer.why and f': {answer.why}'}"))
    return answer.result, web.json_response(answer.review)


def health(webhook: Webhook, metrics: Metrics, *conditions: Callable[[], bool]) -> web.Application:
    """Return the application with /healthz, /readyz and /metrics; ready, when all conditions are true."""

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        if not webhook.is_draining and all(condition() for condition in conditions):
            return web.Response(text="ok\n")
        return web.Response(status=503, text="not ready\n")

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(body=metrics.exposition(), headers={"Content-Type": metrics.CONTENT_TYPE})

    application = web.Application()
    for path, handler in (("/healthz", healthz), ("/readyz", readyz), ("/metrics", exposition)):
        application.router.add_get(path, handler)
    return application


def _deadline(timeout: str) -> float:
    """Return the seconds for an answer, given the parameter `timeout` of the request, such as "5s"."""
    try:
        seconds = float(timeout.removesuffix("s"))
    except ValueError:
        seconds = _DEFAULT_TIMEOUT
    return _PART * min(max(seconds, 0.0), _DEFAULT_TIMEOUT)


def _name(manifest: admission.Manifest) -> str:
    metadata = manifest.get("metadata") or {}
    names = (metadata.get("namespace"), metadata.get("name") or metadata.get("generateName"))
    return f"{manifest['kind']} {'/'.join(str(name) for name in names if name)}"


def _failure(status: int, text: str) -> web.Response:
    _log.warning("%s", visible(text))
    return web.Response(status=status, text=f"{visible(text)}\n")
