"""The front's start: how many connections the descriptors allow, and what the log says if these are too few; and that
it does not begin with the tables when its supervisor has gone."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from fusermount3_broker.front import daemon
from fusermount3_broker.messages import supervisor as orders
from fusermount3_broker.service import log
from fusermount3_broker.service.channel import HungUp
from tests.unit.fronts import FrontWithoutMounter


def told(directory: Path, descriptors: int) -> list[str]:
    directory.mkdir()
    scene = FrontWithoutMounter(directory)
    daemon._limit_connections(scene.front, descriptors)
    return scene.logged


def test_too_few_descriptors_are_told_with_a_number_that_is_enough(tmp_path: Path) -> None:
    (message,) = told(tmp_path / "few", 1024)
    assert message.startswith(
        f"{log.WARNING} no more than 167 connections, and not max_connections = 2048: there are only 1024 descriptors; "
    )
    (first, second) = map(int, re.findall("(?:LimitNOFILE|--ulimit=nofile)=([0-9]+)", message))
    assert first == second
    assert told(tmp_path / "enough", first) == []
    assert len(told(tmp_path / "too few", first - 2)) == 1


def give_orders(supervisor: socket.socket, directory: Path) -> None:
    """Send all orders with which a front begins, with descriptors that it does not use before it reads its tables."""
    null = os.open(os.devnull, os.O_RDONLY)
    begin = orders.Begin(
        state_directory=bytes(directory),
        log_format=b"text",
        metrics=False,
        volumes=False,
        keeps_fusectl=True,
        mount_namespaces=b"",
    )
    for order, descriptors in ((begin, 7), (orders.Configuration(b""), 0), (orders.SubordinateIds(), 2)):
        socket.send_fds(supervisor, [orders.dump(order)], [null] * descriptors)
    os.close(null)


@pytest.mark.parametrize(("is_killed", "opened"), [(False, [True]), (True, [])])
def test_a_front_whose_supervisor_was_killed_before_it_had_the_lock_opens_no_table(
    is_killed: bool, opened: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Opened(Exception):
        pass

    def open_registry(*_: object) -> None:
        found.append(locked == [tmp_path])
        raise Opened

    def receive_and_note(supervisor: socket.socket) -> tuple[orders.Order, list[int]]:
        order, descriptors = receive(supervisor)
        if isinstance(order, orders.Begin):
            kept.extend(descriptors)
        return order, descriptors

    found: list[bool] = []
    locked: list[Path] = []
    kept: list[int] = []
    receive = daemon._receive
    monkeypatch.setattr(daemon, "_receive", receive_and_note)
    monkeypatch.setattr("fusermount3_broker.front.daemon.sandbox.enter", lambda *_: "")
    monkeypatch.setattr(daemon, "_raise_descriptor_limit", lambda: 1024)
    monkeypatch.setattr(daemon, "lock_beside_supervisor", locked.append)
    monkeypatch.setattr(daemon, "Registry", open_registry)
    supervisor, front = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with supervisor, front:
        give_orders(supervisor, tmp_path)
        if is_killed:
            supervisor.close()
        with pytest.raises(HungUp if is_killed else Opened):
            daemon._begin(front)
    for each in kept:
        os.close(each)
    assert found == opened
