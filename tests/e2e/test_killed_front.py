"""A front is killed in the middle of a call, and the mounter's child ends the call in its place."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from fusermount3_proxy import wire
from fusermount3_proxy.wire import ProceedRequest
from tests.e2e import hostile
from tests.e2e.conftest import wait_until
from tests.e2e.hostile import COMMIT, O_PATH, Client, in_private_namespace, slow
from tests.lab.kernel import needs_kernel

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.conftest import RunBroker
    from tests.lab.broker import Broker

pytestmark = pytest.mark.e2e


def mountpoints(broker: Broker) -> list[tuple[str, int]]:
    return [(mount["mountpoint"], mount["uid"]) for mount in broker.mounts()]


def begin_mount(client: Client, place: Path, *, sync_init: bool = False) -> None:
    client.send(hostile.mount_request(place, sync_init=sync_init), os.open(place, O_PATH))


def take(client: Client) -> None:
    """Receive the descriptor of the mount."""
    reply = client.reply()
    assert reply is not None
    assert reply.errno == 0, reply.text


def test_a_caller_who_commits_keeps_its_mount(run_broker: RunBroker, tmp_path: Path) -> None:
    broker = run_broker()

    def body() -> None:
        with Client(broker) as client:
            begin_mount(client, tmp_path)
            take(client)
            wait_until(broker.mounts)  # the child reports to the front after the caller
            broker.front.kill()
            client.send(COMMIT)
            assert client.reply() is None
            assert [mount.mountpoint for mount in hostile.fuse_mounts()] == [str(tmp_path)]
        assert mountpoints(broker) == [(str(tmp_path), 0)]
        hostile.unmount(broker, tmp_path)

    in_private_namespace(body)


def test_a_caller_who_goes_away_leaves_nothing(run_broker: RunBroker, tmp_path: Path) -> None:
    broker = run_broker()

    def body() -> None:
        with Client(broker) as client:
            begin_mount(client, tmp_path)
            take(client)
            broker.front.kill()
        hostile.wait_for_mounts([])
        assert mountpoints(broker) == []

    in_private_namespace(body)


def test_a_caller_who_never_commits_is_rolled_back(run_broker: RunBroker, tmp_path: Path) -> None:
    broker = run_broker("[deadlines]\ncommit = 1")

    def body() -> None:
        with Client(broker) as client:
            begin_mount(client, tmp_path)
            take(client)
            broker.front.kill()
            hostile.wait_for_mounts([])
            assert mountpoints(broker) == []

    in_private_namespace(body)


def test_a_mount_that_a_front_did_not_live_to_see_is_known_to_the_next(run_broker: RunBroker, tmp_path: Path) -> None:
    broker = run_broker()

    def body() -> None:
        hostile.check_service(broker, tmp_path)  # from now on, the front guesses right and need not be asked again
        front = broker.front
        log = tmp_path.with_suffix(".strace")
        with slow(broker, "move_mount", 0.5, log), Client(broker) as client:
            begin_mount(client, tmp_path)
            wait_until(lambda: log.read_text().count("move_mount(") >= 2)  # the first locks its flags
            front.suspend()
            take(client)
            front.kill()
            client.send(COMMIT)
            assert client.reply() is None
        assert mountpoints(broker) == [(str(tmp_path), 0)]
        hostile.unmount(broker, tmp_path)

    in_private_namespace(body)


def test_an_unmount_of_which_the_front_never_heard_is_answered_by_the_child(
    run_broker: RunBroker, tmp_path: Path
) -> None:
    broker = run_broker()

    def body() -> None:
        device = hostile.mount(broker, tmp_path)
        front = broker.front
        log = tmp_path.with_suffix(".strace")
        with slow(broker, "umount2", 0.5, log), Client(broker) as client:
            client.send(hostile.unmount_request(tmp_path), os.open(tmp_path.parent, O_PATH))
            wait_until(lambda: "umount2" in log.read_text())
            front.suspend()
            hostile.wait_for_mounts([])
            front.kill()
            take(client)
        assert mountpoints(broker) == []
        os.close(device)

    in_private_namespace(body)


@needs_kernel("FSCONFIG_CMD_CREATE_EXCL")
def test_a_mount_with_sync_init_whose_front_was_killed_is_answered_by_the_child(
    run_broker: RunBroker, tmp_path: Path
) -> None:
    broker = run_broker()

    def body() -> None:
        front = broker.front
        log = tmp_path.with_suffix(".strace")
        with slow(broker, "move_mount", 0.5, log), Client(broker) as client:
            begin_mount(client, tmp_path, sync_init=True)
            take(client)
            client.send(wire.encode_request(ProceedRequest()))
            wait_until(lambda: log.read_text().count("move_mount(") >= 2)  # the first locks its flags
            front.suspend()
            wait_until(hostile.fuse_mounts)
            front.kill()
            take(client)
            client.send(COMMIT)
            assert client.reply() is None
        assert [uid for _, uid in mountpoints(broker)] == [0]
        hostile.unmount(broker, tmp_path)

    in_private_namespace(body)
