"""The disk with the broker's tables is full or not writable: the broker makes no mount that it can't record, keeps
knowing its mounts, and recovers when there is space again.

The disk is a small tmpfs in the test's own mount namespace, filled to the last byte.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

import pytest

from fusermount3_broker.cli import control_client
from fusermount3_broker.kernel.syscalls import MNT_DETACH, umount2
from fusermount3_proxy import wire
from tests.e2e import hostile
from tests.e2e.conftest import let_users_in, wait_until
from tests.e2e.hostile import O_PATH, Client, in_private_namespace
from tests.lab.broker import Broker
from tests.lab.commands import run
from tests.lab.disk import SMALL, Disk
from tests.lab.faults import FRONT, kill, kill_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.long]

USER = 1000
FULL = "No space left on device"


@contextlib.contextmanager
def small_disk(configuration: str = "") -> Iterator[tuple[Broker, Disk]]:
    """Run a broker with its tables on a small disk."""
    broker = Broker(configuration)
    state = broker.directory / "state"
    state.mkdir(mode=0o700)
    run(["mount", *SMALL, state])
    disk = Disk(state)
    with broker:
        try:
            yield broker, disk
            assert broker.mounts() == []
            assert "internal error" not in broker.log.read_text()
            assert "Traceback" not in broker.log.read_text()
        finally:
            broker.stop()
            umount2(bytes(state), MNT_DETACH)


def on_a_small_disk(body: Callable[[Broker, Disk], None], configuration: str = "") -> None:
    def on_it() -> None:
        with small_disk(configuration) as (broker, disk):
            body(broker, disk)

    in_private_namespace(on_it)


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    """Mountpoints that `USER` owns."""
    found = [tmp_path / str(number) for number in range(6)]
    for place in found:
        place.mkdir()
        os.chown(place, USER, USER)
    let_users_in(tmp_path)
    return found


def refusal_of_mount(broker: Broker, place: Path, *, sync_init: bool = False) -> tuple[int, str]:
    """Request a mount; return errno and text of the refusal."""
    with Client(broker, USER) as client:
        client.send(hostile.mount_request(place, sync_init=sync_init), os.open(place, O_PATH))
        return client.refused()


def health(broker: Broker) -> str:
    answer: dict[str, str] = control_client.ask(broker.directory / "control/control.sock", "health")
    return answer["problem"] or "ok"


def mounted_on(place: Path) -> bool:
    return any(mount.mountpoint == str(place) for mount in hostile.fuse_mounts())


def problem(broker: Broker, reason: str) -> str:
    return f"the broker can't write its table of mounts in {broker.directory}/state: {reason}"


def test_nothing_is_mounted_that_cannot_be_written_down(places: list[Path]) -> None:
    def body(broker: Broker, disk: Disk) -> None:
        device = hostile.mount(broker, places[0], uid=USER)
        disk.fill()
        for place in places[1:]:
            assert refusal_of_mount(broker, place) == (
                errno.ENOSPC,
                f"mount failed: {problem(broker, FULL)}",
            )
            assert not mounted_on(place)
        assert [mount["mountpoint"] for mount in broker.mounts()] == [str(places[0])]
        wait_until(lambda: health(broker) == problem(broker, FULL))
        assert broker.status()["tables"]["mounts"] == problem(broker, FULL)
        broker.wait_for(problem(broker, FULL))
        disk.free()
        again = hostile.mount(broker, places[1], uid=USER)
        broker.wait_for("the broker writes its table of mounts again")
        assert (broker.status()["tables"]["mounts"], health(broker)) == ("ok", "ok")
        for place, each in ((places[0], device), (places[1], again)):
            os.close(each)
            hostile.unmount(broker, place, uid=USER)
        assert len(broker.records(problem(broker, FULL))) == 1, "it is told once, not each time"
        wait_until(lambda: disk.rows() == 0)

    on_a_small_disk(body)


@pytest.mark.parametrize("sync_init", [False, True])
def test_a_program_that_waits_is_told_of_the_full_disk(sync_init: bool, places: list[Path]) -> None:
    def body(broker: Broker, disk: Disk) -> None:
        disk.fill()
        if not sync_init:
            assert refusal_of_mount(broker, places[0])[0] == errno.ENOSPC
        else:
            with Client(broker, USER) as client:
                client.send(hostile.mount_request(places[0], sync_init=True), os.open(places[0], O_PATH))
                reply = client.reply()
                assert reply is not None and reply.errno == 0
                client.send(wire.encode_request(wire.ProceedRequest()))
                assert client.refused() == (errno.ENOSPC, f"mount failed: {problem(broker, FULL)}")
        assert hostile.fuse_mounts() == []
        disk.free()
        os.close(hostile.mount(broker, places[0], uid=USER))
        hostile.unmount(broker, places[0], uid=USER)

    on_a_small_disk(body)


def test_who_unmounts_does_not_hear_of_a_full_disk_and_what_is_gone_is_gone_also_for_the_next_broker(
    places: list[Path],
) -> None:
    def body(broker: Broker, disk: Disk) -> None:
        devices = [hostile.mount(broker, place, uid=USER) for place in places]
        disk.fill()
        for place, device in zip(places[:3], devices[:3], strict=True):
            os.close(device)
            hostile.unmount(broker, place, uid=USER)
        assert [mount["mountpoint"] for mount in broker.mounts()] == list(map(str, places[3:]))
        wait_until(lambda: health(broker) == problem(broker, FULL))
        disk.free()
        wait_until(lambda: broker.status()["tables"]["mounts"] == "ok")
        assert disk.rows() == 3, "it is written as soon as there is room"
        disk.fill()
        os.close(devices[3])
        hostile.unmount(broker, places[3], uid=USER)
        kill_all(broker)
        broker.start()
        assert [mount["mountpoint"] for mount in broker.mounts()] == list(map(str, places[4:]))
        disk.free()
        for place, device in zip(places[4:], devices[4:], strict=True):
            os.close(device)
            hostile.unmount(broker, place, uid=USER)
        wait_until(lambda: disk.rows() == 0)

    on_a_small_disk(body)


@pytest.mark.parametrize("end", ["stopped", "killed", "its front killed"])
def test_a_broker_that_begins_on_a_full_disk_knows_all_mounts(end: str, places: list[Path]) -> None:
    def body(broker: Broker, disk: Disk) -> None:
        devices = [hostile.mount(broker, place, uid=USER) for place in places[:3]]
        if end == "stopped":
            broker.stop()
            disk.fill()
            broker.start()
        elif end == "killed":
            disk.fill()
            kill_all(broker)
            disk.fill()  # also the space that SQLite has freed
            broker.start()
        else:
            disk.fill()
            kill(broker, FRONT)
        disk.fill()
        assert [mount["mountpoint"] for mount in broker.mounts()] == list(map(str, places[:3]))
        assert refusal_of_mount(broker, places[3]) == (errno.ENOSPC, f"mount failed: {problem(broker, FULL)}")
        os.close(devices.pop(0))
        hostile.unmount(broker, places[0], uid=USER)
        wait_until(lambda: health(broker) == problem(broker, FULL))
        disk.free()
        devices.append(hostile.mount(broker, places[3], uid=USER))
        wait_until(lambda: health(broker) == "ok")
        assert disk.rows() == 3
        for place, device in zip(places[1:4], devices, strict=True):
            os.close(device)
            hostile.unmount(broker, place, uid=USER)

    on_a_small_disk(body)


def test_a_broker_begins_for_the_first_time_on_a_full_disk(places: list[Path]) -> None:
    def body(broker: Broker, disk: Disk) -> None:
        broker.stop()
        for file in disk.directory.iterdir():
            file.unlink()
        disk.fill()
        broker.start()
        assert refusal_of_mount(broker, places[0])[0] == errno.ENOSPC
        disk.free()
        os.close(hostile.mount(broker, places[0], uid=USER))
        hostile.unmount(broker, places[0], uid=USER)

    on_a_small_disk(body)


def test_limits_count_what_is_mounted_whether_or_not_the_disk_is_full(places: list[Path]) -> None:
    def body(broker: Broker, disk: Disk) -> None:
        devices = [hostile.mount(broker, place, uid=USER) for place in places[:2]]
        for _ in range(3):
            disk.fill()
            assert refusal_of_mount(broker, places[2])[0] == errno.ENOSPC
            disk.free()
        devices.append(hostile.mount(broker, places[2], uid=USER))
        disk.fill()
        for place in places[3:]:
            assert "limits.mounts=N" in refusal_of_mount(broker, place)[1]
        os.close(devices.pop())
        hostile.unmount(broker, places[2], uid=USER)
        assert refusal_of_mount(broker, places[2])[0] == errno.ENOSPC
        disk.free()
        devices.append(hostile.mount(broker, places[2], uid=USER))
        assert "limits.mounts=N" in refusal_of_mount(broker, places[3])[1]
        for place, device in zip(places[:3], devices, strict=True):
            os.close(device)
            hostile.unmount(broker, place, uid=USER)

    on_a_small_disk(body, "[limits]\nmounts = 3\nrequests_per_second = 0")


def test_dead_mounts_are_removed_although_the_disk_is_full(places: list[Path]) -> None:
    def body(broker: Broker, disk: Disk) -> None:
        devices = [hostile.mount(broker, place, uid=USER) for place in places]
        disk.fill()
        for device in devices:
            os.close(device)
        hostile.wait_for_mounts([])
        assert broker.mounts() == []
        disk.free()
        wait_until(lambda: disk.rows() == 0)

    on_a_small_disk(body, "dead_mounts_seconds = 1")


@pytest.mark.parametrize("end", ["front", "broker", "broker stopped"])
def test_a_table_that_is_read_only_is_read_and_written_as_soon_as_that_is_possible(
    end: str, places: list[Path]
) -> None:
    """This happens when the state directory is mounted read-only, or an error makes its filesystem read-only."""

    def body(broker: Broker, disk: Disk) -> None:
        reason = "Read-only file system"
        devices = [hostile.mount(broker, place, uid=USER) for place in places[:2]]
        if end == "broker stopped":
            broker.stop()
        elif end == "broker":
            kill_all(broker)
        run(["mount", "--bind", disk.directory, disk.directory])
        run(["mount", "-o", "remount,bind,ro", disk.directory])
        if end == "front":
            kill(broker, FRONT)
        else:
            broker.start()
        assert [mount["mountpoint"] for mount in broker.mounts()] == list(map(str, places[:2]))
        assert refusal_of_mount(broker, places[2]) == (errno.EROFS, f"mount failed: {problem(broker, reason)}")
        wait_until(lambda: health(broker) == problem(broker, reason))
        os.close(devices.pop(0))
        hostile.unmount(broker, places[0], uid=USER)
        umount2(bytes(disk.directory), MNT_DETACH)  # the front opens the table now and then
        wait_until(lambda: health(broker) == "ok")
        devices.append(hostile.mount(broker, places[2], uid=USER))
        assert disk.rows() == 2
        for place, device in zip(places[1:3], devices, strict=True):
            os.close(device)
            hostile.unmount(broker, place, uid=USER)

    on_a_small_disk(body)
