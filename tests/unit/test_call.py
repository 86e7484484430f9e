"""One call at the front, from the request to the answer, with a mounter that is played by the test."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from broker import call, plan
from broker.channel import Channel, HungUp, close_all
from broker.config import FILESYSTEMS, Configuration, Deadlines
from broker.front import Front
from broker.operations import Mounter, MounterFailed, Operation
from broker.plan import Failed, Keep, Mounted, MountFacts, MountPlan, UnmountFacts, UnmountPlan
from broker.registry import MountNamespace, Registry
from fusermount3_proxy import wire
from fusermount3_proxy.wire import CommitRequest, MountRequest, Reply, UnmountRequest
from tests.unit.fakes import FakeFusectl

NAMESPACE = 7
FACTS = MountFacts(
    uid=1000,
    gid=1000,
    root_mode=stat.S_IFDIR,
    foreign_sticky=False,
    filesystem=FILESYSTEMS["ext"],
    access_errno=0,
    mount_namespace=NAMESPACE,
)


class FakeMounter:
    """Gives the test the child's end of each conversation."""

    def __init__(self) -> None:
        self.children: list[Channel] = []
        self.failure: Exception | None = None

    def begin(self, start: Any, connection: socket.socket, pidfd: int, pinned: int) -> Operation:
        if self.failure:
            raise self.failure
        for descriptor in (connection.fileno(), pidfd, pinned):
            os.fstat(descriptor)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.children.append(Channel(theirs))
        return Operation(ours, start.seconds)


class Scene:
    """A front with a fake mounter and a fake fusectl; the test is caller and child."""

    def __init__(self, directory: Path) -> None:
        self.fusectl = FakeFusectl(directory / "fusectl")
        self.registry = Registry(directory / "state", self.fusectl.descriptor)
        self.mounter = FakeMounter()
        self.logged: list[dict[str, Any]] = []
        configuration = Configuration(source=b"/etc/broker.toml")
        self.front = Front(configuration, cast(Mounter, self.mounter), self.registry, self._log)
        self.caller: Channel

    def _log(self, priority: int, message: str, **fields: Any) -> None:
        self.logged.append({"priority": priority, "message": message} | fields)

    def play(self, act: Callable[[], Awaitable[None]]) -> None:
        """Serve one call while `act` is played; afterwards nothing of the call may be left."""
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - no iterator that is itself a descriptor

        async def play() -> None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with Channel(theirs) as self.caller:
                async with asyncio.timeout(10):
                    serving = asyncio.create_task(call.serve(self.front, Channel(ours)))
                    try:
                        await act()
                    except HungUp:  # by a call that failed: that tells more
                        self.caller.socket.close()
                    await serving

        asyncio.run(play())
        for child in self.mounter.children:
            child.socket.close()
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208

    def request(self, request: wire.Request, descriptors: int | None = None) -> None:
        pinned = os.open("/", os.O_PATH)
        attached = [pinned] * (request.DESCRIPTORS if descriptors is None else descriptors)
        self.caller.send(wire.encode_request(request), attached)
        os.close(pinned)

    async def answer(self) -> Reply:
        data, descriptors = await self.caller.receive()
        close_all(descriptors)
        return wire.decode_reply(data)

    async def child_hears(self) -> plan.Record:
        while not self.mounter.children:
            await asyncio.sleep(0)
        data, _ = await self.mounter.children[-1].receive()
        return plan.load(data)

    async def child_keeps(self) -> None:
        """Be the child that is told to keep the mount, and ends."""
        assert await self.child_hears() == Keep()
        self.mounter.children[-1].socket.close()

    def child_says(self, record: plan.Record) -> None:
        self.mounter.children[-1].send(plan.dump(record))

    async def agree(self, facts: MountFacts = FACTS) -> MountPlan:
        """Be the child that was guessed wrong, tells the facts and gets a plan."""
        await self.child_hears()
        self.child_says(facts)
        wanted = await self.child_hears()
        assert isinstance(wanted, MountPlan)
        return wanted

    def mounted(self, device: int = 5) -> None:
        self.fusectl.connect(device)
        self.child_says(Mounted(device=device, mount_namespace=NAMESPACE, pids_visible=True))

    @property
    def last_record(self) -> dict[str, Any]:
        return self.logged[-1]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.registry.close()
    os.close(scene.fusectl.descriptor)


def test_a_mount_that_is_committed_is_kept(scene: Scene) -> None:
    async def act() -> None:
        scene.request(MountRequest(b"/mnt", b"fsname=s,subtype=sshfs"))
        wanted = await scene.agree()
        assert (wanted.uid, wanted.source, wanted.subtype) == (1000, b"s", b"sshfs")
        scene.mounted()
        scene.request(CommitRequest())
        await scene.child_keeps()

    scene.play(act)
    (mount,) = scene.registry
    assert (mount.mountpoint, mount.type, mount.source, mount.uid) == (b"/mnt", "fuse.sshfs", b"s", 1000)
    assert scene.last_record["message"] == "mount mounted"
    assert scene.last_record["request_id"] == mount.request
    assert scene.front.requests == {"mount mounted": 1}


@pytest.mark.parametrize("last_word", ["nothing", "garbage", "another mount", "a commit with a descriptor"])
def test_a_mount_that_is_not_committed_is_rolled_back(scene: Scene, last_word: str) -> None:
    async def act() -> None:
        scene.request(MountRequest(b"/mnt", b""))
        await scene.agree()
        scene.mounted()
        match last_word:
            case "nothing":
                scene.caller.socket.close()
            case "garbage":
                scene.caller.send(b"garbage")
            case "another mount":
                scene.request(MountRequest(b"/mnt", b""))
            case "a commit with a descriptor":
                scene.request(CommitRequest(), 1)
        with pytest.raises(HungUp):
            await scene.child_hears()
        await asyncio.sleep(0.01)
        assert scene.logged == [], "it is not over before the child has unmounted"
        scene.mounter.children[-1].socket.close()

    scene.play(act)
    assert len(scene.registry) == 0
    assert scene.last_record["message"].startswith("mount rolled back")


def test_a_mount_that_cannot_be_rolled_back_is_kept_in_mind(scene: Scene) -> None:
    async def act() -> None:
        scene.request(MountRequest(b"/mnt", b""))
        await scene.agree()
        scene.mounted()
        scene.caller.socket.close()
        with pytest.raises(HungUp):
            await scene.child_hears()
        scene.child_says(Failed(errno.EBUSY, b"roll back"))

    scene.play(act)
    assert len(scene.registry) == 1, "its owner can unmount it when nothing lies on it any more"
    assert scene.last_record["message"].startswith("mount not rolled back")


def test_a_descriptor_that_could_be_used_is_not_taken(scene: Scene) -> None:
    """O_PATH proves nothing, but what comes without it was opened by mistake, and asked a filesystem."""

    async def act() -> None:
        scene.caller.send(wire.encode_request(MountRequest(b"/mnt", b"")), [0])
        answer = await scene.answer()
        assert (answer.errno, b"O_PATH" in answer.text) == (errno.EBADMSG, True)

    scene.play(act)


def test_a_name_that_is_not_utf_8_is_a_name(scene: Scene) -> None:
    async def act() -> None:
        scene.request(MountRequest(b"/\xff", b"fsname=\xff,subtype=\xff"))
        await scene.agree()
        scene.mounted()
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
        scene.mounter.children[-1].socket.shutdown(socket.SHUT_WR)  # so that nothing is mounted in any case
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
def test_a_child_that_fails_is_a_refusal(scene: Scene, said: plan.Record | None, number: int, text: bytes) -> None:
    async def act() -> None:
        scene.request(MountRequest(b"/mnt", b""))
        await scene.agree()
        if said:
            scene.child_says(said)
        scene.mounter.children[-1].socket.close()
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


@pytest.mark.parametrize(
    ("record", "descriptors", "text"),
    [
        (b"garbage", 1, b"bad request: message does not end with a NUL byte"),
        (b"protocol=1\0operation=frobnicate\0", 1, b"bad request: unknown operation 'frobnicate'"),
        (wire.encode_request(CommitRequest()), 0, b"bad request: 'commit' before a mount"),
        (
            wire.encode_request(MountRequest(b"/mnt", b"")),
            0,
            b"bad request: 'mount' takes 1 file descriptors, 0 came",
        ),
        (
            wire.encode_request(MountRequest(b"/mnt", b"")),
            3,
            b"bad request: 'mount' takes 1 file descriptors, 3 came",
        ),
        (b"x" * 70_000, 1, b"bad request: message of more than 65536 bytes"),
        (b"x", 100, b"bad request: message with more than 4 file descriptors"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong_with_it(
    scene: Scene, record: bytes, descriptors: int, text: bytes
) -> None:
    async def act() -> None:
        scene.caller.send(record, [0] * descriptors)
        answer = await scene.answer()
        assert answer.errno
        assert answer.text == text

    scene.play(act)
    assert scene.mounter.children == []


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


def mount_one(scene: Scene) -> None:
    async def act() -> None:
        scene.request(MountRequest(b"/mnt", b""))
        await scene.agree()
        scene.mounted()
        scene.request(CommitRequest())
        await scene.child_keeps()

    scene.play(act)
    assert len(scene.registry) == 1


UNMOUNT_FACTS = UnmountFacts(uid=1000, mount_namespace=NAMESPACE, access_errno=0, mounted=True, device=5, dead=False)


def test_a_caller_unmounts_its_own(scene: Scene) -> None:
    mount_one(scene)

    async def act() -> None:
        scene.mounter.children.clear()
        scene.request(UnmountRequest(b"/mnt", b"mnt", lazy=True))
        while not scene.mounter.children:
            await asyncio.sleep(0)
        scene.child_says(UNMOUNT_FACTS)
        assert await scene.child_hears() == UnmountPlan(lazy=True)
        scene.fusectl.disconnect(5)
        scene.child_says(plan.Unmounted())
        assert (await scene.answer()).errno == 0

    scene.play(act)
    assert len(scene.registry) == 0
    assert scene.last_record["message"] == "unmount unmounted"


def test_a_caller_does_not_unmount_what_is_anothers(scene: Scene) -> None:
    mount_one(scene)

    async def act() -> None:
        scene.mounter.children.clear()
        scene.request(UnmountRequest(b"/mnt", b"mnt"))
        while not scene.mounter.children:
            await asyncio.sleep(0)
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
        assert isinstance(await scene.child_hears(), plan.Ask), "no guess where the limit may be reached"
        scene.child_says(FACTS)
        assert (await scene.answer()).text.startswith(b"too many FUSE filesystems mounted; mount_max=N can be set in ")

    scene.play(act)
