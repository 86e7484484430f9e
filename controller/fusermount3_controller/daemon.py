"""The process, until SIGTERM: the webhook's servers, and what keeps the cache, certificates and, if it leads, pods."""

import asyncio
import gc
import logging
import signal
import socket
import sys
import uuid
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, NoReturn

from aiohttp import web
from lightkube import AsyncClient

from fusermount3_controller.certificate_keeper import CertificateKeeper, Names
from fusermount3_controller.cluster_cache import ClusterCache
from fusermount3_controller.controller_metrics import Metrics
from fusermount3_controller.leader_election import LeaderElection
from fusermount3_controller.mount_pod_keeper import MountPodKeeper
from fusermount3_controller.pod_volume_keeper import PodVolumeKeeper
from fusermount3_controller.webhook import Webhook, health

#: Seconds after SIGTERM for which requests are still taken: so long may the API server take to learn of it.
LINGER = 5.0
#: Seconds that requests in flight may take then.
_SHUTDOWN = 10.0

_log = logging.getLogger(__name__)


class Settings(NamedTuple):
    """Where the servers listen, and the names of the objects that are the controller's own.

    `namespace`: empty, if it is that of the process itself. `mount_namespace`: of mount pods, and, with `provisioning`,
    of those that create and delete volumes.
    """

    address: str | None
    port: int
    health_port: int
    namespace: str
    service: str
    secret: str
    configuration: str
    lease: str
    mount_namespace: str
    provisioning: bool = False


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # It logs each request at this level.
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    # Its responses are in cycles, so only the garbage collector frees them, and that waits until there is a quarter as
    # much garbage as there are other objects. Without the libraries' own, that is soon, and does not take long.
    gc.freeze()
    asyncio.run(_serve(settings))


async def _serve(settings: Settings) -> None:
    client = AsyncClient(field_manager="fusermount3-controller")
    namespace = settings.namespace or str(client.namespace)
    host = f"{settings.service}.{namespace}.svc"
    keeper = CertificateKeeper(client, Names(namespace, settings.secret, settings.configuration, host))
    cache, metrics = ClusterCache(client, provisioning=settings.provisioning), Metrics()
    metrics.show_cache(cache.sizes, cache.age)
    metrics.show_certificate(keeper.expiry)
    election = LeaderElection(client, namespace, settings.lease, f"{socket.gethostname()}_{uuid.uuid4()}")
    metrics.show_leader(election.is_leader)
    keepers: list[MountPodKeeper | PodVolumeKeeper] = [MountPodKeeper(client, cache, metrics, settings.mount_namespace)]
    if settings.provisioning:
        keepers.append(PodVolumeKeeper(client, cache, metrics, settings.mount_namespace))
    webhook = Webhook(cache, metrics)
    ended = _ended()
    runners = [
        web.AppRunner(each, access_log=None, handle_signals=False, shutdown_timeout=_SHUTDOWN)
        for each in (webhook.application(), health(webhook, metrics, cache.is_full, keeper.is_trusted))
    ]
    leading = asyncio.create_task(election.keep(partial(_keep, keepers)))
    tasks = [leading, *(asyncio.create_task(each) for each in (cache.follow(), keeper.keep()))]
    try:
        for runner in runners:
            await runner.setup()
        await web.TCPSite(runners[0], settings.address, settings.port, ssl_context=keeper.context).start()
        await web.TCPSite(runners[1], settings.address, settings.health_port).start()
        _log.info("listening on port %d", settings.port)
        waiting = asyncio.create_task(ended.wait())
        done, _ = await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()  # raises, if what should never end has ended
        webhook.drain()
        leading.cancel()
        _log.info("ending, after the requests in flight")
        await asyncio.sleep(LINGER)
    finally:
        for runner in runners:
            await runner.cleanup()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.close()


async def _keep(keepers: Sequence[MountPodKeeper | PodVolumeKeeper]) -> NoReturn:
    async with asyncio.TaskGroup() as tasks:
        for each in keepers:
            tasks.create_task(each.keep())
    raise AssertionError("no keeper ends")


def _ended() -> asyncio.Event:
    """Return an event that is set when the process is told to end."""
    event = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, event.set)
    return event
