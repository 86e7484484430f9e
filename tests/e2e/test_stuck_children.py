"""Unkillable children of the mounter are counted until they have ended, and slots remain beside them.

Closing a file of a FUSE filesystem sends a request to its program (FUSE_FLUSH) and waits for the answer, even in a
killed process. So a caller that sends such a file blocks each child that receives it. The caller must only block its
own share, and no more.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from fusermount3_broker.cli import control_client
from fusermount3_broker.kernel import syscalls
from tests.e2e.conftest import USER, RunBroker, containers, make_mountpoint, settle, wait_until
from tests.e2e.hostile import (
    O_PATH,
    Client,
    check_service,
    in_private_namespace,
    mount,
    mount_request,
    unmount,
)
from tests.e2e.test_attacks import FLUSH, FuseProgram
from tests.e2e.test_hung import stopfs_volume
from tests.e2e.test_limits import GREEDY, MOUNTPOINT, check_use, greedy
from tests.lab.commands import run
from tests.lab.forked import ending_afterwards
from tests.lab.images import BUSYBOX, DEBIAN, image_tag
from tests.lab.pace import SLOWNESS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.lab.broker import Broker

pytestmark = [pytest.mark.e2e, pytest.mark.long]

#: One account has a quarter of the 64 slots; waiting children and those for the broker's own operations come on top.
MOST_OF_ONE = 16 + 4 + 8
#: For all accounts together; see docs/security.md.
MOST = 128
#: Seconds within which an administrator gets an answer.
AT_ONCE = 2 * SLOWNESS
#: The uids of attacking users, each an account: more than there are shares of the slots.
_UIDS = itertools.cycle(range(3000, 3015))


def instead_of_a_mountpoint(client: Client, place: Path, file: int) -> None:
    client.send(mount_request(place), os.dup(file))


def before_a_mountpoint(client: Client, place: Path, file: int) -> None:
    client.send(mount_request(place), os.dup(file), os.open(place, O_PATH))


def beside_a_mountpoint(client: Client, place: Path, file: int) -> None:
    client.send(mount_request(place), os.open(place, O_PATH), os.dup(file))


def with_what_is_no_request(client: Client, _place: Path, file: int) -> None:
    client.send(b"noise", os.dup(file))


SENT = (instead_of_a_mountpoint, before_a_mountpoint, beside_a_mountpoint, with_what_is_no_request)


@contextlib.contextmanager
def unflushed(device: int, place: Path) -> Iterator[tuple[FuseProgram, int]]:
    """Serve `place` by a program that answers no closing of a file, except by this process; yield an open file."""
    with FuseProgram(device, silent=(FLUSH,)) as program:
        file = os.open(place / "file", os.O_RDONLY)
        try:
            yield program, file
        finally:
            with contextlib.suppress(OSError):  # the connection was aborted
                os.close(file)


@contextlib.contextmanager
def genuine_mount(place: Path) -> Iterator[int]:
    """Mount a FUSE filesystem on `place` by mount(2), unknown to the broker; yield its descriptor."""
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    syscalls.mount(b"foreign", bytes(place), b"fuse", syscalls.MS_NOSUID | syscalls.MS_NODEV, options)
    try:
        yield device
    finally:
        syscalls.umount2(bytes(place), syscalls.MNT_DETACH)


def send_once(broker: Broker, uid: int, send: Callable[[Client, Path, int], None], place: Path, file: int) -> None:
    with contextlib.suppress(OSError), Client(broker, uid) as client:
        send(client, place, file)


@contextlib.contextmanager
def nothing_stays(broker: Broker) -> Iterator[None]:
    """Check that after the block all children end that were not there before, and that all sent files are closed."""
    settle(broker)
    before = children(broker)
    yield
    wait_until(lambda: children(broker) <= before, 30)
    wait_until(lambda: ask(broker, "mounts") == [])  # a file not yet closed keeps its filesystem


def children(broker: Broker) -> int:
    """Return the number of children of the mounter, including killed ones that have not ended.

    This starts no program: the program would close the files that are open here, and hang.
    """
    return len(psutil.Process(broker.process.pid).children(recursive=True)) - 2


def ask(broker: Broker, question: str) -> Any:
    """Return the broker's answer to an administrator, which must come within AT_ONCE seconds."""
    begun = time.monotonic()
    answer = control_client.ask(broker.directory / "control/control.sock", question)
    assert time.monotonic() - begun < AT_ONCE
    return answer


@pytest.mark.parametrize("send", SENT, ids=lambda send: send.__name__)
def test_whoever_sends_what_hangs_when_it_is_closed_has_its_share_of_children_and_no_more(
    run_broker: RunBroker, users: Path, send: Callable[[Client, Path, int], None]
) -> None:
    broker = run_broker("user_allow_other = true\n[deadlines]\nunmount = 60\n[limits]\nrequests_per_second = 100")
    own, place = make_mountpoint(users, "own"), make_mountpoint(users, "place", 0)

    def body() -> None:
        with unflushed(mount(broker, own, uid=USER, options=b"allow_other"), own) as (_, file):
            for number in range(120):
                send_once(broker, USER, send, own, file)
                if number % 20 == 19:
                    check_service(broker, place)
                    assert children(broker) <= MOST_OF_ONE
            wait_until(lambda: ask(broker, "health") == {"problem": ""})
        unmount(broker, own, uid=USER, lazy=True)

    with nothing_stays(broker):
        in_private_namespace(body)


def test_what_was_mounted_through_the_broker_is_aborted_when_it_holds_children_of_it(
    run_broker: RunBroker, users: Path
) -> None:
    """Otherwise, the FUSE program would continue, and so would the children that it blocks."""
    broker = run_broker("user_allow_other = true\n[deadlines]\noperation = 1\nunmount = 1")
    own = make_mountpoint(users, "own")

    def body() -> None:
        before = children(broker)
        with unflushed(mount(broker, own, uid=USER, options=b"allow_other"), own) as (program, file):
            for _ in range(4):
                send_once(broker, USER, instead_of_a_mountpoint, own, file)
            wait_until(lambda: FLUSH in program.silenced)
            wait_until(lambda: broker.records("aborted a FUSE connection"))
            wait_until(lambda: children(broker) <= before)
        unmount(broker, own, uid=USER, lazy=True)

    with nothing_stays(broker):
        in_private_namespace(body)


def test_another_users_filesystem_is_not_aborted_by_who_sends_a_file_of_it(run_broker: RunBroker, users: Path) -> None:
    broker = run_broker("user_allow_other = true\n[deadlines]\noperation = 1\nunmount = 1")
    theirs, place = make_mountpoint(users, "theirs", USER + 1), make_mountpoint(users, "place")

    def body() -> None:
        with unflushed(mount(broker, theirs, uid=USER + 1, options=b"allow_other"), theirs) as (program, file):
            send_once(broker, USER, instead_of_a_mountpoint, place, file)
            wait_until(lambda: FLUSH in program.silenced)
            time.sleep(4)  # by then it would have been aborted
            assert broker.records("aborted") == []
            assert ask(broker, "status")["children"]["stuck"] == 1
        unmount(broker, theirs, uid=USER + 1, lazy=True)

    with nothing_stays(broker):
        in_private_namespace(body)


class Attack:
    """Many users that send a file of a filesystem not mounted through the broker, as fast as the broker accepts it.

    They run in one process with its own mount namespace, which serves the filesystem, too. It starts no other process:
    that would close the file, and hang. The attack ends with the `with` block.
    """

    def __init__(self, broker: Broker, users: Path) -> None:
        self._broker = broker
        self._foreign, self._place, self._own = (
            make_mountpoint(users, name, 0) for name in ("foreign", "place", "own")
        )

    def __enter__(self) -> Attack:
        orders, self._orders = os.pipe()
        ready, told = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            os.close(self._orders)
            with ending_afterwards():
                self._attack(orders, told)
        os.close(orders)
        os.close(told)
        assert os.read(ready, 1), "the attack has not begun"
        os.close(ready)
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._orders)
        os.waitpid(self._child, 0)

    def pause(self) -> None:
        """Send no more; the files already sent remain unanswered."""
        os.write(self._orders, b"\0")

    def _attack(self, orders: int, told: int) -> None:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        run(["mount", "--make-rprivate", "/"])
        mount(self._broker, self._own)
        with genuine_mount(self._foreign) as served, unflushed(served, self._foreign) as (_, file):
            os.write(told, b"\0")
            while not select.select([orders], [], [], 0.002)[0]:
                for send in SENT:
                    send_once(self._broker, next(_UIDS), send, self._place, file)
            while os.read(orders, 1):
                pass


def is_gone(broker: Broker, pid: int) -> bool:
    """Return whether another process has replaced the process. The answer may be that of the next front."""
    with contextlib.suppress(control_client.NotRunning):
        status = control_client.ask(broker.directory / "control/control.sock", "status")
        return pid not in (status["mounter"]["pid"], status["front"]["pid"])
    return False


def test_at_the_bound_of_all_children_the_administrator_is_answered_and_the_broker_restarts(
    run_broker: RunBroker, users: Path
) -> None:
    """Nothing is aborted, as the broker did not mount the filesystem."""
    broker = run_broker("[limits]\nrequests_per_second = 0\n[deadlines]\noperation = 2")

    def administrate() -> None:
        assert children(broker) <= MOST
        wait_until(lambda: ask(broker, "health") == {"problem": ""})
        assert "children" in ask(broker, "status")
        assert isinstance(ask(broker, "mounts"), list)

    with Attack(broker, users) as attack:
        wait_until(lambda: ask(broker, "status")["children"]["stuck"] >= 45, 60)
        administrate()
        for part in ("mounter", "front", "mounter"):
            before = ask(broker, "status")[part]["pid"]
            psutil.Process(before).kill()
            wait_until(partial(is_gone, broker, before))
            time.sleep(2)
            administrate()
        for mounted in ask(broker, "mounts"):
            assert ask(broker, f"abort {mounted['request_id']}")["request_id"] == mounted["request_id"]
        attack.pause()
        broker.stop()
        broker.start()
        administrate()
        in_private_namespace(lambda: check_service(broker, users))


def test_eight_containers_at_once_hold_their_shares_and_nobody_else_is_held_up(run_broker: RunBroker) -> None:
    """Each has mounted a filesystem through the broker, and none leaves anything unread past its time."""
    broker = run_broker("dead_mounts_seconds = 1\n[deadlines]\nunmount = 60\n[limits]")
    with containers(broker) as start, contextlib.ExitStack() as attacking, nothing_stays(broker):
        other = start(image_tag(BUSYBOX), user="1000:1000")
        attackers = [start(image_tag(DEBIAN), volumes=(GREEDY, stopfs_volume())) for _ in range(8)]
        for attacker in attackers:
            attacker.start(["stopfs", "-f", "-o", "silent_at=flush", MOUNTPOINT])
            wait_until(partial(attacker.fuse_mounts, MOUNTPOINT))
        for attacker in attackers:
            attacking.enter_context(greedy(attacker, "flush", 1))
        most = 0
        for _ in range(10):
            check_use(other)
            most = max(most, children(broker))
        assert most <= MOST
        assert ask(broker, "status")["children"]["stuck"] + ask(broker, "status")["children"]["working"] > 16
        for mounted in ask(broker, "mounts"):
            assert ask(broker, f"abort {mounted['request_id']}")["request_id"] == mounted["request_id"]
        attacking.close()
        wait_until(lambda: not any(attacker.fuse_mounts() for attacker in attackers))
        check_use(other)
