"""The limits of what one caller may request. A caller that requests more does not affect others.

Deadlines are long here: a caller that is served at all within a client's patience has not waited for silent ones.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from errno import EAGAIN, EBADMSG, ENOSPC, ENOTCONN, ETIMEDOUT
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from fusermount3_broker.kernel import syscalls
from tests.e2e.caller import call_in
from tests.e2e.conftest import USER, RunBroker, containers, make_mountpoint, settle, wait_until
from tests.e2e.hostile import (
    O_PATH,
    PATIENCE,
    Client,
    check_service,
    in_private_namespace,
    mount,
    mount_request,
    unmount,
)
from tests.e2e.test_attacks import GETATTR, LOOKUP, STATFS, FuseProgram
from tests.lab.images import BUSYBOX, DEBIAN, image_tag
from tests.lab.podman import Container, Volume

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.broker import Broker

pytestmark = [pytest.mark.e2e, pytest.mark.long]

GREEDY = Volume(Path(__file__).parents[1] / "programs/greedy.py", "/usr/bin/greedy.py")
MOUNTPOINT = "/home/user/mnt"
LONG = "[deadlines]\nrequest = 60\noperation = 20\ncommit = 60\n"
TOO_LATE = ETIMEDOUT, "mount failed: Connection timed out"


def at_once_text(broker: Broker) -> str:
    return f"too many requests at once from this container; limits.concurrent=N can be set in {broker.config}"


def rate_text(broker: Broker) -> str:
    return (
        f"too many requests per second from this container; limits.requests_per_second=N can be set in {broker.config}"
    )


def mounts_text(broker: Broker, who: str) -> str:
    return f"too many FUSE filesystems mounted by this {who}; limits.mounts=N can be set in {broker.config}"


def check_use(container: Container) -> None:
    """Check that a complete cycle of mount, use and unmount works in the container."""
    result = container.exec(["whoamifs", "--probe", MOUNTPOINT], check=False)
    assert (result.returncode, result.stdout.splitlines()[-1:]) == (0, ["ok=yes"]), result.stdout + result.stderr


@contextlib.contextmanager
def greedy(container: Container, what: str, number: int) -> Iterator[list[str]]:
    """Have the container request too much during the block; yield a list that gets the answers read by its end."""
    program = container.start(["python3", "/usr/bin/greedy.py", what, str(number)])
    assert program.stdout is not None
    assert program.stdout.readline() == "begun\n"
    answers: list[str] = []
    try:
        yield answers
    finally:
        for pid in container.processes():
            if pid != container.pid:
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).kill()
        answers += program.communicate(timeout=20)[0].splitlines()


def fuse_children(broker: Broker) -> int:
    """Return the number of children of the mounter."""
    return len(psutil.Process(broker.status()["mounter"]["pid"]).children())


ATTACKS = {"half-open": 400, "no-commit": 30, "storm": 8, "deaf": 8, "surplus": 4}


@pytest.mark.parametrize("what", ATTACKS)
@pytest.mark.parametrize("limits", ["", "requests_per_second = 0"], ids=["defaults", "any rate"])
def test_a_container_that_wants_everything_does_not_keep_others_from_being_served(
    run_broker: RunBroker, what: str, limits: str
) -> None:
    broker = run_broker(f"{LONG}[limits]\n{limits}")
    with containers(broker) as start:
        attacker = start(image_tag(DEBIAN), volumes=(GREEDY,))
        other = start(image_tag(BUSYBOX), user="1000:1000")
        check_use(other)
        settle(broker)
        before = fuse_children(broker)
        with greedy(attacker, what, ATTACKS[what]):
            for _ in range(3):
                check_use(other)
                assert fuse_children(broker) <= before + 16 + 8, "a quarter of the slots, and what is just ending"
            in_private_namespace(lambda: check_service(broker, other_place(broker)))
        wait_until(lambda: attacker.fuse_mounts() == [], 30)
        check_use(other)
        wait_until(lambda: fuse_children(broker) <= before, 30)


def test_who_asks_for_much_at_once_is_served_in_its_turn_and_others_before(run_broker: RunBroker) -> None:
    broker = run_broker("[limits]\nrequests_per_second = 10\nburst = 100")
    place = other_place(broker)

    def body() -> None:
        with contextlib.ExitStack() as held:
            greedy = [held.enter_context(Client(broker, USER)) for _ in range(50)]
            for each in greedy:
                each.socket.send(b"garbage")
            check_service(broker, place)
            last = greedy[-1].socket
            last.setblocking(False)
            with pytest.raises(BlockingIOError):
                last.recv(1)
            last.settimeout(PATIENCE)
            errnos = [reply.errno for reply in (each.reply() for each in greedy) if reply]
        assert errnos == [EBADMSG] * 50

    # Run in a separate process: changing the uid makes that process, and those that it forks, undumpable.
    in_private_namespace(body)


def other_place(broker: Broker) -> Path:
    place = broker.directory / "place"
    place.mkdir(exist_ok=True)
    return place


def test_connections_of_a_container_are_limited(run_broker: RunBroker) -> None:
    broker = run_broker(f"{LONG}[limits]\nrequests_per_second = 0\nconcurrent = 20")
    with containers(broker) as start:
        attacker = start(image_tag(DEBIAN), volumes=(GREEDY,))
        with greedy(attacker, "half-open", 20) as answers:
            outcome = call_in(attacker, ["fusermount3", MOUNTPOINT])
            assert (outcome.status, outcome.descriptor) == (1, None)
            lines = outcome.stderr.splitlines()
            assert lines[0] == f"fusermount3: {at_once_text(broker)}"
        assert answers == []
        (refused, *_) = broker.wait_for("requests refused")
        assert (refused["limit"], refused["errno"]) == ("limits.concurrent", EAGAIN)
        assert refused["account"].startswith("container /")
        assert refused["request_id"] in lines[1], "the user finds it in the log"
        check_use(attacker)
    assert broker.status()["limits_hit"] == {"limits.concurrent": 1}


def test_requests_of_a_container_in_a_second_are_limited(run_broker: RunBroker) -> None:
    broker = run_broker("[limits]\nrequests_per_second = 1\nburst = 5")
    with containers(broker) as start:
        first, other = start(image_tag(BUSYBOX)), start(image_tag(BUSYBOX))
        calls = "for i in $(seq 30); do fusermount3 -u /tmp 2>&1 & done; wait"
        said = first.exec(["sh", "-c", calls], check=False).stdout.splitlines()
        refused = said.count(f"fusermount3: {rate_text(broker)}")
        assert refused > 0
        assert said.count("fusermount3: failed to unmount /tmp: Invalid argument") == 30 - refused >= 5
        check_use(other)


def test_refusals_of_a_container_in_a_second_are_one_record(run_broker: RunBroker) -> None:
    broker = run_broker("[limits]\nrequests_per_second = 1\nburst = 5")
    limit = "limits.requests_per_second"
    with containers(broker) as start:
        attacker = start(image_tag(DEBIAN), volumes=(GREEDY,))
        begun = time.monotonic()
        with greedy(attacker, "deaf", 4):
            wait_until(lambda: len(broker.records("requests refused")) >= 3)

        def told() -> list[int]:
            return [record["requests"] for record in broker.records("requests refused") if record["limit"] == limit]

        hit = broker.status()["limits_hit"][limit]
        wait_until(lambda: sum(told()) == hit)
        took = time.monotonic() - begun
        assert 3 <= len(told()) <= took + 1
        assert hit > 100
        assert len(broker.records()) < 10 * took + 20, "others are few, too"


@pytest.fixture
def fusectl() -> Iterator[None]:
    """A permanently mounted fusectl, as systemd provides on every host: the broker recognizes mounts by it."""
    context = syscalls.fsopen(b"fusectl", syscalls.FSOPEN_CLOEXEC)
    syscalls.fsconfig(context, syscalls.FSCONFIG_CMD_CREATE, None, None, 0)
    mounted = syscalls.fsmount(context, syscalls.FSMOUNT_CLOEXEC, 0)
    os.close(context)
    yield
    os.close(mounted)


@pytest.mark.usefixtures("fusectl")
def test_live_mounts_of_a_container_are_limited_also_after_a_restart(run_broker: RunBroker) -> None:
    broker = run_broker("[limits]\nmounts = 2")
    with containers(broker) as start:
        first, other = start(image_tag(BUSYBOX)), start(image_tag(BUSYBOX))
        for name in ("a", "b", "c"):
            first.exec(["mkdir", f"/tmp/{name}"])
            first.exec(["chown", "1000:1000", f"/tmp/{name}"])
        mounted = [call_in(first, ["fusermount3", "/tmp/a"]), call_in(first, ["fusermount3", "/tmp/b"], "1000:1000")]
        for _ in range(2):
            for user in (None, "1000:1000"):
                outcome = call_in(first, ["fusermount3", "/tmp/c"], user)
                text = f"fusermount3: {mounts_text(broker, 'container')}"
                assert (outcome.status, outcome.stderr.splitlines()[0]) == (1, text)
            broker.stop()
            broker.start()
        assert broker.records("mount refused")[-1]["errno"] == ENOSPC
        check_use(other)
        for outcome in mounted:
            assert (outcome.status, outcome.stderr) == (0, "")
            outcome.close()
        first.exec(["fusermount3", "-u", "/tmp/a"])
        check_use(first)
        first.exec(["fusermount3", "-u", "/tmp/b"])


@contextlib.contextmanager
def asking_a_silent_program(broker: Broker, hung: Path) -> Iterator[tuple[FuseProgram, list[Client]]]:
    """Send thirty requests of one user, who has sixteen slots, at a mountpoint in the user's own filesystem.

    When the block begins, its FUSE program has read the sixteen operations, and it answers none, so the processes that
    wait for them can't even be killed. The FUSE program ends with the block.
    """
    device = mount(broker, hung, uid=USER, options=b"allow_other")
    with contextlib.ExitStack() as stack:
        program = stack.enter_context(FuseProgram(device))
        pinned = os.open(hung / "file", O_PATH)
        program.silent = (GETATTR, LOOKUP, STATFS)
        clients = [stack.enter_context(Client(broker, USER)) for _ in range(30)]
        for client in clients:
            client.send(mount_request(hung / "file"), os.dup(pinned))
        wait_until(lambda: len(program.silenced) == 16)
        os.close(pinned)
        yield program, clients
    unmount(broker, hung, uid=USER, lazy=True)


def test_operations_that_hang_on_their_callers_filesystem_cost_nobody_else_a_slot(
    run_broker: RunBroker, users: Path
) -> None:
    """Nothing is aborted meanwhile: requests that wait for a slot wait in vain."""
    limits = "[limits]\nrequests_per_second = 0"
    broker = run_broker(f"user_allow_other = true\n[deadlines]\noperation = 4\nunmount = 60\n{limits}")
    settle(broker)
    before = fuse_children(broker)
    hung, place = make_mountpoint(users, "hung"), make_mountpoint(users, "place")

    def body() -> None:
        with asking_a_silent_program(broker, hung) as (program, clients):
            check_service(broker, place)
            refused = [client.refused() for client in clients]
            text = f"too many operations of this user under way; max_requests=N can be set in {broker.config}"
            assert Counter(refused) == {TOO_LATE: 16, (EAGAIN, text): 14}
            assert len(program.silenced) == 16, "their children have not ended, and count"
            check_service(broker, place)

    in_private_namespace(body)
    wait_until(lambda: fuse_children(broker) <= before, 30)


def test_who_waits_gets_a_place_when_what_those_before_hang_on_is_aborted(run_broker: RunBroker, users: Path) -> None:
    hung = make_mountpoint(users, "hung")
    limits = "[limits]\nrequests_per_second = 0"
    broker = run_broker(f"user_allow_other = true\n[deadlines]\noperation = 6\nunmount = 1\n{limits}")

    def body() -> None:
        with asking_a_silent_program(broker, hung) as (_, clients):
            refused = [client.refused() for client in clients]
            text = f"failed to access mountpoint {hung}/file: Transport endpoint is not connected"
            assert Counter(refused) == {TOO_LATE: 16, (ENOTCONN, text): 14}

    in_private_namespace(body)
    broker.wait_for("aborted a FUSE connection: its FUSE program hangs, and a process waits for it")


def test_sixty_four_mounts_at_once_from_one_container_are_no_more_than_the_defaults_allow(
    run_broker: RunBroker,
) -> None:
    broker = run_broker("[limits]")
    with containers(broker) as start:
        container = start(image_tag(BUSYBOX), user="1000:1000")
        names = "$(seq 64)"
        container.exec(["sh", "-c", f"for i in {names}; do mkdir /tmp/$i; done"])
        program = f"for i in {names}; do whoamifs /tmp/$i || echo failed $i & done; wait"
        assert container.exec(["sh", "-c", program]).stdout == ""
        wait_until(lambda: len(container.fuse_mounts()) == 64)
        program = f"for i in {names}; do fusermount3 -u /tmp/$i || echo failed $i & done; wait"
        assert container.exec(["sh", "-c", program]).stdout == ""
        assert container.fuse_mounts() == []
    assert broker.status()["limits_hit"] == {}
