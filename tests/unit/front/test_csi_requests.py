"""The front's answers to the CSI plugin about the state of volumes, with fake publications."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from fusermount3_broker.front.csi_requests import RequestHandler
from fusermount3_broker.front.health import Health
from fusermount3_broker.front.published_volumes import Publications
from fusermount3_broker.messages import csi, mounter
from fusermount3_broker.messages.refusal import Refusal
from fusermount3_proxy import wire

WELL = mounter.Stated(
    published=True,
    served=True,
    errno=0,
    total_bytes=9,
    free_bytes=8,
    available_bytes=7,
    total_inodes=6,
    free_inodes=5,
)
DEAD = WELL._replace(served=False, errno=errno.ENOTCONN)
HUNG = Refusal(errno.ETIMEDOUT, b"late")


class FakePublications(Publications):
    """Volumes by ID: the state of each at each target."""

    def __init__(self, volumes: dict[bytes, dict[bytes, mounter.Stated | Refusal]]) -> None:
        self._by_id = volumes

    def targets_of(self, id: bytes) -> list[bytes]:  # noqa: A002  # the name in the base class
        return list(self._by_id.get(id, {}))

    def is_block(self, target: bytes) -> bool:
        return target.startswith(b"plugins/")

    async def stat(self, target: bytes) -> mounter.Stated:
        (found,) = (targets[target] for targets in self._by_id.values() if target in targets)
        if isinstance(found, Refusal):
            raise found
        return found

    async def unpublish(self, target: bytes) -> None:
        await self.stat(target)


class FakeHealth(Health):
    """Always reports the same problem."""

    def __init__(self, problem: str) -> None:
        self._problem = problem

    async def process_problem(self) -> str:
        return self._problem


def answer_to(
    request: csi.Record,
    volumes: dict[bytes, dict[bytes, mounter.Stated | Refusal]],
    before: Iterable[csi.Record] = (),
    counted: Counter[str] | None = None,
    problem: str = "",
) -> csi.Record:
    """Return the answer to `request`, sent after the requests `before`; `counted` is the front's count of requests,
    `problem` the problem that its health reports."""

    async def ask() -> csi.Record:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        front: Any = SimpleNamespace(log=lambda *_, **__: None, requests=counted)
        with ours, theirs:
            ours.setblocking(False)
            handler = asyncio.create_task(
                RequestHandler(front, FakePublications(volumes), FakeHealth(problem), theirs).run()
            )
            loop = asyncio.get_running_loop()
            assert csi.load(await loop.sock_recv(ours, wire.MAX_MESSAGE)) == csi.Done(0)
            for each in (*before, request):
                await loop.sock_sendall(ours, csi.dump(each))
            answer = csi.load(await loop.sock_recv(ours, wire.MAX_MESSAGE))
            handler.cancel()
            await asyncio.wait([handler])
        return answer

    return asyncio.run(asyncio.wait_for(ask(), 30))


def trouble(target: bytes, volumes: dict[bytes, dict[bytes, mounter.Stated | Refusal]]) -> bytes:
    """Return what the front reports as wrong with the volume "v"; empty if nothing is."""
    answer = answer_to(csi.Stat(7, b"v", target), volumes)
    assert isinstance(answer, csi.Stated)
    assert answer.number == 7
    return answer.trouble


def test_a_volume_that_is_well_says_how_full_it_is() -> None:
    answer = answer_to(csi.Stat(7, b"v", b"a"), {b"v": {b"a": WELL}})
    assert answer == csi.Stated(7, True, 9, 8, 7, 6, 5, b"")


@pytest.mark.parametrize("how", [DEAD, HUNG], ids=["dead", "hung"])
def test_a_volume_in_trouble_says_why(how: mounter.Stated | Refusal) -> None:
    assert trouble(b"a", {b"v": {b"a": how}})


def test_a_broker_that_could_not_serve_says_why() -> None:
    assert answer_to(csi.Probe(7), {}) == csi.Done(7)
    refused = csi.Refused(7, csi.FAILED_PRECONDITION, b"the broker is ending")
    assert answer_to(csi.Probe(7), {}, problem="the broker is ending") == refused


def test_without_a_target_the_worst_is_told() -> None:
    assert not trouble(b"", {b"v": {b"a": WELL, b"b": WELL}, b"w": {b"c": DEAD}})
    assert trouble(b"", {b"v": {b"a": WELL, b"b": HUNG, b"c": WELL}})
    assert not trouble(b"a", {b"v": {b"a": WELL, b"b": HUNG}})


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EIO, errno.EAGAIN])
def test_what_may_be_well_when_kubelet_asks_again_is_not_final_for_it(number: int) -> None:
    """What is final for kubelet: pkg/volume/csi/csi_client.go, isFinalError."""
    answer = answer_to(csi.Unpublish(7, b"v", b"a"), {b"v": {b"a": Refusal(number, b"not yet")}})
    assert answer == csi.Refused(7, csi.UNAVAILABLE, b"not yet")


def test_what_the_plugin_has_refused_is_counted_with_the_rest() -> None:
    counted: Counter[str] = Counter()
    said = [csi.TurnedAway(each) for each in (b"publish", b"publish", b"unpublish", b"stat", b"nonsense")]
    answer_to(csi.Stat(7, b"v", b"a"), {}, said, counted)
    assert counted == {"publish refused": 2, "unpublish refused": 1}


@pytest.mark.parametrize("target", [b"", b"a", b"b"])
def test_a_volume_is_not_found_where_it_is_not(target: bytes) -> None:
    answer = answer_to(csi.Stat(7, b"v", target), {b"w": {b"a": WELL}, **({b"v": {b"c": WELL}} if target else {})})
    assert isinstance(answer, csi.Refused)
    assert (answer.number, answer.code) == (7, csi.NOT_FOUND)
