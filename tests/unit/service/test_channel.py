"""SEQPACKET sockets in the event loop: whole records, no descriptors from any peer, and no waiting for a peer."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator

import pytest

from fusermount3_broker.service.channel import Channel, HungUp
from fusermount3_proxy import wire
from fusermount3_proxy.wire import ProtocolError
from tests.unit.fakes import open_descriptors


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with Channel(ours) as channel, theirs:
        yield channel, theirs


def receive(channel: Channel) -> bytes:
    return asyncio.run(channel.receive())


def peek(channel: Channel) -> tuple[bytes, bool]:
    return asyncio.run(channel.peek())


def take(channel: Channel) -> tuple[bytes, int]:
    """Take a record as the mounter's child does; return it, and the number of its descriptors."""
    data, descriptors, _, _ = socket.recv_fds(channel.socket, wire.MAX_MESSAGE, 253, socket.MSG_DONTWAIT)
    for each in descriptors:
        os.close(each)
    return data, len(descriptors)


def test_records_arrive_one_at_a_time(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    theirs.send(b"one")
    theirs.send(b"two")
    assert receive(channel) == b"one"
    assert receive(channel) == b"two"


@pytest.mark.parametrize("how", ["receive", "peek"])
def test_a_record_is_waited_for(ends: tuple[Channel, socket.socket], how: str) -> None:
    channel, theirs = ends

    async def wait_and_send() -> None:
        waiting: asyncio.Task[object] = asyncio.create_task(channel.receive() if how == "receive" else channel.peek())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        theirs.send(b"late")
        assert await waiting == (b"late" if how == "receive" else (b"late", False))

    asyncio.run(wait_and_send())


def test_waiting_can_be_cancelled_and_begun_again(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends

    async def cancel_and_wait_again() -> bytes:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await channel.receive()
        theirs.send(b"now")
        return await channel.receive()

    assert asyncio.run(cancel_and_wait_again()) == b"now"


def test_a_record_that_is_only_looked_at_stays_with_its_descriptors(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    before = open_descriptors()
    socket.send_fds(theirs, [b"one"], [0, theirs.fileno()])
    theirs.send(b"two")
    for _ in range(2):
        assert peek(channel) == (b"one", True)
    assert open_descriptors() == before
    assert take(channel) == (b"one", 2)
    assert peek(channel) == (b"two", False)
    assert receive(channel) == b"two"


@pytest.mark.parametrize("descriptors", [1, 4, 50, 253])
def test_no_descriptor_is_taken_from_anybody(ends: tuple[Channel, socket.socket], descriptors: int) -> None:
    channel, theirs = ends
    before = open_descriptors()
    socket.send_fds(theirs, [b"with"], [0] * descriptors)
    assert peek(channel) == (b"with", True)
    assert receive(channel) == b"with"
    assert open_descriptors() == before


def test_what_is_sent_arrives_without_descriptors(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    channel.send(b"plain")
    assert socket.recv_fds(theirs, 10, 4)[:2] == (b"plain", [])


def test_a_record_that_does_not_fit_is_refused_and_its_descriptors_not_taken(
    ends: tuple[Channel, socket.socket],
) -> None:
    channel, theirs = ends
    before = open_descriptors()
    socket.send_fds(theirs, [b"x" * (wire.MAX_MESSAGE + 1)], [0])
    for look in (peek, receive):
        with pytest.raises(ProtocolError, match="more than 65536 bytes"):
            look(channel)
    assert open_descriptors() == before
    theirs.send(b"next")
    assert receive(channel) == b"next"


def test_the_largest_record_fits(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    theirs.send(b"x" * wire.MAX_MESSAGE)
    assert len(peek(channel)[0]) == len(receive(channel)) == wire.MAX_MESSAGE


def test_a_peer_that_closes_has_hung_up(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    theirs.send(b"last")
    theirs.close()
    assert receive(channel) == b"last"
    with pytest.raises(HungUp):
        receive(channel)


def test_an_empty_record_is_as_hanging_up_and_leaks_nothing(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    before = open_descriptors()
    socket.send_fds(theirs, [b""], [0, 0])
    for look in (peek, receive):
        with pytest.raises(HungUp):
            look(channel)
    assert open_descriptors() == before


def test_a_peer_that_leaves_something_unread_has_hung_up(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    channel.send(b"never read")
    theirs.close()
    with pytest.raises(HungUp):
        receive(channel)


def test_what_a_peer_said_that_left_something_unread_still_comes(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    channel.send(b"never read")
    theirs.send(b"last")
    theirs.close()
    assert receive(channel) == b"last"
    with pytest.raises(HungUp):
        receive(channel)


def test_a_peer_has_closed_when_nothing_is_left_of_what_it_said(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends

    async def wait_for_the_end() -> None:
        closed = asyncio.create_task(channel.closed())
        await asyncio.sleep(0.01)
        assert not closed.done(), "it is still there"
        theirs.send(b"last")
        theirs.close()
        await asyncio.sleep(0.01)
        assert not closed.done(), "somebody is to take what it said"
        assert take(channel) == (b"last", 0)
        async with asyncio.timeout(10):
            await closed

    asyncio.run(wait_for_the_end())


def test_nothing_can_be_sent_to_a_peer_that_closed(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    theirs.close()
    with pytest.raises(HungUp):
        channel.send(b"x")


def test_a_peer_that_never_reads_counts_as_gone(ends: tuple[Channel, socket.socket]) -> None:
    channel, _ = ends
    with pytest.raises(HungUp):
        for _ in range(10_000):
            channel.send(b"x" * 1000)


def test_leaving_the_block_closes_the_socket() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        with Channel(ours):
            pass
        assert theirs.recv(1) == b""


# The end of a connection


def test_when_it_is_over_the_peer_is_told_and_can_say_no_more(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    before = open_descriptors()
    channel.send(b"last")
    socket.send_fds(theirs, [b"unwanted"], [0])
    channel.shut()
    assert (theirs.recv(10), theirs.recv(10)) == (b"last", b"")
    with pytest.raises(BrokenPipeError):
        theirs.send(b"more")
    assert take(channel) == (b"unwanted", 1), "whoever has the connection last is left with it"
    assert open_descriptors() == before


def test_a_peer_that_is_gone_is_not_told(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    channel.send(b"never read")
    theirs.close()
    channel.shut()
    channel.shut()
