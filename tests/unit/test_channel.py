"""SEQPACKET sockets in the event loop: whole records with their descriptors, nothing leaked, nobody waited for."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.channel import Channel, HungUp, close_all
from fusermount3_proxy import wire
from fusermount3_proxy.wire import ProtocolError


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with Channel(ours) as channel, theirs:
        yield channel, theirs


def receive(channel: Channel) -> tuple[bytes, list[int]]:
    return asyncio.run(channel.receive())


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_records_arrive_one_at_a_time(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    theirs.send(b"one")
    theirs.send(b"two")
    assert receive(channel) == (b"one", [])
    assert receive(channel) == (b"two", [])


def test_a_record_is_waited_for(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends

    async def wait_and_send() -> tuple[bytes, list[int]]:
        waiting = asyncio.create_task(channel.receive())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        theirs.send(b"late")
        return await waiting

    assert asyncio.run(wait_and_send()) == (b"late", [])


def test_waiting_can_be_cancelled_and_begun_again(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends

    async def cancel_and_wait_again() -> tuple[bytes, list[int]]:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await channel.receive()
        theirs.send(b"now")
        return await channel.receive()

    assert asyncio.run(cancel_and_wait_again()) == (b"now", [])


def test_descriptors_come_with_their_record(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    socket.send_fds(theirs, [b"two"], [0, theirs.fileno()])
    data, descriptors = receive(channel)
    assert data == b"two"
    assert [os.fstat(each) for each in descriptors] == [os.fstat(0), os.fstat(theirs.fileno())]
    assert not any(os.get_inheritable(each) for each in descriptors)
    close_all(descriptors)


def test_what_is_sent_arrives_with_its_descriptors(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    channel.send(b"plain")
    channel.send(b"with", [0])
    assert socket.recv_fds(theirs, 10, 4)[:2] == (b"plain", [])
    data, descriptors, _, _ = socket.recv_fds(theirs, 10, 4)
    assert (data, len(descriptors)) == (b"with", 1)
    close_all(descriptors)


def test_more_descriptors_than_any_message_has_are_closed(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    before = open_descriptors()
    socket.send_fds(theirs, [b"many"], [0] * 50)
    with pytest.raises(ProtocolError, match="more than 4 file descriptors"):
        receive(channel)
    assert open_descriptors() == before


def test_a_record_that_does_not_fit_is_refused_and_its_descriptors_closed(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    before = open_descriptors()
    socket.send_fds(theirs, [b"x" * (wire.MAX_MESSAGE + 1)], [0])
    with pytest.raises(ProtocolError, match="more than 65536 bytes"):
        receive(channel)
    assert open_descriptors() == before


def test_the_largest_record_fits(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    theirs.send(b"x" * wire.MAX_MESSAGE)
    assert len(receive(channel)[0]) == wire.MAX_MESSAGE


def test_a_peer_that_closes_has_hung_up(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    theirs.send(b"last")
    theirs.close()
    assert receive(channel) == (b"last", [])
    with pytest.raises(HungUp):
        receive(channel)


def test_an_empty_record_is_as_hanging_up_and_leaks_nothing(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    before = open_descriptors()
    socket.send_fds(theirs, [b""], [0, 0])
    with pytest.raises(HungUp):
        receive(channel)
    assert open_descriptors() == before


def test_a_peer_that_leaves_something_unread_has_hung_up(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    channel.send(b"never read")
    theirs.close()
    with pytest.raises(HungUp):
        receive(channel)


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
