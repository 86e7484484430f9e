"""The front's side of the mounter: a process that fails, dies or stays silent never leaves the front waiting."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from fusermount3_broker.front.mounter_client import (
    Mounter,
    MounterFailed,
    Operation,
    OperationEnded,
    OperationFailed,
    OperationRefused,
)
from fusermount3_broker.messages import mounter as messages
from fusermount3_broker.messages.mounter import (
    BadDescriptors,
    Failed,
    Keep,
    Made,
    RolledBack,
    StartDismissal,
    StartUnmount,
    Unmounted,
)
from fusermount3_proxy import wire
from tests.unit.fakes import open_descriptors

MADE = Made(device=12, mount_namespace=34, pids=messages.PIDS_SEEN)
START = StartUnmount(5, b"mnt", False)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The socket between front and mounter: the front's end, and the mounter's end, which the test reads."""
    front_end, own_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own_end.settimeout(10)
    with front_end, own_end:
        yield front_end, own_end


@pytest.fixture
def mounter(ends: tuple[socket.socket, socket.socket]) -> Mounter:
    return Mounter(ends[0])


@pytest.fixture
def control(ends: tuple[socket.socket, socket.socket]) -> socket.socket:
    return ends[1]


def begin(mounter: Mounter) -> Operation:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        return asyncio.run(mounter.begin(START, [connection.fileno(), 0]))


# The socket to the mounter


def test_an_operation_begins_with_a_record_and_three_descriptors(mounter: Mounter, control: socket.socket) -> None:
    before = open_descriptors()
    with begin(mounter):
        data, descriptors, _, _ = socket.recv_fds(control, 1000, 10)
        assert messages.load(data) == START
        assert len(descriptors) == 3
        assert [os.fstat(each) for each in descriptors[2:]] == [os.fstat(0)]
        conversation = socket.socket(fileno=descriptors[0])
        for each in descriptors[1:]:
            os.close(each)
        conversation.settimeout(10)
    assert conversation.recv(1) == b"", "leaving the block hangs up"
    conversation.close()
    assert open_descriptors() == before


def test_operations_wait_while_there_is_no_mounter(mounter: Mounter, control: socket.socket) -> None:
    before = open_descriptors()
    for _ in range(3):
        with begin(mounter):
            pass
    for _ in range(3):  # a mounter that is started later takes them
        data, descriptors, _, _ = socket.recv_fds(control, 1000, 10)
        for each in descriptors:
            os.close(each)
        assert messages.load(data) == START
    assert open_descriptors() == before


def test_a_mounter_that_will_not_come_again_is_told(mounter: Mounter, control: socket.socket) -> None:
    control.close()  # as if the supervisor's copy were closed, too
    before = open_descriptors()
    with pytest.raises(MounterFailed, match="takes no operation"):
        begin(mounter)
    assert open_descriptors() == before


def test_what_nobody_wants_is_given_to_a_child_to_lose(mounter: Mounter, control: socket.socket) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.send(b"unwanted")
        with asyncio.run(mounter.dismiss([ours], 5)):
            data, (conversation, connection), _, _ = socket.recv_fds(control, 1000, 10)
            ours.close()
        assert messages.load(data) == StartDismissal(seconds=5)
        with socket.socket(fileno=conversation) as child, socket.socket(fileno=connection) as given:
            assert child.recv(1) == b"", "the front has closed it now, and it is for the child to do so"
            assert given.recv(1000) == b"unwanted"


@pytest.fixture
def narrow(ends: tuple[socket.socket, socket.socket]) -> Mounter:
    """A mounter whose socket has room for few records only."""
    ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    return Mounter(ends[0])


def test_a_mounter_that_has_too_much_to_do_for_a_step_takes_no_more(narrow: Mounter) -> None:
    before = open_descriptors()

    async def ask() -> None:
        for _ in range(64):
            (await narrow.begin(START._replace(seconds=1), [0])).close()

    with pytest.raises(MounterFailed, match="no room for 1 seconds"):
        asyncio.run(ask())
    assert open_descriptors() == before


def test_who_comes_in_a_burst_waits_for_room_in_turn(narrow: Mounter, control: socket.socket) -> None:
    control.setblocking(False)

    async def ask(number: int) -> None:
        (await narrow.begin(START._replace(name=b"%d" % number), [])).close()

    def take() -> int:
        data, descriptors, _, _ = socket.recv_fds(control, 1000, 10)
        for each in descriptors:
            os.close(each)
        started = messages.load(data)
        assert isinstance(started, StartUnmount)
        return int(started.name)

    async def burst() -> list[int]:
        asking = [asyncio.create_task(ask(number)) for number in range(64)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert not all(each.done() for each in asking), "there is no room for all of them"
        asking[40].cancel()  # a caller that goes away meanwhile delays no other
        taken: list[int] = []
        while len(taken) < 63:
            with suppress(BlockingIOError):
                taken.append(take())
            await asyncio.sleep(0)
        await asyncio.gather(*asking[:40], *asking[41:])
        return taken

    before = open_descriptors()
    assert asyncio.run(asyncio.wait_for(burst(), 30)) == [number for number in range(64) if number != 40]
    assert open_descriptors() == before


# The conversation


@contextmanager
def talking(seconds: int) -> Iterator[tuple[Operation, socket.socket]]:
    """An operation whose steps may take so long, and the child's end of it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.settimeout(10)
    with Operation(ours, seconds) as operation, theirs:
        yield operation, theirs


@pytest.fixture
def talk() -> Iterator[tuple[Operation, socket.socket]]:
    """An operation whose child has time enough on any machine."""
    with talking(10) as talk:
        yield talk


@pytest.fixture
def silence() -> Iterator[tuple[Operation, socket.socket]]:
    """An operation whose child is given up after the second more."""
    with talking(0) as talk:
        yield talk


def test_what_is_said_is_heard(talk: tuple[Operation, socket.socket]) -> None:
    operation, child = talk
    operation.say(Keep())
    assert messages.load(child.recv(1000)) == Keep()
    child.send(messages.dump(MADE))
    assert asyncio.run(operation.expect(Made)) == MADE


def test_a_child_that_could_not_go_on_says_why(talk: tuple[Operation, socket.socket]) -> None:
    operation, child = talk
    child.send(messages.dump(Failed(13, b"access mountpoint")))
    with pytest.raises(OperationFailed) as caught:
        asyncio.run(operation.expect(Made))
    assert operation.alive
    assert (caught.value.errno, caught.value.step) == (13, "access mountpoint")


def test_a_child_that_ends_without_a_word_ends_the_operation(talk: tuple[Operation, socket.socket]) -> None:
    operation, child = talk
    assert operation.alive
    child.close()
    with pytest.raises(OperationEnded):
        asyncio.run(operation.expect(Made))
    assert not operation.alive
    operation.say(Keep())  # the child doesn't read it, and the sender gets no error


def test_the_last_word_of_a_child_that_has_ended_is_heard(talk: tuple[Operation, socket.socket]) -> None:
    operation, child = talk
    operation.say(Keep())
    child.send(messages.dump(MADE))
    child.close()  # with a record unread: the kernel reports that first
    operation.say(Keep())
    assert asyncio.run(operation.expect(Made)) == MADE


def test_a_child_that_says_nothing_is_not_waited_for_longer_than_a_second_more(
    silence: tuple[Operation, socket.socket],
) -> None:
    operation, _ = silence
    with pytest.raises(OperationEnded):
        asyncio.run(operation.expect(Made))
    assert not operation.alive


@pytest.mark.parametrize(
    "record",
    [
        b"garbage",
        b"kind=Nonsense\0",
        messages.dump(MADE).replace(b"12", b"-1"),
        b"kind=Made\0",
        messages.dump(Unmounted()),
        b"x" * 70000,
    ],
)
def test_a_child_that_speaks_out_of_turn_or_nonsense_ends_the_operation(
    talk: tuple[Operation, socket.socket], record: bytes
) -> None:
    operation, child = talk
    child.send(record)
    with pytest.raises(OperationEnded):
        asyncio.run(operation.expect(Made))


def test_a_step_that_is_no_text_is_a_failure_like_any_other(talk: tuple[Operation, socket.socket]) -> None:
    operation, child = talk
    child.send(messages.dump(Failed(5, b"\xff")))
    with pytest.raises(OperationFailed):
        asyncio.run(operation.expect(Made))


@pytest.mark.parametrize(
    "record", [messages.dump(MADE), messages.dump(Failed(5, b"x")), messages.dump(Keep()), b"garbage"]
)
def test_descriptors_that_a_child_sends_are_closed(talk: tuple[Operation, socket.socket], record: bytes) -> None:
    operation, child = talk
    before = open_descriptors()
    socket.send_fds(child, [record], [0, 0])
    with suppress(Exception):  # another test checks which one
        asyncio.run(operation.expect(Made))
    assert open_descriptors() == before


@pytest.mark.parametrize("descriptors", [0, 1, 253])
def test_a_caller_that_sent_the_wrong_descriptors_is_told_of(
    talk: tuple[Operation, socket.socket], descriptors: int
) -> None:
    operation, child = talk
    child.send(messages.dump(BadDescriptors(descriptors)))
    with pytest.raises(OperationRefused) as caught:
        asyncio.run(operation.expect(Made))
    assert caught.value.descriptors == descriptors


def test_undoing_waits_until_the_child_has_unmounted(talk: tuple[Operation, socket.socket]) -> None:
    operation, child = talk

    async def undo_with_a_child() -> None:
        undoing = asyncio.create_task(operation.undo())
        await asyncio.sleep(0)
        assert messages.load(child.recv(1000)) == messages.Undo()
        await asyncio.sleep(0.02)
        assert not undoing.done()
        child.send(messages.dump(RolledBack()))
        assert await undoing
        assert operation.alive, "it ends after the conversation"

    asyncio.run(undo_with_a_child())


@pytest.mark.parametrize(
    "last_words",
    [[], [Failed(5, b"roll back")], [Unmounted()], [MADE, RolledBack()], [b"garbage"]],
    ids=["none", "a failure", "another", "another, first", "garbage"],
)
def test_nothing_is_undone_that_the_child_does_not_say_is_rolled_back(
    talk: tuple[Operation, socket.socket], last_words: list[messages.Record | bytes]
) -> None:
    operation, child = talk
    for each in last_words:
        child.send(each if isinstance(each, bytes) else messages.dump(each))
    child.close()
    assert not asyncio.run(operation.undo())


def test_a_child_that_says_nothing_has_undone_nothing(silence: tuple[Operation, socket.socket]) -> None:
    operation, _ = silence
    assert not asyncio.run(operation.undo())


def test_a_child_that_is_dismissed_is_waited_for(talk: tuple[Operation, socket.socket]) -> None:
    operation, child = talk

    async def dismiss() -> None:
        letting_go = asyncio.create_task(operation.let_go())
        await asyncio.sleep(0.05)
        assert messages.load(child.recv(wire.MAX_MESSAGE)) == messages.LetGo()
        assert not letting_go.done()
        child.send(messages.dump(messages.HasLetGo()))
        await letting_go

    asyncio.run(dismiss())


@pytest.mark.parametrize("word", [messages.Failed(errno.EPERM, b"mount"), messages.BadDescriptors(2), messages.Kept()])
def test_a_child_that_has_said_its_last_word_is_not_dismissed(
    talk: tuple[Operation, socket.socket], word: messages.Record
) -> None:
    operation, child = talk
    child.send(messages.dump(word))
    with suppress(OperationFailed, OperationRefused):
        asyncio.run(operation.hear())
    asyncio.run(operation.let_go())
    child.setblocking(False)
    with pytest.raises(BlockingIOError):
        child.recv(1)


def test_what_the_child_enters_is_kept_in_mind_and_no_answer(talk: tuple[Operation, socket.socket]) -> None:
    operation, child = talk
    for device in (7, 8):
        child.send(messages.dump(messages.Entering(device=device, uid=1000, mount_namespace=34)))
    child.send(messages.dump(MADE))
    assert asyncio.run(operation.expect(Made)) == MADE
    assert operation.entering == messages.Entering(device=8, uid=1000, mount_namespace=34)


def test_a_child_that_says_nothing_is_stuck_and_one_that_ended_is_not(silence: tuple[Operation, socket.socket]) -> None:
    operation, child = silence
    with pytest.raises(OperationEnded):
        asyncio.run(operation.hear())
    assert operation.stuck
    child.close()
    other, gone = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    gone.close()
    with Operation(other, 10) as ended:
        with pytest.raises(OperationEnded):
            asyncio.run(ended.hear())
        assert not ended.stuck


def test_what_remains_of_an_operation_tells_when_its_child_has_ended(talk: tuple[Operation, socket.socket]) -> None:
    operation, child = talk

    async def wait_for_end() -> None:
        with operation.second_handle() as remains:
            operation.__exit__(None, None, None)
            remains.hang_up()
            waiting = asyncio.create_task(remains.ended())
            await asyncio.sleep(0.02)
            assert child.recv(1) == b"", "it was hung up on"
            for record in (messages.dump(Failed(5, b"x")), b"garbage", b"x" * 70000):
                child.send(record)
            await asyncio.sleep(0.02)
            assert not waiting.done(), "whatever it says, it is there"
            child.close()
            await asyncio.wait_for(waiting, 10)

    asyncio.run(wait_for_end())


# Descriptors from the mounter


@pytest.fixture
def child() -> Iterator[tuple[Operation, socket.socket]]:
    """An operation, and the child's end of the conversation."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, Operation(ours, 5) as operation:
        yield operation, theirs


def test_descriptors_come_with_what_the_child_says(child: tuple[Operation, socket.socket]) -> None:
    operation, theirs = child
    socket.send_fds(theirs, [messages.dump(messages.Published())], [0, 1])
    theirs.send(messages.dump(Unmounted()))

    async def expect() -> list[int]:
        published, descriptors = await operation.expect_with_descriptors(messages.Published, 2)
        assert published == messages.Published()
        assert await operation.expect(Unmounted) == Unmounted()
        return descriptors

    descriptors = asyncio.run(expect())
    assert [os.fstat(each) for each in descriptors] == [os.fstat(0), os.fstat(1)]
    for each in descriptors:
        assert not os.get_inheritable(each)
        os.close(each)


@pytest.mark.parametrize("said", [messages.dump(Unmounted()), b"nonsense"])
def test_descriptors_that_come_with_something_else_are_closed(
    child: tuple[Operation, socket.socket], said: bytes
) -> None:
    operation, theirs = child
    before = open_descriptors()
    socket.send_fds(theirs, [said], [0, 1])
    with pytest.raises(OperationEnded):
        asyncio.run(operation.expect_with_descriptors(messages.Published, 2))
    operation.close()
    assert open_descriptors() == before - 1, "the conversation itself"


def test_more_descriptors_than_were_asked_for_are_closed(child: tuple[Operation, socket.socket]) -> None:
    operation, theirs = child
    before = open_descriptors()
    socket.send_fds(theirs, [messages.dump(messages.Published())], [0] * 9)
    with pytest.raises(OperationEnded):
        asyncio.run(operation.expect_with_descriptors(messages.Published, 2))
    assert open_descriptors() == before


def test_descriptors_that_nobody_asked_for_are_not_taken(child: tuple[Operation, socket.socket]) -> None:
    operation, theirs = child
    before = open_descriptors()
    socket.send_fds(theirs, [messages.dump(Unmounted())], [0])
    assert asyncio.run(operation.expect(Unmounted)) == Unmounted()
    assert open_descriptors() == before
