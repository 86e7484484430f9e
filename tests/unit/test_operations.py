"""The front's side of the mounter: a process that fails, dies or says nothing never leaves the front waiting."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pytest_subprocess import FakeProcess

from broker import plan
from broker.operations import Mounter, MounterFailed, Operation, OperationEnded, OperationFailed, OperationRefused
from broker.plan import BadDescriptors, Failed, Keep, Mounted, RolledBack, StartDismissal, StartUnmount, Unmounted
from fusermount3_proxy import wire

MOUNTED = Mounted(device=12, mount_namespace=34, pids_visible=True)
START = StartUnmount(5, b"mnt", False)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class FakeMounter:
    """Stands for the mounter's process: it has the other end of the control socket, and dies when it is told to."""

    started: list[FakeMounter]

    def __init__(self, command: list[str], *, pass_fds: list[int], **_: Any) -> None:
        assert command[-1] == str(pass_fds[0])
        self.control = socket.socket(fileno=os.dup(pass_fds[0]))
        self.control.settimeout(10)
        self.pid = 4711
        self.status: int | None = None
        socket.send_fds(self.control, [b"ready"], [0])
        self.started.append(self)

    def die(self) -> None:
        self.status = -9
        self.control.close()

    def poll(self) -> int | None:
        return self.status

    def wait(self) -> int:
        """Return the status of a process that has died, or of one on which the front hung up."""
        if self.status is None:
            while self.control.recv(1000):  # until the front hangs up: otherwise it would wait for ever, and this fails
                pass
            self.die()
            self.status = 0
        return self.status or 0


@pytest.fixture
def fake_mounters(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeMounter]]:
    FakeMounter.started = []
    monkeypatch.setattr("broker.operations.subprocess.Popen", FakeMounter)
    yield FakeMounter.started
    for each in FakeMounter.started:
        each.control.close()


@pytest.fixture
def mounter(fake_mounters: list[FakeMounter]) -> Iterator[Mounter]:
    mounter = Mounter()
    yield mounter
    mounter.close()
    assert all(each.status is not None for each in fake_mounters), "none is left"
    os.close(mounter.fusectl)


def begin(mounter: Mounter) -> Operation:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        return mounter.begin(START, [connection.fileno(), 0])


# The process


def test_a_mounter_that_ends_when_it_is_started_is_told(fp: FakeProcess) -> None:
    fp.register([sys.executable, "-I", "-m", "broker.mounter", fp.any()], returncode=3)
    with pytest.raises(MounterFailed, match="the mounter ended with status 3 when it was started"):
        Mounter()


def test_a_mounter_that_cannot_be_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nonexistent/python3")
    with pytest.raises(MounterFailed):
        Mounter()


def test_a_mounter_gives_its_root_of_fusectl_and_its_pid(mounter: Mounter) -> None:
    assert os.path.sameopenfile(mounter.fusectl, 0)
    assert (mounter.pid, mounter.restarts) == (4711, 0)


def test_a_mounter_that_is_closed_has_ended(fake_mounters: list[FakeMounter]) -> None:
    mounter = Mounter()
    mounter.close()
    assert fake_mounters[0].status == 0
    os.close(mounter.fusectl)


def test_an_operation_begins_with_a_record_and_three_descriptors(
    mounter: Mounter, fake_mounters: list[FakeMounter]
) -> None:
    before = open_descriptors()
    with begin(mounter):
        data, descriptors, _, _ = socket.recv_fds(fake_mounters[0].control, 1000, 10)
        assert plan.load(data) == START
        assert len(descriptors) == 3
        assert [os.fstat(each) for each in descriptors[2:]] == [os.fstat(0)]
        conversation = socket.socket(fileno=descriptors[0])
        for each in descriptors[1:]:
            os.close(each)
        conversation.settimeout(10)
    assert conversation.recv(1) == b"", "leaving the block hangs up"
    conversation.close()
    assert open_descriptors() == before


def test_a_mounter_found_dead_is_started_again(mounter: Mounter, fake_mounters: list[FakeMounter]) -> None:
    fake_mounters[0].die()
    before = open_descriptors()
    for _ in range(3):
        with begin(mounter):
            pass
    assert len(fake_mounters) == 2
    assert mounter.restarts == 1
    for _ in range(3):
        data, descriptors, _, _ = socket.recv_fds(fake_mounters[1].control, 1000, 10)
        for each in descriptors:
            os.close(each)
        assert plan.load(data) == START
    assert open_descriptors() == before + 1, "nothing but the new fake's end of the control socket"


def test_a_mounter_that_cannot_be_started_again_is_told_each_time(
    mounter: Mounter, fake_mounters: list[FakeMounter], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_mounters[0].die()

    class StillbornMounter(FakeMounter):
        def __init__(self, _: list[str], *, pass_fds: list[int], **__: Any) -> None:
            self.control = socket.socket(fileno=os.dup(pass_fds[0]))
            self.status = 1
            self.control.close()

    with monkeypatch.context() as patch:
        patch.setattr("broker.operations.subprocess.Popen", StillbornMounter)
        for _ in range(2):
            with pytest.raises(MounterFailed):
                begin(mounter)
    with begin(mounter):
        assert len(fake_mounters) == 2


def test_a_mounter_that_dies_just_as_an_operation_begins_is_told(
    mounter: Mounter, fake_mounters: list[FakeMounter]
) -> None:
    fake_mounters[0].control.close()  # and nobody has waited for the process yet
    before = open_descriptors()
    with pytest.raises(MounterFailed):
        begin(mounter)
    assert open_descriptors() == before
    fake_mounters[0].die()
    with begin(mounter):
        assert mounter.restarts == 1


def test_what_nobody_wants_is_given_to_a_child_to_lose(mounter: Mounter, fake_mounters: list[FakeMounter]) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.send(b"unwanted")
        with mounter.dismiss(ours):
            data, (conversation, connection), _, _ = socket.recv_fds(fake_mounters[0].control, 1000, 10)
            ours.close()
        assert plan.load(data) == StartDismissal(seconds=0)
        with socket.socket(fileno=conversation) as child, socket.socket(fileno=connection) as given:
            assert child.recv(1) == b"", "the front has closed it now, and it is for the child to do so"
            assert given.recv(1000) == b"unwanted"


def test_a_mounter_found_dead_is_started_again_to_lose_something_too(
    mounter: Mounter, fake_mounters: list[FakeMounter]
) -> None:
    fake_mounters[0].control.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        with pytest.raises(MounterFailed):  # it is just dying
            mounter.dismiss(connection)
        fake_mounters[0].die()
        with mounter.dismiss(connection):
            assert mounter.restarts == 1


def test_a_mounter_that_has_too_much_to_do_is_not_waited_for(
    mounter: Mounter, fake_mounters: list[FakeMounter]
) -> None:
    assert fake_mounters, "it is there, and takes nothing"
    before = open_descriptors()
    with pytest.raises(MounterFailed, match="takes no operation"):
        for _ in range(10_000):
            begin(mounter).__exit__(None, None, None)
    assert open_descriptors() == before
    assert mounter.restarts == 0


# The conversation


@pytest.fixture
def talk() -> Iterator[tuple[Operation, socket.socket]]:
    """An operation, and the child's end of it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.settimeout(10)
    with Operation(ours, 0) as operation, theirs:
        yield operation, theirs


def test_what_is_said_is_heard(talk: tuple[Operation, socket.socket]) -> None:
    operation, child = talk
    operation.say(Keep())
    assert plan.load(child.recv(1000)) == Keep()
    child.send(plan.dump(MOUNTED))
    assert asyncio.run(operation.expect(Mounted)) == MOUNTED


def test_a_child_that_could_not_go_on_says_why(talk: tuple[Operation, socket.socket]) -> None:
    operation, child = talk
    child.send(plan.dump(Failed(13, b"access mountpoint")))
    with pytest.raises(OperationFailed) as caught:
        asyncio.run(operation.expect(Mounted))
    assert operation.alive
    assert (caught.value.errno, caught.value.step) == (13, "access mountpoint")


def test_a_child_that_ends_without_a_word_ends_the_operation(talk: tuple[Operation, socket.socket]) -> None:
    operation, child = talk
    assert operation.alive
    child.close()
    with pytest.raises(OperationEnded):
        asyncio.run(operation.expect(Mounted))
    assert not operation.alive
    operation.say(Keep())  # nobody hears it, and that is no error of who says it


def test_the_last_word_of_a_child_that_has_ended_is_heard(talk: tuple[Operation, socket.socket]) -> None:
    operation, child = talk
    operation.say(Keep())
    child.send(plan.dump(MOUNTED))
    child.close()  # with something unread: the kernel reports that first
    operation.say(Keep())
    assert asyncio.run(operation.expect(Mounted)) == MOUNTED


def test_a_child_that_says_nothing_is_not_waited_for_longer_than_a_second_more(
    talk: tuple[Operation, socket.socket],
) -> None:
    operation, _ = talk
    with pytest.raises(OperationEnded):
        asyncio.run(operation.expect(Mounted))
    assert not operation.alive


@pytest.mark.parametrize(
    "record",
    [
        b"garbage",
        b"kind=Nonsense\0",
        plan.dump(MOUNTED).replace(b"12", b"-1"),
        b"kind=Mounted\0",
        plan.dump(Unmounted()),
        b"x" * 70000,
    ],
)
def test_a_child_that_speaks_out_of_turn_or_nonsense_ends_the_operation(
    talk: tuple[Operation, socket.socket], record: bytes
) -> None:
    operation, child = talk
    child.send(record)
    with pytest.raises(OperationEnded):
        asyncio.run(operation.expect(Mounted))


def test_a_step_that_is_no_text_is_a_failure_like_any_other(talk: tuple[Operation, socket.socket]) -> None:
    operation, child = talk
    child.send(plan.dump(Failed(5, b"\xff")))
    with pytest.raises(OperationFailed):
        asyncio.run(operation.expect(Mounted))


@pytest.mark.parametrize("record", [plan.dump(MOUNTED), plan.dump(Failed(5, b"x")), plan.dump(Keep()), b"garbage"])
def test_descriptors_that_a_child_sends_are_closed(talk: tuple[Operation, socket.socket], record: bytes) -> None:
    operation, child = talk
    before = open_descriptors()
    socket.send_fds(child, [record], [0, 0])
    with suppress(Exception):  # which one, another test says
        asyncio.run(operation.expect(Mounted))
    assert open_descriptors() == before


@pytest.mark.parametrize("descriptors", [0, 1, 253])
def test_a_caller_that_sent_the_wrong_descriptors_is_told_of(
    talk: tuple[Operation, socket.socket], descriptors: int
) -> None:
    operation, child = talk
    child.send(plan.dump(BadDescriptors(descriptors)))
    with pytest.raises(OperationRefused) as caught:
        asyncio.run(operation.expect(Mounted))
    assert caught.value.descriptors == descriptors


def test_undoing_waits_until_the_child_has_unmounted(talk: tuple[Operation, socket.socket]) -> None:
    operation, child = talk

    async def undo_with_a_child() -> None:
        undoing = asyncio.create_task(operation.undo())
        await asyncio.sleep(0)
        assert child.recv(1) == b"", "it was hung up on"
        await asyncio.sleep(0.02)
        assert not undoing.done()
        child.send(plan.dump(RolledBack()))
        assert await undoing
        assert not operation.alive, "it ends with the conversation, half of which has ended"

    asyncio.run(undo_with_a_child())


@pytest.mark.parametrize(
    "last_words",
    [[], [Failed(5, b"roll back")], [Unmounted()], [MOUNTED, RolledBack()], [b"garbage"]],
    ids=["none", "a failure", "another", "another, first", "garbage"],
)
def test_nothing_is_undone_that_the_child_does_not_say_is_rolled_back(
    talk: tuple[Operation, socket.socket], last_words: list[plan.Record | bytes]
) -> None:
    operation, child = talk
    for each in last_words:
        child.send(each if isinstance(each, bytes) else plan.dump(each))
    child.close()
    assert not asyncio.run(operation.undo())


def test_a_child_that_says_nothing_has_undone_nothing(talk: tuple[Operation, socket.socket]) -> None:
    operation, _ = talk
    assert not asyncio.run(operation.undo())


def test_a_child_that_is_dismissed_is_waited_for(talk: tuple[Operation, socket.socket]) -> None:
    operation, child = talk

    async def dismiss() -> None:
        letting_go = asyncio.create_task(operation.let_go())
        await asyncio.sleep(0.05)
        assert plan.load(child.recv(wire.MAX_MESSAGE)) == plan.LetGo()
        assert not letting_go.done()
        child.send(plan.dump(plan.HasLetGo()))
        await letting_go

    asyncio.run(dismiss())


@pytest.mark.parametrize("word", [plan.Failed(errno.EPERM, b"mount"), plan.BadDescriptors(2), plan.Kept()])
def test_a_child_that_has_said_its_last_word_is_not_dismissed(
    talk: tuple[Operation, socket.socket], word: plan.Record
) -> None:
    operation, child = talk
    child.send(plan.dump(word))
    with suppress(OperationFailed, OperationRefused):
        asyncio.run(operation.hear())
    asyncio.run(operation.let_go())
    child.setblocking(False)
    with pytest.raises(BlockingIOError):
        child.recv(1)
