"""One call at the front, from the request to the answer, with a mounter that the test plays."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from fusermount3_broker.front import call, server
from fusermount3_broker.front.context import Front
from fusermount3_broker.front.decisions.limits import account_of
from fusermount3_broker.front.model import MountNamespace
from fusermount3_broker.front.mounter_client import Mounter, MounterFailed, Operation
from fusermount3_broker.front.slots import Slots
from fusermount3_broker.front.tables.mount_table import Registry
from fusermount3_broker.messages import mounter
from fusermount3_broker.messages.mounter import (
    Attach,
    BadDescriptors,
    Failed,
    HandedOver,
    Keep,
    Kept,
    Made,
    Mounted,
    MountFacts,
    MountPlan,
    NotPlain,
    Proceed,
    RolledBack,
    StartPlainMount,
    StartPlainUnmount,
    UnmountFacts,
    UnmountPlan,
)
from fusermount3_broker.service import log
from fusermount3_broker.service.channel import Channel, HungUp
from fusermount3_broker.service.configuration import FILESYSTEMS, Configuration, Deadlines, Limits
from fusermount3_proxy import wire
from fusermount3_proxy.wire import CommitRequest, MountRequest, ProceedRequest, Reply, UnmountRequest, VolumeRequest
from tests.unit.fakes import FakeFusectl, all_descriptors, full_disk, open_descriptors

NAMESPACE = 7
FACTS = MountFacts(
    uid=1000,
    gid=1000,
    root_mode=stat.S_IFDIR,
    foreign_sticky=False,
    filesystem=FILESYSTEMS["ext"],
    search_errno=0,
    access_errno=0,
    mount_namespace=NAMESPACE,
)


class FakeChild(Channel):
    """The child's end of a conversation, with the caller's connection, which the child has to be the last to hold."""

    def __init__(self, conversation: socket.socket, connection: int) -> None:
        super().__init__(conversation)
        self.connection = socket.socket(fileno=os.dup(connection))
        self.request = (b"", 0)

    def take(self) -> tuple[bytes, int]:
        """Take a record of the caller; return it, and the number of its descriptors."""
        data, descriptors, _, _ = socket.recv_fds(self.connection, wire.MAX_MESSAGE, 253, socket.MSG_DONTWAIT)
        for each in descriptors:
            os.close(each)
        return data, len(descriptors)

    def end(self) -> None:
        self.socket.close()
        self.connection.close()


class WatchedOperation(Operation):
    """An operation that checks that the front closes the caller's connection before the operation ends."""

    def __init__(self, conversation: socket.socket, seconds: int, connection: socket.socket) -> None:
        super().__init__(conversation, seconds)
        self.connection = connection

    async def let_go(self) -> None:
        """Do nothing: the fake child holds nothing, and does not listen for `LetGo`."""

    def close(self) -> None:
        super().close()
        assert self.connection.fileno() == -1, "the child is the last who has the connection"


class PatientOperation(WatchedOperation):
    """An operation that waits for its child when it is dismissed."""

    async def let_go(self) -> None:
        await Operation.let_go(self)


class FakeMounter:
    """Gives the test the child's end of each conversation."""

    def __init__(self) -> None:
        self.operation: type[WatchedOperation] = WatchedOperation
        self.children: list[FakeChild] = []
        self.dismissals: list[FakeChild] = []
        """Children that have a connection and no operation."""
        self.failure: Exception | None = None
        self.serves_plain_calls = False
        self.connection: socket.socket
        """The front's end of the connection that is served."""

    async def begin(self, start: Any, descriptors: list[int]) -> Operation:
        connection, pidfd = descriptors
        assert connection == self.connection.fileno()
        os.fstat(pidfd)
        operation, child = self._begin(start.seconds)
        self.children.append(child)
        if isinstance(start, StartPlainMount | StartPlainUnmount):  # which may leave the request to another child
            return Operation(operation._channel.give_away(), start.seconds)
        child.request = child.take()
        return operation

    async def dismiss(self, connections: list[socket.socket], seconds: int) -> Operation:
        assert self.connection.fileno() == -1, "it is another's"
        (self.connection,) = connections
        operation, child = self._begin(seconds)
        self.dismissals.append(child)
        return operation

    def _begin(self, seconds: int) -> tuple[Operation, FakeChild]:
        if self.failure:
            raise self.failure
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return self.operation(ours, seconds, self.connection), FakeChild(theirs, self.connection.fileno())

    def left(self) -> list[tuple[bytes, int]]:
        """End all children; return the records that none of them took, and the number of descriptors of each."""
        found = []
        for child in self.children + self.dismissals:
            while (record := child.take()) != (b"", 0):
                found.append(record)
        for child in self.children + self.dismissals:
            child.end()
        return found


class Scene:
    """A front with a fake mounter and a fake fusectl; the test plays the caller and the child."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.fusectl = FakeFusectl(directory / "fusectl")
        self.registry = Registry(directory / "state", self.fusectl.descriptor)
        self.mounter = FakeMounter()
        self.proc = os.open("/proc", os.O_PATH)
        self.logged: list[dict[str, Any]] = []
        configuration = Configuration(source=b"/etc/broker.toml")
        self.front = Front(configuration, cast(Mounter, self.mounter), self.registry, self._log, self.proc)
        self.caller: Channel
        self.serving: asyncio.Task[None]
        """The call, which the broker cancels when it stops."""
        self.left: list[tuple[bytes, int]]
        """The unread records of the last call's caller."""

    def _log(self, priority: int, message: str, **fields: Any) -> None:
        self.logged.append({"priority": priority, "message": message} | fields)

    def play(self, act: Callable[[], Awaitable[None]]) -> None:
        """Serve one call while `act` runs; afterwards nothing of the call may be left."""
        before = open_descriptors()

        async def play() -> None:
            async with asyncio.timeout(10):
                await self.call(act)

        asyncio.run(play())
        self.left = self.mounter.left()
        assert all_descriptors() == before
        assert self.front.mounting == 0

    async def call(self, act: Callable[[], Awaitable[None]]) -> None:
        """Serve one call while `act` runs."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with Channel(theirs) as self.caller:
            self.mounter.connection = ours
            entered = server.admit(self.front, Channel(ours), call.Call)
            self.serving = serving = asyncio.create_task(server.serve(entered) if entered else asyncio.sleep(0))
            try:
                await act()
            except HungUp:  # from a call that failed, whose own error says more
                self.caller.socket.close()
            await asyncio.wait([serving])
            if not serving.cancelled():
                serving.result()

    async def told(self) -> None:
        """Return after the front has had time to read the records sent to it."""
        await asyncio.sleep(0.01)

    def request(self, request: wire.Request, descriptors: int | None = None) -> None:
        pinned = os.open("/", os.O_PATH)
        attached = [pinned] * (request.DESCRIPTORS if descriptors is None else descriptors)
        socket.send_fds(self.caller.socket, [wire.encode_request(request)], attached)
        os.close(pinned)

    async def answer(self) -> Reply:
        return wire.decode_reply(await self.caller.receive())

    def child_ends(self) -> None:
        """Play a child that is killed."""
        self.mounter.children.pop().end()

    async def child_begins(self, number: int = 1) -> FakeChild:
        while len(self.mounter.children) < number:
            await asyncio.sleep(0)
        return self.mounter.children[-1]

    async def another_child_begins(self) -> None:
        """Play a child for plain calls that leaves the request to another one."""
        plain = self.mounter.children.pop()
        plain.send(mounter.dump(NotPlain()))
        with pytest.raises(HungUp):
            await plain.receive()
        plain.end()
        assert (await self.child_begins()).request[1] == 1, "the child has received the descriptor"

    async def child_hears(self) -> mounter.Record:
        child = await self.child_begins()
        return mounter.load(await child.receive())

    async def child_keeps(self) -> None:
        """Play the child that has to keep the mount, and keeps it."""
        assert await self.child_hears() == Keep()
        self.mounter.children[-1].take()
        self.child_says(Kept())

    async def child_is_hung_up_on(self) -> None:
        with pytest.raises(HungUp):
            await self.child_hears()

    def child_says(self, record: mounter.Record) -> None:
        self.mounter.children[-1].send(mounter.dump(record))

    async def agree(self, facts: MountFacts = FACTS) -> MountPlan:
        """Play a child for which the front guessed wrong: send the facts, and return the plan that follows."""
        await self.child_hears()
        self.child_says(facts)
        wanted = await self.child_hears()
        assert isinstance(wanted, MountPlan)
        return wanted

    def made(self, device: int = 5) -> None:
        """Play a child that has made a filesystem, and has not attached it yet."""
        self.fusectl.connect(device)
        self.child_says(Made(device=device, mount_namespace=NAMESPACE, pids=mounter.PIDS_SEEN))

    async def mounted(self, device: int = 5) -> None:
        """Play a child that makes a filesystem, and attaches it when the front says so."""
        self.made(device)
        assert await self.child_hears() == Attach()
        self.child_says(Mounted())

    @property
    def last_record(self) -> dict[str, Any]:
        """The log record of the last call."""
        return [each for each in self.logged if "request_id" in each][-1]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.registry.close()
    os.close(scene.proc)
    os.close(scene.fusectl.descriptor)


def test_a_mount_that_is_committed_is_kept(scene: Scene) -> None:
    async def act() -> None:
        scene.request(MountRequest(b"/mnt", b"fsname=s,subtype=sshfs"))
        wanted = await scene.agree()
        assert (wanted.uid, wanted.source, wanted.subtype) == (1000, b"s", b"sshfs")
        await scene.mounted()
        scene.request(CommitRequest())
        await scene.child_keeps()

    scene.play(act)
    (mount,) = scene.registry
    assert (mount.mountpoint, mount.type, mount.source, mount.uid) == (b"/mnt", "fuse.sshfs", b"s", 1000)
    assert scene.last_record["message"] == "mount mounted"
    assert scene.last_record["request_id"] == mount.request_id
    assert scene.front.requests == {"mount mounted": 1}


def test_a_mount_that_is_not_plain_is_begun_again_with_another_child(scene: Scene) -> None:
    scene.mounter.serves_plain_calls = True
    begun: list[mounter.Record] = []

    async def act() -> None:
        scene.request(MountRequest(b"/mnt", b"fsname=s"))
        begun.append(await scene.child_hears())
        await scene.another_child_begins()
        begun.append(await scene.agree())
        await scene.mounted()
        scene.request(CommitRequest())
        await scene.child_keeps()
        assert scene.front.slots.in_use == 1

    scene.play(act)
    assert [type(each) for each in begun] == [mounter.Ask, MountPlan]
    assert len(scene.registry) == 1
    assert scene.front.requests == {"mount mounted": 1}


def test_an_unmount_that_is_not_plain_is_begun_again_with_another_child(scene: Scene) -> None:
    scene.mounter.serves_plain_calls = True

    async def act() -> None:
        scene.request(UnmountRequest(b"/mnt", b"mnt"))
        await scene.child_begins()
        await scene.another_child_begins()
        scene.child_says(UNMOUNT_FACTS._replace(access_errno=errno.EACCES))
        assert (await scene.answer()).errno == errno.EPERM
        await scene.told()
        assert scene.front.slots.in_use <= 1

    scene.play(act)
    assert scene.front.requests == {"unmount refused": 1}


def test_only_the_socket_of_a_volume_says_who_uses_that(scene: Scene) -> None:
    async def act() -> None:
        scene.request(wire.UnusedRequest())
        answer = await scene.answer()
        assert (answer.errno, answer.text) == (errno.EOPNOTSUPP, b"this is not the socket of a volume")

    scene.play(act)


@pytest.mark.parametrize(
    "request_",
    [MountRequest(b"/mnt", b"", True), VolumeRequest(), UnmountRequest(b"/mnt", b"mnt", only_dead=True)],
    ids=["sync_init", "volume", "only_dead"],
)
def test_what_cannot_be_plain_is_not_tried(scene: Scene, request_: wire.Request) -> None:
    scene.mounter.serves_plain_calls = True

    async def act() -> None:
        scene.request(request_)
        if request_.DESCRIPTORS:
            child = await scene.child_begins()
            assert child.request[1] == 1, "the child has taken it at once"
            scene.child_says(Failed(errno.EPERM, b"join"))
        assert (await scene.answer()).errno != 0

    scene.play(act)


def test_a_mount_is_written_down_before_it_is_attached(scene: Scene) -> None:
    """Whichever process is killed from then on, the next front knows the mount."""
    known: list[str] = []

    async def act() -> None:
        scene.request(MountRequest(b"/mnt", b"fsname=s"))
        await scene.agree()
        scene.made()
        assert await scene.child_hears() == Attach()
        known.extend(mountpoints_in(scene.directory / "state/mounts.sqlite"))
        scene.child_says(Mounted())
        scene.request(CommitRequest())
        await scene.child_keeps()

    scene.play(act)
    assert known == ["/mnt"]
    assert len(scene.registry) == 1


def mountpoints_in(table: Path) -> list[str]:
    """Return the mountpoints that another process finds in the table of mounts."""
    look = "import sqlite3, sys; print(*(row[0].decode() for row in sqlite3.connect(sys.argv[1]).execute(sys.argv[2])))"
    command = [sys.executable, "-c", look, str(table), "SELECT mountpoint FROM mounts"]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()


@pytest.mark.parametrize("sync_init", [False, True])
def test_a_mount_that_cannot_be_written_down_is_not_attached(scene: Scene, sync_init: bool) -> None:
    scene.mounter.operation = PatientOperation
    answers: list[Reply] = []

    async def act() -> None:
        scene.request(MountRequest(b"/mnt", b"", sync_init))
        await scene.agree()
        if sync_init:
            scene.child_says(HandedOver())
            scene.request(ProceedRequest())
            assert isinstance(await scene.child_hears(), Proceed)
        with full_disk():
            scene.made()
            assert await scene.child_hears() == mounter.LetGo()
        scene.fusectl.disconnect(5)
        scene.child_says(mounter.HasLetGo())
        answers.append(await scene.answer())

    scene.play(act)
    state = scene.directory / "state"
    text = f"mount failed: the broker can't write its table of mounts in {state}: No space left on device"
    assert [(answer.errno, answer.text) for answer in answers] == [(errno.ENOSPC, text.encode())]
    assert len(scene.registry) == 0
    assert scene.last_record["message"] == "mount refused"


@pytest.mark.parametrize("last_word", [None, Failed(errno.EBUSY, b"mount")])
def test_a_mount_that_could_not_be_attached_is_forgotten(scene: Scene, last_word: mounter.Record | None) -> None:
    async def act() -> None:
        scene.request(MountRequest(b"/mnt", b""))
        await scene.agree()
        scene.made()
        assert await scene.child_hears() == Attach()
        scene.fusectl.disconnect(5)
        if last_word:
            scene.child_says(last_word)
        else:
            scene.child_ends()
        assert (await scene.answer()).errno == (errno.EBUSY if last_word else errno.EIO)

    scene.play(act)
    assert scene.front.registry._mounts == {}, "not only when somebody looks"


def test_who_unmounts_is_not_told_that_it_cannot_be_written_down(scene: Scene) -> None:
    mount_one(scene)
    answers: list[Reply] = []

    async def act() -> None:
        scene.mounter.children.clear()
        scene.request(UnmountRequest(b"/mnt", b"mnt"))
        await scene.child_begins()
        scene.child_says(UNMOUNT_FACTS)
        assert isinstance(await scene.child_hears(), UnmountPlan)
        with full_disk():
            scene.fusectl.disconnect(5)
            scene.child_says(mounter.Unmounted())
            answers.append(await scene.answer())
            assert len(scene.registry) == 0
            scene.registry.table.write_deferred()

    scene.play(act)
    assert [answer.errno for answer in answers] == [0]
    assert scene.registry.table.problem
    scene.registry.table.retry()
    assert not scene.registry.table.problem


def test_the_request_is_the_childs_to_take(scene: Scene) -> None:
    async def act() -> None:
        scene.request(MountRequest(b"/mnt", b""))
        child = await scene.child_begins()
        assert child.request == (wire.encode_request(MountRequest(b"/mnt", b"")), 1)
        await scene.agree()
        await scene.mounted()
        scene.request(CommitRequest())
        assert await scene.child_hears() == Keep()
        assert child.take() == (wire.encode_request(CommitRequest()), 0)
        assert scene.logged == [], "it is not over before the child has let go of the mount"
        scene.child_says(Kept())

    scene.play(act)
    assert scene.left == []
    assert scene.mounter.dismissals == [], "there is a child that has the connection"


@pytest.mark.parametrize("last_word", [None, Failed(errno.EIO, b"keep"), Mounted()])
def test_a_mount_is_kept_although_its_child_does_not_say_so(scene: Scene, last_word: mounter.Record | None) -> None:
    """The mount can't be undone any more; so it stays, and its owner can unmount it."""

    async def act() -> None:
        scene.request(MountRequest(b"/mnt", b""))
        await scene.agree()
        await scene.mounted()
        scene.request(CommitRequest())
        assert await scene.child_hears() == Keep()
        if last_word:
            scene.child_says(last_word)
        scene.child_ends()

    scene.play(act)
    assert len(scene.registry) == 1
    assert scene.last_record["message"] == "mount mounted"


@pytest.mark.parametrize(
    "last_word", ["nothing", "garbage", "another mount", "a proceed", "a commit with a descriptor"]
)
def test_a_mount_that_is_not_committed_is_rolled_back(scene: Scene, last_word: str) -> None:
    async def act() -> None:
        scene.request(MountRequest(b"/mnt", b""))
        await scene.agree()
        await scene.mounted()
        match last_word:
            case "nothing":
                scene.caller.socket.close()
            case "garbage":
                scene.caller.send(b"garbage")
            case "another mount":
                scene.request(MountRequest(b"/mnt", b""))
            case "a proceed":
                scene.request(ProceedRequest())
            case "a commit with a descriptor":
                scene.request(CommitRequest(), 1)
        assert await scene.child_hears() == mounter.Undo()
        await asyncio.sleep(0.01)
        assert scene.logged == [], "it is not over before the child has unmounted"
        scene.fusectl.disconnect(5)
        scene.child_says(RolledBack())

    scene.play(act)
    assert len(scene.registry) == 0
    assert scene.last_record["message"].startswith("mount rolled back")
    assert len(scene.left) == (0 if last_word == "nothing" else 1)


@pytest.mark.parametrize("last_word", [None, Failed(errno.EBUSY, b"roll back"), Kept()])
def test_a_mount_that_cannot_be_rolled_back_is_kept_in_mind(scene: Scene, last_word: mounter.Record | None) -> None:
    async def act() -> None:
        scene.request(MountRequest(b"/mnt", b""))
        await scene.agree()
        await scene.mounted()
        scene.caller.socket.close()
        assert await scene.child_hears() == mounter.Undo()
        if last_word:
            scene.child_says(last_word)
        scene.child_ends()

    scene.play(act)
    assert len(scene.registry) == 1, "its owner can unmount it when nothing lies on it any more"
    assert scene.last_record["message"].startswith("mount not rolled back")


def test_a_mount_is_written_down_before_it_is_committed(scene: Scene) -> None:
    async def act() -> None:
        scene.request(MountRequest(b"/mnt", b""))
        await scene.agree()
        await scene.mounted()
        while not len(scene.registry):
            await asyncio.sleep(0.001)
        assert [mount.mountpoint for mount in scene.registry] == [b"/mnt"]
        assert scene.front.mounting == 0, "and counts only once"
        scene.request(CommitRequest())
        await scene.child_keeps()

    scene.play(act)


def test_a_mount_whose_caller_was_gone_when_it_was_handed_over_is_none(scene: Scene) -> None:
    async def act() -> None:
        scene.request(MountRequest(b"/mnt", b""))
        await scene.agree()
        scene.made()
        assert await scene.child_hears() == Attach()
        scene.caller.socket.close()
        scene.fusectl.disconnect(5)
        scene.child_says(RolledBack())

    scene.play(act)
    assert len(scene.registry) == 0
    assert scene.last_record["message"] == "mount caller went away"


def test_a_call_that_the_broker_ends_is_logged(scene: Scene) -> None:
    async def act() -> None:
        scene.request(MountRequest(b"/mnt", b""))
        await scene.child_hears()
        scene.serving.cancel()

    scene.play(act)
    assert scene.last_record["message"] == "mount ended: the broker stops"
    assert scene.front.requests == {"mount ended": 1}


def test_a_mount_that_may_be_undone_after_the_broker_has_ended_is_kept_in_mind(scene: Scene) -> None:
    async def act() -> None:
        scene.request(MountRequest(b"/mnt", b""))
        await scene.agree()
        await scene.mounted()
        await scene.told()
        scene.serving.cancel()

    scene.play(act)
    assert len(scene.registry) == 1
    scene.fusectl.disconnect(5)
    scene.registry.reconcile()
    assert len(scene.registry) == 0


def test_a_mount_that_is_kept_is_logged_although_the_broker_ends(scene: Scene) -> None:
    async def act() -> None:
        scene.request(MountRequest(b"/mnt", b""))
        await scene.agree()
        await scene.mounted()
        scene.request(CommitRequest())
        assert await scene.child_hears() == Keep()
        scene.serving.cancel()

    scene.play(act)
    assert len(scene.registry) == 1
    assert scene.front.requests == {"mount mounted": 1}


def test_a_refusal_is_told_although_the_broker_ends(scene: Scene) -> None:
    scene.mounter.operation = PatientOperation

    async def act() -> None:
        scene.request(MountRequest(b"/mnt", b"bogus"))
        await scene.child_hears()
        scene.child_says(FACTS)
        assert await scene.child_hears() == mounter.LetGo()
        scene.serving.cancel()
        assert (await scene.answer()).errno == errno.EINVAL

    scene.play(act)
    assert scene.last_record["message"] == "mount refused"


# Mounts in which the FUSE program gets its descriptor first


async def hand_over(scene: Scene) -> None:
    """Play caller and child until the FUSE program has the descriptor; nothing is mounted yet."""
    scene.request(MountRequest(b"/mnt", b"", sync_init=True))
    assert (await scene.agree()).sync_init
    scene.child_says(HandedOver())


def test_a_mount_with_sync_init_waits_for_the_fuse_program(scene: Scene) -> None:
    async def act() -> None:
        await hand_over(scene)
        scene.request(ProceedRequest())
        assert await scene.child_hears() == Proceed(scene.front.configuration.deadlines.sync_init)
        assert scene.mounter.children[-1].take() == (wire.encode_request(ProceedRequest()), 0)
        await scene.mounted()
        assert (await scene.answer()).errno == 0
        scene.request(CommitRequest())
        await scene.child_keeps()

    scene.play(act)
    assert len(scene.registry) == 1
    assert scene.last_record["message"] == "mount mounted"


@pytest.mark.parametrize(("said", "descriptors"), [(CommitRequest(), 0), (ProceedRequest(), 1)])
def test_a_caller_that_does_not_proceed_mounts_nothing(scene: Scene, said: wire.Request, descriptors: int) -> None:
    async def act() -> None:
        await hand_over(scene)
        scene.request(said, descriptors)
        assert (await scene.answer()).errno == errno.ETIMEDOUT
        await scene.child_is_hung_up_on()

    scene.play(act)
    assert scene.last_record["message"] == "mount refused"
    assert scene.left == [(wire.encode_request(said), descriptors)], "the front has closed nothing"


def test_a_caller_that_goes_away_while_the_kernel_waits_is_noticed(scene: Scene) -> None:
    async def act() -> None:
        await hand_over(scene)
        scene.request(ProceedRequest())
        assert isinstance(await scene.child_hears(), Proceed)
        scene.mounter.children[-1].take()
        scene.caller.socket.close()
        await scene.child_is_hung_up_on()

    scene.play(act)
    assert scene.last_record["message"] == "mount caller went away"


def test_a_mount_whose_caller_is_gone_when_it_is_there_is_rolled_back(scene: Scene) -> None:
    async def act() -> None:
        await hand_over(scene)
        scene.request(ProceedRequest())
        assert isinstance(await scene.child_hears(), Proceed)
        scene.caller.socket.close()
        await scene.mounted()
        assert await scene.child_hears() == mounter.Undo()
        scene.child_ends()

    scene.play(act)
    assert len(scene.registry) == 1, "its child was killed before it had rolled back"
    assert scene.last_record["message"].startswith("mount not rolled back")


# Records from the caller


@pytest.mark.parametrize("request_", [MountRequest(b"/mnt", b""), UnmountRequest(b"/mnt", b"mnt")])
@pytest.mark.parametrize(
    ("descriptors", "text"),
    [
        (0, b"bad request: '%b' takes 1 file descriptors, 0 came"),
        (3, b"bad request: '%b' takes 1 file descriptors, 3 came"),
        (253, b"bad request: '%b' takes 1 file descriptors, 253 came"),
        # O_PATH proves nothing, but a descriptor without it was opened by mistake, and its open(2) reached a filesystem
        (1, b"bad request: the file descriptor was not opened with O_PATH"),
    ],
)
def test_a_request_with_the_wrong_descriptors_is_told_so(
    scene: Scene, request_: MountRequest | UnmountRequest, descriptors: int, text: bytes
) -> None:
    async def act() -> None:
        scene.request(request_, descriptors)
        child = await scene.child_begins()
        assert child.request == (wire.encode_request(request_), descriptors), "the front has taken none"
        scene.child_says(BadDescriptors(descriptors))
        answer = await scene.answer()
        operation = request_.OPERATION.encode()
        assert (answer.errno, answer.text) == (errno.EBADMSG, text.replace(b"%b", operation))

    scene.play(act)
    assert scene.last_record["message"] == f"{request_.OPERATION} refused"
    assert len(scene.registry) == 0


def test_a_name_that_is_not_utf_8_is_a_name(scene: Scene) -> None:
    async def act() -> None:
        scene.request(MountRequest(b"/\xff", b"fsname=\xff,subtype=\xff"))
        await scene.agree()
        await scene.mounted()
        scene.request(CommitRequest())
        await scene.child_keeps()

    scene.play(act)
    assert len(scene.registry) == 1
    assert scene.last_record["message"] == "mount mounted"


def test_a_refusal_is_answered_and_logged_under_the_same_name(scene: Scene) -> None:
    async def act() -> None:
        scene.request(MountRequest(b"/mnt", b"suid,bogus"))
        await scene.child_hears()
        scene.child_says(FACTS)
        answer = await scene.answer()
        assert (answer.errno, answer.text) == (errno.EINVAL, b"unknown option 'bogus'")
        assert answer.warnings == (b"unsafe option suid ignored",)
        assert scene.last_record["request_id"].encode() == answer.id

    scene.play(act)
    assert scene.last_record["message"] == "mount refused"
    assert len(scene.registry) == 0


ROOM = wire.MAX_MESSAGE - len(wire.encode_request(MountRequest(b"/mnt", b"")))


@pytest.mark.parametrize(
    "options", [b"x" * ROOM, b"suid," * 5_000 + b"bogus", b"suid," * 5_000], ids=["one", "warnings, one", "warnings"]
)
def test_a_request_of_any_size_is_answered(scene: Scene, options: bytes) -> None:
    async def act() -> None:
        scene.request(MountRequest(b"/mnt", options))
        await scene.child_hears()
        scene.child_says(FACTS)
        scene.mounter.children[-1].socket.shutdown(socket.SHUT_WR)  # so that nothing can be mounted
        assert (await scene.answer()).errno

    scene.play(act)
    assert scene.last_record["message"] == "mount refused"


@pytest.mark.parametrize(
    ("said", "number", "text"),
    [
        (Failed(errno.EPERM, b"mount"), errno.EPERM, b"mount failed: Operation not permitted"),
        (
            Failed(errno.EACCES, b"access mountpoint"),
            errno.EACCES,
            b"failed to access mountpoint /mnt: Permission denied",
        ),
        (Keep(), errno.EIO, b"mount failed: Input/output error"),
        (None, errno.EIO, b"mount failed: Input/output error"),
    ],
)
def test_a_child_that_fails_is_a_refusal(scene: Scene, said: mounter.Record | None, number: int, text: bytes) -> None:
    async def act() -> None:
        scene.request(MountRequest(b"/mnt", b""))
        await scene.agree()
        if said:
            scene.child_says(said)
        scene.child_ends()
        answer = await scene.answer()
        assert (answer.errno, answer.text) == (number, text)

    scene.play(act)
    assert scene.last_record["message"] == "mount refused"


@pytest.mark.parametrize("request_", [MountRequest(b"/mnt", b""), UnmountRequest(b"/mnt", b"mnt")])
def test_without_a_mounter_every_caller_is_answered(scene: Scene, request_: MountRequest | UnmountRequest) -> None:
    async def act() -> None:
        scene.mounter.failure = MounterFailed("it ended")
        scene.request(request_)
        answer = await scene.answer()
        assert answer.errno
        assert answer.text

    scene.play(act)
    assert scene.last_record["message"] == f"{request_.OPERATION} refused"
    errors = [each["message"] for each in scene.logged if each["priority"] == log.ERROR]
    assert errors == ["it ended"] * 2, "neither the request nor the connection finds somebody"


@pytest.mark.parametrize(
    ("record", "descriptors", "text"),
    [
        (b"garbage", 1, b"bad request: message does not end with a NUL byte"),
        (b"protocol=1\0operation=frobnicate\0", 1, b"bad request: unknown operation 'frobnicate'"),
        (wire.encode_request(CommitRequest()), 0, b"bad request: 'commit' before a mount"),
        (wire.encode_request(ProceedRequest()), 2, b"bad request: 'proceed' before a mount"),
        (b"x" * 70_000, 1, b"bad request: message of more than 65536 bytes"),
        (b"x", 100, b"bad request: message does not end with a NUL byte"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong_with_it(
    scene: Scene, record: bytes, descriptors: int, text: bytes
) -> None:
    async def act() -> None:
        socket.send_fds(scene.caller.socket, [record], [0] * descriptors)
        answer = await scene.answer()
        assert answer.errno
        assert answer.text == text

    scene.play(act)
    assert scene.mounter.children == []
    left = [(record[: wire.MAX_MESSAGE], descriptors)] if descriptors else []
    assert scene.left == left, "the front has closed no descriptors"
    assert len(scene.mounter.dismissals) == len(left)


def test_a_caller_that_says_nothing_is_refused_in_time(scene: Scene) -> None:
    scene.front.configuration = replace(scene.front.configuration, deadlines=Deadlines(request=0))

    async def act() -> None:
        answer = await scene.answer()
        assert (answer.errno, answer.text) == (errno.ETIMEDOUT, b"no request came in time")

    scene.play(act)


def test_a_caller_that_goes_away_is_logged_and_forgotten(scene: Scene) -> None:
    async def act() -> None:
        scene.caller.socket.close()

    scene.play(act)
    assert scene.last_record["message"] == "request caller went away"
    assert scene.mounter.dismissals == [], "nothing is in the connection"


def test_a_caller_that_says_no_word_but_sends_something_is_as_one_that_goes_away(scene: Scene) -> None:
    async def act() -> None:
        socket.send_fds(scene.caller.socket, [b""], [0, 0])
        with pytest.raises(HungUp):
            await scene.caller.receive()

    scene.play(act)
    assert scene.last_record["message"] == "request caller went away"
    assert scene.left == [(b"", 2)], "the front has closed nothing"


@pytest.mark.parametrize("last_word", ["a refusal of the front's", "a failure", "nonsense", "nothing"])
def test_what_is_left_when_a_call_is_over_is_not_closed_by_the_front(scene: Scene, last_word: str) -> None:
    """The child that has the connection keeps it for longer; if that child is gone, another one gets the connection."""

    async def act() -> None:
        scene.request(MountRequest(b"/mnt", b"bogus" if last_word == "a refusal of the front's" else b""))
        scene.request(CommitRequest(), 3)
        await scene.child_hears()
        match last_word:
            case "a refusal of the front's":
                scene.child_says(FACTS)
            case "a failure":
                scene.child_says(Failed(errno.EIO, b"join"))
            case "nonsense":
                scene.child_says(Kept())
            case "nothing":
                scene.child_ends()
        assert (await scene.answer()).errno

    scene.play(act)
    assert scene.left == [(wire.encode_request(CommitRequest()), 3)]
    assert len(scene.mounter.dismissals) == (1 if last_word == "nothing" else 0)


def mount_one(scene: Scene) -> None:
    async def act() -> None:
        scene.request(MountRequest(b"/mnt", b""))
        await scene.agree()
        await scene.mounted()
        scene.request(CommitRequest())
        await scene.child_keeps()

    scene.play(act)
    assert len(scene.registry) == 1


UNMOUNT_FACTS = UnmountFacts(
    uid=1000, mount_namespace=NAMESPACE, access_errno=0, mounted=True, device=5, dead=False, may_mount=False
)


def test_a_caller_unmounts_its_own(scene: Scene) -> None:
    mount_one(scene)

    async def act() -> None:
        scene.mounter.children.clear()
        scene.request(UnmountRequest(b"/mnt", b"mnt", lazy=True))
        await scene.child_begins()
        scene.child_says(UNMOUNT_FACTS)
        unmount = await scene.child_hears()
        scene.fusectl.disconnect(5)
        scene.child_says(mounter.Unmounted())
        answer = await scene.answer()
        assert answer.errno == 0
        assert unmount == UnmountPlan(lazy=True, request_id=answer.id)
        assert await scene.child_hears() == mounter.Told(), "it need not answer itself"

    scene.play(act)
    assert len(scene.registry) == 0
    assert scene.last_record["message"] == "unmount unmounted"


def test_an_unmount_whose_caller_is_gone_is_one_all_the_same(scene: Scene) -> None:
    mount_one(scene)

    async def act() -> None:
        scene.mounter.children.clear()
        scene.request(UnmountRequest(b"/mnt", b"mnt"))
        await scene.child_begins()
        scene.child_says(UNMOUNT_FACTS)
        assert isinstance(await scene.child_hears(), UnmountPlan)
        scene.caller.socket.close()
        scene.fusectl.disconnect(5)
        scene.child_says(mounter.Unmounted())
        assert await scene.child_hears() == mounter.Told()

    scene.play(act)
    assert scene.front.requests == {"mount mounted": 1, "unmount unmounted": 1}


def test_a_caller_does_not_unmount_what_is_anothers(scene: Scene) -> None:
    mount_one(scene)

    async def act() -> None:
        scene.mounter.children.clear()
        scene.request(UnmountRequest(b"/mnt", b"mnt"))
        await scene.child_begins()
        scene.child_says(UNMOUNT_FACTS._replace(uid=1001))
        answer = await scene.answer()
        assert answer.text == b"entry for /mnt not found in /etc/mtab"

    scene.play(act)
    assert len(scene.registry) == 1


def test_mounts_are_counted_for_the_callers_namespace(scene: Scene) -> None:
    mount_one(scene)
    scene.front.configuration = replace(scene.front.configuration, mount_max=1)
    assert scene.registry.count(MountNamespace(NAMESPACE), 1) == 1

    async def act() -> None:
        scene.mounter.children.clear()
        scene.request(MountRequest(b"/mnt", b""))
        assert isinstance(await scene.child_hears(), mounter.Ask), "no guess where the limit may be reached"
        scene.child_says(FACTS)
        assert (await scene.answer()).text.startswith(b"too many FUSE filesystems mounted; mount_max=N can be set in ")

    scene.play(act)


@pytest.mark.parametrize(
    ("mount_max", "namespace", "allowed"), [(1, NAMESPACE, False), (1, NAMESPACE + 1, True), (2, NAMESPACE, True)]
)
def test_mounts_under_way_count_for_their_namespace_before_they_are_there(
    scene: Scene, mount_max: int, namespace: int, allowed: bool
) -> None:
    scene.front.configuration = replace(scene.front.configuration, mount_max=mount_max)

    async def second() -> None:
        scene.request(MountRequest(b"/mnt", b""))
        await scene.child_begins(2)
        assert isinstance(await scene.child_hears(), mounter.Ask)
        scene.child_says(FACTS._replace(mount_namespace=namespace))
        if allowed:
            assert isinstance(await scene.child_hears(), MountPlan)
            scene.caller.socket.close()
            scene.child_says(RolledBack())
            with pytest.raises(HungUp):
                await scene.child_hears()
        else:
            assert (await scene.answer()).text.startswith(b"too many FUSE filesystems mounted; ")

    async def act() -> None:
        scene.request(MountRequest(b"/mnt", b""))
        first = scene.caller
        assert isinstance(await scene.child_hears(), mounter.Ask), "no guess where the limit may be reached"
        scene.child_says(FACTS)
        assert isinstance(await scene.child_hears(), MountPlan)
        await scene.call(second)
        assert dict(scene.front.mounting_in) == {NAMESPACE: 1}
        scene.mounter.children.pop().end()
        scene.caller = first
        await scene.mounted()
        scene.request(CommitRequest())
        await scene.child_keeps()

    scene.play(act)
    assert len(scene.registry) == 1
    assert not scene.front.mounting_in


@pytest.mark.parametrize(("mount_max", "guesses"), [(64, 0), (65, 1), (66, 2), (-1, 2)])
def test_the_plan_is_guessed_as_long_as_no_namespace_can_reach_its_limit(
    scene: Scene, mount_max: int, guesses: int
) -> None:
    scene.front.configuration = replace(scene.front.configuration, mount_max=mount_max, max_requests=64)
    scene.front.usual_filesystem = FACTS.filesystem

    async def second() -> None:
        scene.request(MountRequest(b"/mnt", b""))
        await scene.child_begins(2)
        assert isinstance(await scene.child_hears(), MountPlan) == (guesses > 1)
        assert scene.front.guessing == guesses
        scene.caller.socket.close()
        scene.child_says(RolledBack())
        with pytest.raises(HungUp):
            await scene.child_hears()

    async def act() -> None:
        scene.request(MountRequest(b"/mnt", b""))
        first = scene.caller
        assert isinstance(await scene.child_hears(), MountPlan) == (guesses > 0)
        await scene.call(second)
        scene.mounter.children.pop().end()
        scene.caller = first
        scene.caller.socket.close()
        scene.child_says(RolledBack())

    scene.play(act)
    assert scene.front.guessing == 0


def test_a_mount_that_was_refused_is_not_under_way(scene: Scene) -> None:
    scene.front.configuration = replace(scene.front.configuration, mount_max=1)

    async def refused() -> None:
        scene.request(MountRequest(b"/mnt", b"bogus"))
        await scene.child_hears()
        scene.child_says(FACTS)
        assert (await scene.answer()).errno

    scene.play(refused)
    scene.mounter.children.clear()
    mount_one(scene)


@pytest.mark.parametrize("which", ["slots", "long_slots"])
def test_who_waits_in_vain_for_a_place_is_refused(scene: Scene, which: str) -> None:
    scene.front.configuration = replace(scene.front.configuration, deadlines=Deadlines(operation=0))
    setattr(scene.front, which, Slots(total=0, share=1))

    async def act() -> None:
        scene.request(MountRequest(b"/mnt", b"", sync_init=True))
        answer = await scene.answer()
        assert answer.errno == errno.EAGAIN
        assert answer.text.startswith(b"too many operations of this ")
        assert answer.text.endswith(b" under way; max_requests=N can be set in /etc/broker.toml")

    scene.play(act)
    assert scene.mounter.children == []
    assert scene.front.limits_hit == {"max_requests": 1}
    assert scene.last_record["message"] == "mount refused"


def test_a_place_is_taken_until_the_child_has_ended(scene: Scene) -> None:
    async def act() -> None:
        scene.request(MountRequest(b"/mnt", b""))
        child = await scene.child_begins()
        account = account_of(Path("/proc/self/cgroup").read_bytes(), os.geteuid())
        child.send(mounter.dump(Failed(errno.EIO, b"join")))
        assert (await scene.answer()).errno == errno.EIO
        with pytest.raises(HungUp):
            await scene.caller.receive()
        assert scene.front.slots.taken(account) == 1
        child.end()
        while scene.front.slots.taken(account):
            await asyncio.sleep(0)
        scene.mounter.children.clear()

    scene.play(act)


def test_mounts_are_counted_for_the_callers_account(scene: Scene) -> None:
    mount_one(scene)
    scene.front.configuration = replace(scene.front.configuration, limits=Limits(mounts=1))

    async def act() -> None:
        scene.mounter.children.clear()
        scene.request(MountRequest(b"/mnt", b""))
        answer = await scene.answer()
        assert answer.errno == errno.ENOSPC
        assert answer.text.startswith(b"too many FUSE filesystems mounted by this ")
        assert answer.text.endswith(b"; limits.mounts=N can be set in /etc/broker.toml")

    scene.play(act)
    assert scene.mounter.children == []
    assert scene.front.limits_hit == {"limits.mounts": 1}
    assert scene.last_record["message"] == "mount refused"
    scene.fusectl.disconnect(5)
    scene.mounter.dismissals.clear()
    mount_one(scene)


def test_a_caller_beyond_a_limit_is_refused_before_it_has_said_a_word_and_logged_with_others(scene: Scene) -> None:
    generous, strict = (
        replace(scene.front.configuration, limits=Limits(requests_per_second=1, burst=burst)) for burst in (100, 1)
    )
    account = account_of(Path("/proc/self/cgroup").read_bytes(), os.geteuid())
    ids = set()

    async def turned_away() -> None:
        answer = await scene.answer()
        assert answer.errno == errno.EAGAIN
        assert answer.text.startswith(b"too many requests per second from this ")
        assert answer.text.endswith(b"; limits.requests_per_second=N can be set in /etc/broker.toml")
        ids.add(answer.id.decode())

    async def first() -> None:
        scene.caller.socket.close()

    scene.front.configuration = generous
    scene.play(first)
    for _ in range(99):  # so that the passing time does not let it in again
        scene.front.accounts.leave(scene.front.accounts.enter(account, generous, time.monotonic()))
    scene.front.configuration = strict
    for _ in range(3):
        scene.play(turned_away)
    assert [each["message"] for each in scene.logged] == ["request caller went away"]
    (refused,) = scene.front.refusals.take()
    assert ({refused.id}, refused.requests, refused.reason.limit) == (ids, 3, "limits.requests_per_second")
    assert scene.front.limits_hit == {"limits.requests_per_second": 3}
    assert scene.front.requests == {"request caller went away": 1, "request refused": 3}
    assert scene.mounter.dismissals == [], "nothing was said that a child would have to take"
