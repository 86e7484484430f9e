"""Mounts that the mounter makes without the interpreter (plain_call.c), compared with those that Python makes.

A process plays the front; so these are also attacks by a compromised front on the children that make plain mounts.
"""

from __future__ import annotations

import itertools
import os
import random
from errno import EINVAL, EPERM
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.messages import mounter
from fusermount3_broker.mounter import filesystem, fuse_connections, programs
from tests.e2e.conftest import wait_until
from tests.e2e.hostile import COMMIT, O_PATH, Client, fuse_mounts, in_private_namespace, mount_request
from tests.e2e.owned_front import (
    USER,
    Conversation,
    OwnedFront,
    a_plan,
    caller,
    facts_of,
    make_users_place,
    playing_the_front,
)
from tests.e2e.test_owned_front import NOT_THE_USERS
from tests.lab.broker import Broker
from tests.lab.commands import run
from tests.lab.kernel import needs_kernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.lab.podman import Mount

pytestmark = [pytest.mark.e2e, needs_kernel("statmount(2)")]

#: Seconds of a step, and for the caller to commit; a test may wait for either.
SECONDS = 2
STARTS = mounter.StartMount(SECONDS, SECONDS), mounter.StartPlainMount(SECONDS, SECONDS)
PLAIN = STARTS[1]
#: The longest of `quantities.Seconds`.
LONGEST = 1_000_000
REFUSED = mounter.Failed(EPERM, b"check the plan")
FLAGS = [name for name, kind in mounter.MountPlan.__annotations__.items() if kind is bool]
FLAGS = [name for name in FLAGS if name not in ("foreign_sticky", "sync_init")]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return make_users_place(tmp_path)


def some_plans() -> list[dict[str, Any]]:
    """Return what plans may want: each flag, all of them, and some at random; texts that are empty and longest."""
    generator = random.Random(1)
    combinations = [[], *([flag] for flag in FLAGS), FLAGS, *(generator.sample(FLAGS, 5) for _ in range(20))]
    texts = [
        {},
        {"source": b""},
        {"source": b"s" * filesystem.LONGEST_STRING, "subtype": b"t" * 40, "request_id": b"i" * 64},
        {"source": b"a,b=c\\ d\xff", "subtype": b"x.y", "max_read": b"4096"},
    ]
    chosen = itertools.chain(itertools.product(combinations, texts[:1]), itertools.product(combinations[:1], texts))
    return [dict.fromkeys(flags, True) | more for flags, more in chosen]


def without_ids(record: mounter.Record | None) -> mounter.Record | None:
    return record._replace(device=0, mount_id=0) if isinstance(record, mounter.Made) else record


def mounted(front: OwnedFront, start: mounter.Record, place: Path, uid: int, wanted: dict[str, Any]) -> list[object]:
    """Mount, unmount again, and return all that front and caller see of it, but IDs."""
    with caller(place, uid) as who:
        conversation = front.begin(start, *who)
        facts = facts_of(conversation)
        conversation.say(a_plan(facts, **wanted))
        seen: list[object] = [facts, without_ids(conversation.hear())]
        if isinstance(seen[-1], mounter.Failed):
            return seen
        conversation.say(mounter.Attach())
        seen += [conversation.hear(), *(described(mount) for mount in fuse_mounts())]
        conversation.say(mounter.Undo())
        return [*seen, conversation.hear(), fuse_mounts()]


def described(mount: Mount) -> tuple[object, ...]:
    return mount.mountpoint, mount.fstype, mount.source, mount.options, mount.super_options


@pytest.mark.parametrize("uid", [0, USER])
def test_both_make_the_same_mount(uid: int, place: Path) -> None:
    def body() -> None:
        with playing_the_front() as front:
            for wanted in some_plans():
                by_python, plain = (mounted(front, start, place, uid, wanted) for start in STARTS)
                assert plain == by_python, wanted
                assert plain[-2:] == [mounter.RolledBack(), []] or plain[1:] == [mounter.Failed(EINVAL, b"mount")]
                assert plain[1] != mounter.NotPlain()

    in_private_namespace(body)


def test_both_mount_on_a_file(place: Path) -> None:
    file = place / "file"
    file.touch()
    os.chown(file, USER, USER)

    def body() -> None:
        with playing_the_front() as front:
            by_python, plain = (mounted(front, start, file, USER, {}) for start in STARTS)
            assert plain == by_python
            assert isinstance(plain[2], mounter.Mounted)

    in_private_namespace(body)


@pytest.mark.parametrize("make", NOT_THE_USERS, ids=lambda make: make.__name__)
def test_where_not_any_user_may_mount_python_decides(make: Callable[[Path], None], place: Path) -> None:
    target = place.parent / "target"
    make(target)

    def body() -> None:
        with playing_the_front() as front, caller(target, USER) as who:
            assert front.begin(PLAIN, *who).hear() == mounter.NotPlain()
            by_python = front.begin(STARTS[0], *who)  # the request is still there
            by_python.say(a_plan(facts_of(by_python)))
            assert by_python.hear() == REFUSED

    in_private_namespace(body)


@pytest.mark.parametrize("path", ["/proc/sys", "/proc/self/fdinfo", "/sys/fs"])
def test_on_a_filesystem_of_the_kernel_python_decides(path: str) -> None:
    def body() -> None:
        with playing_the_front() as front, caller(Path(path), 0) as who:
            assert front.begin(PLAIN, *who).hear() == mounter.NotPlain()

    in_private_namespace(body)


@pytest.mark.parametrize("on_it", [False, True])
def test_on_the_root_of_a_mount_python_decides_if_a_mount_would_be_hidden(on_it: bool, place: Path) -> None:
    def body() -> None:
        run(["mount", "-t", "tmpfs", "tmpfs", place])
        if on_it:
            (place / "below").mkdir()
            run(["mount", "-t", "tmpfs", "tmpfs", place / "below"])
        with playing_the_front() as front, caller(place, 0) as who:
            conversation = front.begin(PLAIN, *who)
            if on_it:
                assert conversation.hear() == mounter.NotPlain()
            else:
                conversation.say(a_plan(facts_of(conversation)))
                assert isinstance(conversation.attached(), mounter.Mounted)

    in_private_namespace(body)


def test_on_a_fuse_filesystem_python_decides(place: Path) -> None:
    def body() -> None:
        device = os.open("/dev/fuse", os.O_RDWR)
        syscalls.mount(b"x", bytes(place), b"fuse", 0, b"fd=%d,rootmode=40000,user_id=0,group_id=0" % device)
        with playing_the_front() as front, caller(place, 0) as who:
            assert front.begin(PLAIN, *who).hear() == mounter.NotPlain()
        os.close(device)
        syscalls.umount2(bytes(place), syscalls.MNT_DETACH)

    in_private_namespace(body)


def test_a_caller_with_very_many_groups_is_left_to_python(place: Path) -> None:
    """Its capabilities come after its groups in /proc/PID/status, perhaps so that a number is cut."""
    before, _, _ = Path("/proc/self/status").read_text().partition("CapBnd:")
    longest = (8192 - len(before)) // len("100000 ")

    def body() -> None:
        with playing_the_front() as front:
            for count in (*range(longest - 15, longest + 15), 3000):
                with caller(place, USER, groups=range(100_000, 100_000 + count)) as who:
                    assert front.begin(PLAIN, *who).hear() == mounter.NotPlain(), count

    in_private_namespace(body)


def test_the_longest_deadlines_are_understood(place: Path) -> None:
    def body() -> None:
        with playing_the_front() as front, caller(place, USER) as who:
            assert isinstance(
                facts_of(front.begin(mounter.StartPlainMount(LONGEST, LONGEST), *who)), mounter.MountFacts
            )

    in_private_namespace(body)


@pytest.mark.parametrize(
    "unusual",
    [
        {"sync_init": True},
        {"warnings": b"one\ntwo"},
        {"source": b"s" * (filesystem.LONGEST_STRING + 1)},
        {"subtype": b"s" * (filesystem.LONGEST_STRING + 1)},
        {"request_id": b"i" * (filesystem.LONGEST_STRING + 1)},
    ],
    ids=lambda unusual: next(iter(unusual)),
)
def test_an_unusual_plan_is_left_to_python(unusual: dict[str, Any], place: Path) -> None:
    def body() -> None:
        with playing_the_front() as front, caller(place, USER) as who:
            conversation = front.begin(PLAIN, *who)
            conversation.say(a_plan(facts_of(conversation), **unusual))
            assert conversation.hear() == mounter.NotPlain()
            assert isinstance(facts_of(front.begin(STARTS[0], *who)), mounter.MountFacts)

    in_private_namespace(body)


def until_the_plan(conversation: Conversation) -> None:
    pass


def until_made(conversation: Conversation) -> None:
    conversation.say(a_plan(facts_of(conversation)))
    assert isinstance(conversation.hear(), mounter.Made)


def until_mounted(conversation: Conversation) -> None:
    until_made(conversation)
    conversation.say(mounter.Attach())
    assert isinstance(conversation.hear(), mounter.Mounted)


@pytest.mark.parametrize("until", [until_the_plan, until_made, until_mounted], ids=lambda until: until.__name__)
def test_a_front_that_hangs_up_leaves_nothing(until: Callable[[Conversation], None], place: Path) -> None:
    """This caller does not commit."""

    def body() -> None:
        with playing_the_front() as front, caller(place, USER) as who:
            conversation = front.begin(PLAIN, *who)
            until(conversation)
            conversation.close()
            wait_until(lambda: not fuse_mounts())
            front.check()

    in_private_namespace(body)


@pytest.mark.parametrize("until", [until_the_plan, until_made], ids=lambda until: until.__name__)
def test_a_caller_that_is_refused_gets_no_mount(until: Callable[[Conversation], None], place: Path) -> None:
    def body() -> None:
        with playing_the_front() as front, caller(place, USER) as who:
            conversation = front.begin(PLAIN, *who)
            until(conversation)
            conversation.say(mounter.LetGo())
            assert conversation.hear() == mounter.HasLetGo()
            assert fuse_mounts() == []
            proc = os.open("/proc", os.O_PATH)
            assert fuse_connections.descriptors_in_flight(proc, who[0]) == 0, "the mountpoint is still pinned"

    in_private_namespace(body)


@pytest.mark.parametrize("depth", [0, 18])
@pytest.mark.parametrize("start", STARTS, ids=lambda start: type(start).__name__)
def test_what_is_covered_is_not_unmounted(start: mounter.Record, depth: int, place: Path) -> None:
    """Deep down, too, where the paths of mounts are longer than what there is room for at first."""
    place = place.joinpath(*["d" * 200] * depth)
    place.mkdir(parents=True, exist_ok=True)

    def body() -> None:
        with playing_the_front() as front, caller(place, 0) as who:
            conversation = front.begin(start, *who)
            until_mounted(conversation)
            run(["mount", "-t", "tmpfs", "cover", place])
            conversation.say(mounter.Undo())
            said = conversation.hear()
            assert isinstance(said, mounter.Failed)
            assert said.step == b"roll back"
            assert len(fuse_mounts()) == 1
            for _ in range(2):
                syscalls.umount2(bytes(place), syscalls.MNT_DETACH)

    in_private_namespace(body)


@pytest.mark.parametrize("start", STARTS, ids=lambda start: type(start).__name__)
def test_what_is_deep_down_is_rolled_back(start: mounter.Record, place: Path) -> None:
    place = place.joinpath(*["d" * 200] * 18)
    place.mkdir(parents=True)

    def body() -> None:
        with playing_the_front() as front, caller(place, 0) as who:
            conversation = front.begin(start, *who)
            until_mounted(conversation)
            conversation.say(mounter.Undo())
            assert conversation.hear() == mounter.RolledBack()
            assert fuse_mounts() == []

    in_private_namespace(body)


def test_whatever_comes_in_place_of_a_start_record_ends_one_child_and_no_more(place: Path) -> None:
    generator = random.Random(2)
    whole = mounter.dump(PLAIN)
    records = [b"\0", b"noise", b"x" * 60000, whole[:-1], whole + b"\0", mounter.dump(STARTS[0]), whole * 2]
    records += [bytes(generator.choices(whole, k=len(whole))) for _ in range(50)]

    def body() -> None:
        with playing_the_front() as front, caller(place, USER) as who:
            null = os.open("/dev/null", os.O_RDONLY)
            for record, count in itertools.product(records, (0, 1, 3, 4, 200)):
                front.send_to_plain(record, [null] * count)
            conversation = front.begin(PLAIN, *who)
            until_mounted(conversation)
            conversation.say(mounter.Undo())
            assert conversation.hear() == mounter.RolledBack()

    in_private_namespace(body)


def test_whatever_comes_in_place_of_a_plan_is_none(place: Path) -> None:
    generator = random.Random(3)

    def body() -> None:
        with playing_the_front() as front:
            with caller(place, USER) as who:
                plan = mounter.dump(a_plan(facts_of(front.begin(PLAIN, *who))))
            fields = plan.split(b"\0")
            forgeries = [b"kind=MountPlan\0", plan[:-1], plan + b"x=\0", plan * 2, plan.replace(b"uid=1000", b"uid=")]
            forgeries += [plan.replace(b"noexec=0", b"noexec=%b" % each) for each in (b"2", b"", b"01", b"yes")]
            forgeries += [b"\0".join(generator.sample(fields, len(fields))) for _ in range(20)]
            forgeries += [b"\0".join(fields[:count]) + b"\0" for count in range(1, len(fields) - 1)]
            forgeries += [bytes(generator.choices(plan, k=len(plan))) for _ in range(20)]
            for forgery in forgeries:
                with caller(place, USER) as who:
                    conversation = front.begin(PLAIN, *who)
                    conversation.say_bytes(forgery)
                    assert isinstance(conversation.hear(), mounter.MountFacts), forgery
            assert fuse_mounts() == []

    in_private_namespace(body)


@pytest.mark.parametrize("broken", [b"no program", b"#!/bin/false\n"], ids=["no program", "a program that fails"])
def test_where_the_program_does_not_run_python_mounts(broken: bytes, place: Path, tmp_path: Path) -> None:
    """A host's policy may forbid to execute it."""
    (tmp_path / "broken").write_bytes(broken)
    (tmp_path / "broken").chmod(0o755)

    def body() -> None:
        run(["mount", "--bind", tmp_path / "broken", programs.file_of(programs.PLAIN_CALL)])
        with Broker() as broker, Client(broker) as client:
            client.send(mount_request(place), os.open(place, O_PATH))
            assert (reply := client.reply()) is not None
            assert reply.errno == 0, reply.text
            client.send(COMMIT)
            assert client.reply() is None
            assert len(fuse_mounts()) == 1
            syscalls.umount2(bytes(place), syscalls.MNT_DETACH)

    in_private_namespace(body)
