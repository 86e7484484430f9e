"""The process as a whole: it answers by HTTPS, leads in turn with others, and what it does when it is told to end."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import socket
import ssl
import sys
from typing import TYPE_CHECKING, NoReturn

import pytest
from aiohttp import ClientSession, TCPConnector

from fusermount3_controller import daemon
from fusermount3_controller.daemon import Settings
from tests.unit.controller.api_server import CLASSES, NAMESPACE, TEMPLATES, ApiServer
from tests.unit.controller.samples import Manifest, claimed, inline, pod, review, template
from tests.unit.controller.test_cluster_cache import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

NAME = "fusermount3-controller"
HOST = f"{NAME}.{NAMESPACE}.svc"
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{NAME}"
CONFIGURATION = f"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/{NAME}"


class Cluster:
    """An API server with what the process needs, and how it and others reach each other."""

    def __init__(self, api: ApiServer, kubeconfig: Path) -> None:
        self.api = api
        self.kubeconfig = kubeconfig
        self.port, self.health_port = _free_ports()

    def holder(self) -> str | None:
        """Return who holds the Lease; None before anybody has."""
        holder: str | None = self.api.objects[LEASE].get("spec", {}).get("holderIdentity")
        return holder

    async def told(self, path: str) -> tuple[int, str]:
        """Return the status and the text of an answer about the process's health."""
        async with ClientSession() as session, session.get(f"http://127.0.0.1:{self.health_port}{path}") as answer:
            return answer.status, await answer.text()

    async def is_ready(self) -> bool:
        with contextlib.suppress(OSError):
            return (await self.told("/readyz"))[0] == 200
        return False

    @contextlib.asynccontextmanager
    async def asking(self) -> AsyncIterator[Callable[[Manifest], asyncio.Task[Manifest]]]:
        """Yield what has a pod admitted as the API server does, on one connection after the other."""
        (webhook,) = self.api.objects[CONFIGURATION]["webhooks"]
        context = ssl.create_default_context(cadata=base64.b64decode(webhook["clientConfig"]["caBundle"]).decode())
        url = f"https://127.0.0.1:{self.port}/inject?timeout=9s"
        async with ClientSession(connector=TCPConnector(ssl=context)) as session:

            async def ask(manifest: Manifest) -> Manifest:
                async with session.post(url, json=review(manifest), server_hostname=HOST) as answer:
                    assert answer.status == 200
                    response: Manifest = (await answer.json())["response"]
                    return response

            yield lambda manifest: asyncio.create_task(ask(manifest))


@contextlib.asynccontextmanager
async def cluster(directory: Path) -> AsyncIterator[Cluster]:
    api = ApiServer()
    await api.put(f"{TEMPLATES}/s3", template())
    await api.put(f"{CLASSES}/other", {"provisioner": "other"})
    await api.put(f"/api/v1/namespaces/{NAMESPACE}/secrets/{NAME}-tls", {})
    await api.put(LEASE, {})
    webhooks: list[Manifest] = [
        {"name": "a.dev", "admissionReviewVersions": ["v1"], "sideEffects": "None", "clientConfig": {}}
    ]
    for path in (CONFIGURATION, CONFIGURATION.replace("mutating", "validating")):
        await api.put(path, {"webhooks": webhooks})
    async with api.client() as client:
        kubeconfig = directory / "kubeconfig"
        kubeconfig.write_text(_kubeconfig(str(client.config.cluster.server)))
        yield Cluster(api, kubeconfig)


def test_the_process_answers_by_https_and_after_sigterm_the_requests_in_flight(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path) as it:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", "from fusermount3_controller.cli import main; main()", "webhook"),
                *("--address=127.0.0.1", f"--port={it.port}", f"--health-port={it.health_port}"),
                env={**os.environ, "KUBECONFIG": str(it.kubeconfig)},
                stderr=asyncio.subprocess.PIPE,
            )
            try:
                async with asyncio.timeout(30):
                    while not await it.is_ready():
                        await asyncio.sleep(0.05)
                    while not it.holder() or "controller_leader 1.0" not in (await it.told("/metrics"))[1]:
                        await asyncio.sleep(0.05)
                async with it.asking() as ask, asyncio.timeout(30):
                    it.api.slowness = 2
                    asking = ask(pod(inline(), claimed()))
                    await asyncio.sleep(0.5)
                    process.send_signal(signal.SIGTERM)
                    assert "patch" in await asking
                    # Until the API server has noticed, new ones are answered, too.
                    await ask(pod())
                    assert await process.wait() == 0
            finally:
                if process.returncode is None:
                    process.kill()
                _, said = await process.communicate()
            assert "Pod team/app: injected" in said.decode(), said.decode()
            assert it.holder() == "", said.decode()
            assert "Traceback" not in said.decode(), said.decode()

    asyncio.run(run())


@contextlib.asynccontextmanager
async def serving(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Cluster, asyncio.Event, asyncio.Task[None]]]:
    """Yield a cluster, what tells the process to end, and what it does: a task of the tests' process."""
    ended = asyncio.Event()
    monkeypatch.setattr(daemon, "_ended", lambda: ended)
    async with cluster(directory) as it:
        monkeypatch.setenv("KUBECONFIG", str(it.kubeconfig))
        settings = Settings(
            address="127.0.0.1",
            port=it.port,
            health_port=it.health_port,
            namespace="",
            service=NAME,
            secret=f"{NAME}-tls",
            configuration=NAME,
            lease=NAME,
            mount_namespace="fuse-mounts",
        )
        task = asyncio.create_task(daemon._serve(settings))
        try:
            yield it, ended, task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def test_another_one_can_lead_while_the_last_requests_are_still_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "LINGER", 3600.0)

    async def run() -> None:
        async with serving(tmp_path, monkeypatch) as (it, ended, task):
            async with asyncio.timeout(30):
                while not (await it.is_ready() and it.holder()):
                    await asyncio.sleep(0.05)
            async with it.asking() as ask:
                ended.set()
                await until(lambda: it.holder() == "")
                assert "patch" in await ask(pod(inline()))
            assert await it.told("/readyz") == (503, "not ready\n")
            assert (await it.told("/healthz"))[0] == 200
            assert not task.done()

    asyncio.run(run())


def test_the_process_ends_when_what_a_leader_does_has_a_defect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts it again sees that, and another one leads."""

    async def fails(_: object) -> NoReturn:
        raise ValueError("a defect")

    monkeypatch.setattr(daemon, "_keep", fails)

    async def run() -> None:
        async with serving(tmp_path, monkeypatch) as (it, _, task):
            async with asyncio.timeout(30):
                with pytest.raises(ValueError, match="a defect"):
                    await task
            assert it.holder() == ""

    asyncio.run(run())


def _free_ports() -> list[int]:
    with socket.socket() as one, socket.socket() as two:
        for each in (one, two):
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in (one, two)]


def _kubeconfig(server: str) -> str:
    return json.dumps(
        {
            "clusters": [{"name": "c", "cluster": {"server": server}}],
            "users": [{"name": "u", "user": {"token": "x"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}],
            "current-context": "x",
        }
    )
