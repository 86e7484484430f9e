"""All processes of the broker, or supervisor and front, are killed at each step of a mount. Then either the next broker
knows the mount that a caller has, and the mount's owner can unmount it, or there is no mount.

A step is a system call of the mounter's child or of the front, at which strace holds the process.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from functools import partial
from typing import TYPE_CHECKING

import psutil
import pytest

from fusermount3_broker.kernel.syscalls import MNT_DETACH, umount2
from fusermount3_proxy import wire
from tests.e2e import hostile
from tests.e2e.conftest import wait_until
from tests.e2e.hostile import COMMIT, O_PATH, Client, in_private_namespace, slow, slow_processes
from tests.lab.broker import Broker
from tests.lab.callers import Caller, enter_private_namespace, fuse_mounts
from tests.lab.faults import FRONT, MOUNTER, kill, kill_all, kill_at_once, wait_until_stopped
from tests.lab.load import Beside, Helper

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


pytestmark = [pytest.mark.e2e, pytest.mark.long]

USER = 1000
HELD = 0.6
"""Seconds that a step takes."""


def kill_supervisor_and_front(broker: Broker) -> None:
    front = broker.front
    kill_at_once([psutil.Process(broker.process.pid), front])
    broker.process.wait(timeout=20)


#: The processes that are killed.
KILLED = {"all": kill_all, "supervisor and front": kill_supervisor_and_front}
#: The child creates the filesystem, locks the flags of its mount (by attaching it where only the child sees it),
#: reports it to the front, attaches it for its caller, hands it over, and reports that to the front. The front sends
#: the order to mount, and, once the mount is recorded, the order to attach it.
STEPS = [
    ("child", "fsopen", 1),
    ("child", "fsmount", 1),
    ("child", "move_mount", 1),
    ("child", "sendmsg", 1),
    ("front", "sendto", 2),
    ("child", "move_mount", 2),
    ("child", "sendmsg", 2),
    ("child", "sendmsg", 3),
]


@pytest.fixture
def place(users: Path) -> Path:
    return users


def with_broker(body: Callable[[Broker], None]) -> None:
    """Run `body` with its own broker, which it may kill and start again."""

    def run() -> None:
        with Broker() as broker:
            body(broker)
            assert broker.mounts() == []
            assert broker.records("internal error") == []

    in_private_namespace(run)


def owned(broker: Broker) -> list[int]:
    """Return the devices of the mounts that the broker lists; all of them belong to the user."""
    mounts = broker.mounts()
    assert {mount["uid"] for mount in mounts} <= {USER}
    return [mount["device"] for mount in mounts]


def check_that_what_is_there_is_known(broker: Broker, place: Path) -> None:
    """Check that the broker knows every mount and no other, and that the owner can unmount it."""
    mounted = [mount.device for mount in hostile.fuse_mounts()]
    assert [f"0:{device}" for device in owned(broker)] == mounted
    for _ in mounted:
        hostile.unmount(broker, place, uid=USER)
    assert hostile.fuse_mounts() == []
    assert owned(broker) == []


@pytest.mark.parametrize("killed", KILLED)
@pytest.mark.parametrize(("whose", "step", "times"), STEPS)
def test_a_mount_is_known_or_not_there(whose: str, step: str, times: int, killed: str, place: Path) -> None:
    def body(broker: Broker) -> None:
        device = hostile.mount(broker, place, uid=USER)  # from now on, the front guesses right and need not be asked
        os.close(device)
        hostile.unmount(broker, place, uid=USER)
        log = place.parent / "strace"
        calls = 0
        with (
            slow(broker, step, HELD, log) if whose == "child" else slow_processes([broker.front.pid], step, HELD, log),
            Client(broker, USER) as client,
        ):
            client.send(hostile.mount_request(place), os.open(place, O_PATH))
            wait_until(lambda: log.read_text().count(f"{step}(") >= times)
            KILLED[killed](broker)
            with contextlib.suppress(OSError):
                reply = client.reply()
                if reply is not None and reply.errno == 0:
                    client.send(COMMIT)
                    assert client.reply() is None
                    calls += 1
        broker.start()
        if calls and killed != "all":
            assert len(hostile.fuse_mounts()) == 1, "it was committed, to a child that was there"
        check_that_what_is_there_is_known(broker, place)

    with_broker(body)


@pytest.mark.parametrize("killed", KILLED)
@pytest.mark.parametrize("sync_init", [False, True])
def test_a_mount_that_its_caller_has_is_known_to_the_next_broker(sync_init: bool, killed: str, place: Path) -> None:
    """The broker is killed while the caller has its descriptor, but has not yet confirmed it."""

    def body(broker: Broker) -> None:
        with Client(broker, USER) as client:
            client.send(hostile.mount_request(place, sync_init=sync_init), os.open(place, O_PATH))
            reply = client.reply()
            assert reply is not None and reply.errno == 0
            if sync_init:
                client.send(wire.encode_request(wire.ProceedRequest()))
                wait_until(hostile.fuse_mounts)
            KILLED[killed](broker)
            with contextlib.suppress(OSError):
                client.send(COMMIT)
            broker.start()
            if killed == "all":
                assert len(hostile.fuse_mounts()) == 1, "nobody is there any more who could undo it"
            check_that_what_is_there_is_known(broker, place)

    with_broker(body)


@pytest.mark.parametrize("part", [FRONT, MOUNTER])
def test_a_process_that_is_killed_while_it_starts_is_started_again(part: str, place: Path) -> None:
    module = {FRONT: "fusermount3_broker.front.daemon", MOUNTER: "fusermount3_broker.mounter.daemon"}[part]

    def processes(broker: Broker, *, recursive: bool) -> set[psutil.Process]:
        found = set()
        for process in psutil.Process(broker.process.pid).children(recursive=recursive):
            with contextlib.suppress(psutil.NoSuchProcess):
                if module in process.cmdline():
                    found.add(process)
        return found

    def killed(broker: Broker, process: psutil.Process) -> set[psutil.Process]:
        """Kill it; return all processes of that module so far: its children become the supervisor's."""
        family: set[psutil.Process] = set()
        while new := {process, *process.children(recursive=True)} - family:  # what is stopped forks no more
            for each in new:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.suspend()
            wait_until_stopped([*new])
            family |= new
        known = processes(broker, recursive=True)
        process.kill()
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.resume()
        return known

    def another(broker: Broker, known: set[psutil.Process]) -> psutil.Process:
        found: list[psutil.Process] = []

        def find() -> bool:
            found[:] = processes(broker, recursive=False) - known
            return bool(found)

        wait_until(find, seconds=30)
        (process,) = found
        return process

    def body(broker: Broker) -> None:
        device = hostile.mount(broker, place, uid=USER)
        starting = broker.front if part == FRONT else broker.mounter
        said = f"the {part} ended with status -9 when it was started, another is started"
        for number in range(60):
            starting = another(broker, killed(broker, starting))
            if number >= 6 and broker.records(said):
                break
            # At some point of its start, which takes longer, unless this process was late.
            time.sleep(random.Random(number).uniform(0, 0.1) if number % 2 else 0)
        assert broker.records(said)
        assert broker.process.poll() is None, broker.log.read_text()
        os.close(device)
        hostile.unmount(broker, place, uid=USER)
        hostile.check_service(broker, place)

    with_broker(body)


# At any moment ---------------------------------------------------------------------------------------------------

CALLERS = 16
SECONDS = 60


class Survivor(Caller):
    """A caller whose calls may fail when all of the broker is killed, and which inspects what remains afterwards."""

    def __init__(self, helper: Helper, directory: Path, seed: int) -> None:
        super().__init__(helper, directory, seed)
        self.left: list[str] = []

    def _clean(self, *places: Path) -> None:
        """Have the broker unmount the remaining mounts, all of which it must know."""
        for place in places or (self._kept, *self._places):
            for _ in range(100):
                if not any(mount.mountpoint == str(place) for mount in fuse_mounts()):
                    break
                call = self._helper.unmount(place)
                if call.status and "not found in /etc/mtab" in call.said:
                    self.left.append(f"{place.name}: {call.said}")
                    break
                time.sleep(0.1 if call.status else 0)
            else:
                self.left.append(f"{place.name}: can't be unmounted: {call.said}")
            with contextlib.suppress(OSError):
                while True:
                    umount2(bytes(place), MNT_DETACH)


def test_no_mount_is_leaked_when_all_processes_are_killed_at_any_moment(tmp_path: Path) -> None:
    end = time.monotonic() + SECONDS

    def call(broker: Broker, number: int) -> tuple[int, list[str]]:
        enter_private_namespace()
        caller = Survivor(Helper(broker.socket), tmp_path / f"caller{number}", number)
        return len(caller.run(lambda: time.monotonic() > end).mounts), caller.left

    def body(broker: Broker) -> None:
        callers = [Beside(partial(call, broker, number)) for number in range(CALLERS)]
        kills = kill_again_and_again(broker, end - 2)
        results = [caller.result() for caller in callers]
        print(f"{kills} kills, {sum(mounts for mounts, _ in results)} mounts")
        assert kills > 4
        assert sum(mounts for mounts, _ in results) > CALLERS, "there was no load"
        assert [left for _, left in results if left] == []
        wait_until(lambda: broker.mounts() == [])

    with_broker(body)


def kill_again_and_again(broker: Broker, end: float) -> int:
    """Kill and start the broker until the monotonic time `end`; return how often."""
    chance = random.Random(7)
    kills = 0
    while time.monotonic() < end:
        time.sleep(chance.uniform(0.1, 2.5))
        KILLED["all" if chance.random() < 0.6 else "supervisor and front"](broker)
        broker.start()
        if chance.random() < 0.3:
            kill(broker, FRONT)
        kills += 1
    return kills
