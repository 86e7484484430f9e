"""What the cache knows of a cluster, and when: after lists, watches, and failures of both."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from httpx2 import HTTPError

from fusermount3_controller import rendering
from fusermount3_controller.cluster_cache import ClusterCache
from fusermount3_controller.node_index import NodeIndex
from fusermount3_controller.served_volumes import Kind, Known, missing
from tests.unit.controller.api_server import CLASSES, NAMESPACES, TEMPLATES, VOLUMES, ApiServer
from tests.unit.controller.cluster import user
from tests.unit.controller.samples import Manifest, claimed, inline, pod, template

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

CLAIM = "/api/v1/namespaces/team/persistentvolumeclaims/photos"
CLASS = {"provisioner": rendering.DRIVER, "parameters": {"volumeTemplate": "s3", "bucket": "photos"}}
SOURCE = {"driver": rendering.DRIVER, "volumeHandle": "photos", "volumeAttributes": {"volumeTemplate": "s3"}}
#: The modules whose objects stay.
KEEPING = ("cluster_cache", "kept_pods", "node_index", "packing")
EMPTY = (Kind.POD, Kind.ATTACHMENT, Kind.POD_VOLUME)
CLAIM_REF = {"namespace": "team", "name": "photos", "uid": "1"}
VOLUME = {
    "metadata": {"name": "pv"},
    "spec": {"mountOptions": ["ro"], "capacity": {"storage": "1Gi"}, "claimRef": CLAIM_REF, "csi": SOURCE},
}


@contextlib.asynccontextmanager
async def followed(server: ApiServer, resync: float = 60.0) -> AsyncIterator[ClusterCache]:
    async with server.client() as client:
        cache = ClusterCache(client, resync)
        task = asyncio.create_task(cache.follow())
        await until(cache.is_full)
        yield cache
        assert not task.done()
        task.cancel()


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.01)


async def filled() -> ApiServer:
    server = ApiServer()
    await server.put(f"{TEMPLATES}/s3", template())
    await server.put(f"{TEMPLATES}/old", template(name="old", image="{{ nothing }}"))
    await server.put(f"{CLASSES}/photos", CLASS)
    await server.put(f"{VOLUMES}/pv", VOLUME)
    await server.put(CLAIM, {"spec": {"storageClassName": "photos"}})
    await server.put(f"{NAMESPACES}/team", {"metadata": {"labels": {"a": "b"}}})
    return server


def test_it_is_full_when_all_is_listed() -> None:
    async def run() -> Known:
        server = await filled()
        async with followed(server) as cache:
            assert cache.age() < 10
            assert cache.sizes() == {**dict.fromkeys(Kind, 1), Kind.TEMPLATE: 2, **dict.fromkeys(EMPTY, 0)}
            return cache.known()

    known = asyncio.run(run())
    assert known.templates["s3"].parameters["bucket"].required
    assert known.unusable.keys() == {"old"} and "there is no 'nothing'" in known.unusable["old"]
    assert known.claims["team", "photos"] == {"spec": {"storageClassName": "photos"}}
    assert known.classes["photos"] == CLASS
    assert known.volumes["pv"] == VOLUME
    assert known.namespaces == {"team": {"metadata": {"labels": {"a": "b"}}}}
    assert missing(pod(claimed(), inline(), inline("x", template="old")), known) == set()


def test_it_is_not_full_before() -> None:
    async def run() -> None:
        async with ApiServer().client() as client:
            cache = ClusterCache(client)
            assert not cache.is_full()
            assert cache.age() == float("inf")

    asyncio.run(run())


def test_what_changes_is_known_soon_also_after_the_watch_is_lost() -> None:
    async def run() -> None:
        server = await filled()
        async with followed(server) as cache:
            await server.put(CLAIM, {"spec": {"storageClassName": "photos", "volumeName": "pv"}})
            await until(lambda: cache.known().claims["team", "photos"]["spec"].get("volumeName") == "pv")
            await server.remove(f"{VOLUMES}/pv")
            await until(lambda: not cache.known().volumes)
            await server.forget()
            await server.put(f"{TEMPLATES}/s4", template(name="s4"))
            await until(lambda: "s4" in cache.known().templates)

    asyncio.run(run())


def test_all_is_listed_again_from_time_to_time() -> None:
    async def run() -> None:
        server = await filled()
        async with followed(server, resync=0.05):
            await until(lambda: server.requests.count(VOLUMES) > 2)

    asyncio.run(run())


def test_what_is_heard_while_all_is_listed_again_is_known_at_once_and_stays() -> None:
    """With many objects, a list takes seconds, and says then what was."""

    async def run() -> None:
        server = await filled()
        heard: list[tuple[object, object]] = []
        async with followed(server, resync=0.05) as cache:
            cache.listen(lambda kind, before, after: heard.append((before, after)) if kind is Kind.CLASS else None)
            server.lists.clear()
            number = len(server.requests)
            await until(lambda: server.requests[number:].count(CLASSES) == 1)
            await server.put(f"{CLASSES}/new", CLASS | {"parameters": {}})
            await server.put(f"{CLASSES}/new", CLASS)
            await server.remove(f"{CLASSES}/photos")
            await until(lambda: list(cache.known().classes) == ["new"])
            server.lists.set()
            await until(lambda: server.requests[number:].count(CLASSES) == 2)
            assert list(cache.known().classes) == ["new"]
            await server.put(f"{CLASSES}/third", CLASS)
            await until(lambda: list(cache.known().classes) == ["new", "third"])
        first = CLASS | {"parameters": {}}
        assert heard == [(None, first), (first, CLASS), (CLASS, None), (None, CLASS)]

    asyncio.run(run())


def test_what_a_dead_watch_has_not_told_is_known_after_the_next_list() -> None:
    async def run() -> None:
        server = await filled()
        async with followed(server, resync=0.05) as cache:
            server.is_silent = True
            await server.put(f"{CLASSES}/new", CLASS)
            await server.remove(f"{CLASSES}/photos")
            await until(lambda: list(cache.known().classes) == ["new"])

    asyncio.run(run())


def test_what_is_not_known_yet_is_looked_up() -> None:
    """All of it is newer than the cache."""

    async def looked_up(server: ApiServer, pod: Manifest) -> Known:
        async with server.client() as client:
            return await ClusterCache(client).looked_up(lambda known: missing(pod, known))

    async def run() -> None:
        server = await filled()
        known = await looked_up(server, pod(claimed()))
        assert known.classes["photos"] == CLASS and list(known.templates) == ["s3"]
        assert server.requests == [CLAIM, f"{CLASSES}/photos", f"{TEMPLATES}/s3"]
        server.requests.clear()
        assert not (await looked_up(server, pod(claimed(claim="other")))).claims
        assert len(server.requests) == 1

    asyncio.run(run())


def test_what_is_known_is_not_looked_up() -> None:
    async def run() -> None:
        server = await filled()
        async with followed(server) as cache:
            server.requests.clear()
            await cache.looked_up(lambda known: missing(pod(claimed(), inline()), known))
        assert server.requests == []

    asyncio.run(run())


def test_a_pod_takes_less_than_a_kibibyte() -> None:
    """So a replica has room for ten thousand: its libraries take 60 MiB, and it is to stay below 100."""
    number = 1000

    async def run() -> int:
        server = await filled()
        for each in range(number):
            await server.put(f"/api/v1/namespaces/team/pods/app-{each}", user(f"app-{each}"))
        async with server.client() as client:
            cache, index = ClusterCache(client), NodeIndex()

            def hear(kind: Kind, before: object, after: object) -> None:
                list(index.change(kind, before, after))

            cache.listen(hear)
            tracemalloc.start()
            task = asyncio.create_task(cache.follow())
            await until(cache.is_full)
            gc.collect()
            mine = [tracemalloc.Filter(True, f"*/fusermount3_controller/{name}.py") for name in KEEPING]
            taken = sum(each.size for each in tracemalloc.take_snapshot().filter_traces(mine).statistics("filename"))
            tracemalloc.stop()
            assert len(index.users("n1")) == number
            task.cancel()
            return taken

    assert asyncio.run(run()) < 1024 * number


def test_whoever_looks_up_is_told_of_a_failure() -> None:
    async def run() -> None:
        server = await filled()
        server.is_broken = True
        async with server.client() as client:
            await ClusterCache(client).looked_up(lambda known: missing(pod(claimed()), known))

    with pytest.raises(HTTPError, match="etcd is gone"):
        asyncio.run(run())


def test_an_api_server_that_fails_is_asked_again() -> None:
    async def run() -> None:
        server = await filled()
        server.is_broken = True
        async with server.client() as client:
            cache = ClusterCache(client, provisioning=True)
            task = asyncio.create_task(cache.follow())
            await until(lambda: len(server.requests) == len(Kind))
            assert not cache.is_full()
            server.is_broken = False
            await until(cache.is_full)
            task.cancel()

    asyncio.run(run())
