"""Unmounts that the mounter does without the interpreter (plain_unmount.h), compared with those that Python does.

A process plays the front; so these are also attacks by a compromised front on the children that serve plain calls.
"""

from __future__ import annotations

import contextlib
import os
import random
from errno import EBUSY, EPERM
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.messages import mounter
from tests.e2e.conftest import wait_until
from tests.e2e.hostile import fuse_mounts, in_private_namespace
from tests.e2e.owned_front import USER, Conversation, caller, make_users_place, playing_the_front
from tests.lab.commands import run
from tests.lab.kernel import needs_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.e2e, needs_kernel("statmount(2)")]

#: Seconds of a step.
SECONDS = 2
REFUSED = mounter.Failed(EPERM, b"check the plan")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return make_users_place(tmp_path)


def starts(name: bytes) -> tuple[mounter.StartUnmount, mounter.StartPlainUnmount]:
    return mounter.StartUnmount(SECONDS, name, False), mounter.StartPlainUnmount(SECONDS, name)


@contextlib.contextmanager
def mounted(place: Path, uid: int = USER, options: bytes = b"") -> Iterator[None]:
    """Mount a FUSE filesystem of this user, whose FUSE program never answers; afterwards it is gone."""
    device = os.open("/dev/fuse", os.O_RDWR)
    rootmode = 0o40000 if place.is_dir() else 0o100000
    data = b"fd=%d,rootmode=%o,user_id=%d,group_id=0%b" % (device, rootmode, uid, options)
    syscalls.mount(b"a,user_id=0", bytes(place), b"fuse", 0, data)
    try:
        yield
    finally:
        os.close(device)
        while any(mount.mountpoint == str(place) for mount in fuse_mounts()):
            syscalls.umount2(bytes(place), syscalls.MNT_DETACH)


def without_device(said: mounter.Record | None) -> mounter.Record | None:
    return said._replace(device=0) if isinstance(said, mounter.UnmountFacts) else said


def unmounted(start: mounter.Record, place: Path, uid: int, *, lazy: bool, options: bytes = b"") -> list[object]:
    """Mount, unmount as the start record says, and return all that the front sees of it."""
    with mounted(place, options=options), playing_the_front() as front, caller(place.parent, uid) as who:
        conversation = front.begin(start, *who)
        seen: list[object] = [without_device(conversation.hear())]
        conversation.say(mounter.UnmountPlan(lazy, b"request"))
        seen += [conversation.hear(), len(fuse_mounts())]
        conversation.say(mounter.Told())
        conversation.shut()
        return [*seen, conversation.hear()]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("uid", [0, USER, USER + 1])
@pytest.mark.parametrize("options", [b"", b",allow_other,default_permissions,max_read=4096"], ids=["few", "many"])
def test_both_unmount_what_is_the_callers(options: bytes, uid: int, lazy: bool, place: Path) -> None:
    def body() -> None:
        by_python, plain = (
            unmounted(start, place, uid, lazy=lazy, options=options) for start in starts(place.name.encode())
        )
        assert plain == by_python
        facts, said, left, end = plain
        assert isinstance(facts, mounter.UnmountFacts)
        assert (said, left, end) == ((REFUSED, 1, None) if uid == USER + 1 else (mounter.Unmounted(), 0, None))

    in_private_namespace(body)


def test_both_unmount_a_file(place: Path) -> None:
    file = place / "file with a blank"
    file.touch()

    def body() -> None:
        by_python, plain = (unmounted(start, file, USER, lazy=False) for start in starts(bytes(file.name, "ascii")))
        assert plain == by_python
        assert plain[1:3] == [mounter.Unmounted(), 0]

    in_private_namespace(body)


def test_a_mount_that_was_made_unbindable_is_unmounted(place: Path) -> None:
    def body() -> None:
        with mounted(place):
            run(["mount", "--make-unbindable", place])
            with playing_the_front() as front, caller(place.parent, USER) as who:
                conversation = front.begin(starts(place.name.encode())[1], *who)
                assert isinstance(conversation.hear(), mounter.UnmountFacts)
                conversation.say(mounter.UnmountPlan(False, b"request"))
                assert conversation.hear() == mounter.Unmounted()
            assert fuse_mounts() == []

    in_private_namespace(body)


def make_nothing(place: Path) -> None:
    pass


def make_other_mount(place: Path) -> None:
    run(["mount", "-t", "tmpfs", "tmpfs", place])


def make_fusectl(place: Path) -> None:
    """Its type begins like that of FUSE."""
    run(["mount", "-t", "fusectl", "fusectl", place])


def make_gone(place: Path) -> None:
    place.rmdir()


def make_link_to_mount(place: Path) -> None:
    (place.parent / "other").mkdir()
    run(["mount", "-t", "tmpfs", "tmpfs", place.parent / "other"])
    place.rmdir()
    place.symlink_to("other")


@pytest.mark.parametrize(
    "make",
    [make_nothing, make_other_mount, make_fusectl, make_gone, make_link_to_mount],
    ids=lambda make: make.__name__,
)
@pytest.mark.parametrize("uid", [0, USER])
def test_what_is_no_fuse_filesystem_is_left_to_python(make: Callable[[Path], None], uid: int, place: Path) -> None:
    def body() -> None:
        make(place)
        with playing_the_front() as front, caller(place.parent, uid) as who:
            by_python, plain = starts(place.name.encode())
            assert front.begin(plain, *who).hear() == mounter.NotPlain()
            assert isinstance(front.begin(by_python, *who).hear(), mounter.UnmountFacts), "the request is still there"

    in_private_namespace(body)


@pytest.mark.parametrize("name", [b"..", b".", b"", b"/proc", b"../mountpoint", b"mountpoint/", b"x" * 256])
def test_a_name_that_leads_elsewhere_is_left_to_python(name: bytes, place: Path) -> None:
    def body() -> None:
        with mounted(place), playing_the_front() as front, caller(place.parent, 0) as who:
            assert front.begin(starts(name)[1], *who).hear() == mounter.NotPlain()

    in_private_namespace(body)


def test_in_a_directory_of_a_fuse_filesystem_python_decides(place: Path) -> None:
    """To look the entry up would ask the FUSE program, which does not answer."""

    def body() -> None:
        with mounted(place), playing_the_front() as front, caller(place, 0) as who:
            assert front.begin(starts(b"entry")[1], *who).hear() == mounter.NotPlain()

    in_private_namespace(body)


@pytest.mark.parametrize("lazy", [False, True])
def test_both_unmount_what_is_deep_down(lazy: bool, place: Path) -> None:
    """Its path is longer than what there is room for at first."""
    deep = place.joinpath(*["d" * 200] * 19)
    deep.mkdir(parents=True)

    def body() -> None:
        by_python, plain = (unmounted(start, deep, 0, lazy=lazy) for start in starts(deep.name.encode()))
        assert plain == by_python
        assert plain[1:3] == [mounter.Unmounted(), 0]

    in_private_namespace(body)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("start", [0, 1], ids=["python", "plain"])
def test_what_is_covered_is_not_unmounted(start: int, lazy: bool, place: Path) -> None:
    """The cover comes after the look."""

    def body() -> None:
        with mounted(place), playing_the_front() as front, caller(place.parent, USER) as who:
            conversation = front.begin(starts(place.name.encode())[start], *who)
            assert isinstance(conversation.hear(), mounter.UnmountFacts)
            run(["mount", "-t", "tmpfs", "cover", place])
            conversation.say(mounter.UnmountPlan(lazy, b"request"))
            assert conversation.hear() == mounter.Failed(EBUSY, b"unmount")
            assert len(fuse_mounts()) == 1
            run(["umount", "-t", "tmpfs", place])

    in_private_namespace(body)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("start", [0, 1], ids=["python", "plain"])
def test_another_mount_that_has_come_is_not_unmounted(start: int, lazy: bool, place: Path) -> None:
    def body() -> None:
        with contextlib.ExitStack() as held, playing_the_front() as front, caller(place.parent, 0) as who:
            first = held.enter_context(contextlib.ExitStack())
            first.enter_context(mounted(place))
            conversation = front.begin(starts(place.name.encode())[start], *who)
            assert isinstance(conversation.hear(), mounter.UnmountFacts)
            first.close()
            held.enter_context(mounted(place, 0))
            conversation.say(mounter.UnmountPlan(lazy, b"request"))
            assert conversation.hear() == REFUSED
            assert len(fuse_mounts()) == 1

    in_private_namespace(body)


@pytest.mark.parametrize("start", [0, 1], ids=["python", "plain"])
def test_a_busy_mount_stays_unless_it_is_idle_within_a_moment(start: int, place: Path) -> None:
    def body() -> None:
        with mounted(place), playing_the_front() as front:
            for is_idle_soon in (False, True):
                with caller(place.parent, USER) as who:
                    busy = os.open(place, os.O_PATH)
                    conversation = front.begin(starts(place.name.encode())[start], *who)
                    assert isinstance(conversation.hear(), mounter.UnmountFacts)
                    conversation.say(mounter.UnmountPlan(False, b"request"))
                    if is_idle_soon:
                        os.close(busy)
                        assert conversation.hear() == mounter.Unmounted()
                    else:
                        assert conversation.hear() == mounter.Failed(EBUSY, b"unmount")
                        os.close(busy)

    in_private_namespace(body)


def until_the_plan(conversation: Conversation) -> None:
    pass


def until_unmounted(conversation: Conversation) -> None:
    conversation.say(mounter.UnmountPlan(True, b"request"))


@pytest.mark.parametrize("start", [0, 1], ids=["python", "plain"])
@pytest.mark.parametrize("until, left", [(until_the_plan, 1), (until_unmounted, 0)])
def test_a_front_that_hangs_up_before_the_plan_changes_nothing(
    until: Callable[[Conversation], None], left: int, start: int, place: Path
) -> None:
    """After the plan, the child unmounts."""

    def body() -> None:
        with mounted(place), playing_the_front() as front, caller(place.parent, USER) as who:
            conversation = front.begin(starts(place.name.encode())[start], *who)
            assert isinstance(conversation.hear(), mounter.UnmountFacts)
            until(conversation)
            conversation.close()
            wait_until(lambda: len(fuse_mounts()) == left)
            front.check()

    in_private_namespace(body)


def test_whatever_comes_in_place_of_a_plan_is_none(place: Path) -> None:
    generator = random.Random(4)
    plan = mounter.dump(mounter.UnmountPlan(True, b"request"))
    fields = plan.split(b"\0")
    forgeries = [b"kind=UnmountPlan\0", plan[:-1], plan + b"x=\0", plan * 2, b"\0", b"x" * 60000]
    forgeries += [plan.replace(b"lazy=1", b"lazy=%b" % each) for each in (b"2", b"", b"01", b"yes")]
    forgeries += [b"\0".join(generator.sample(fields, len(fields))) for _ in range(10)]
    forgeries += [bytes(generator.choices(plan, k=len(plan))) for _ in range(20)]
    forgeries = [each for each in forgeries if each != plan]

    def body() -> None:
        with mounted(place), playing_the_front() as front:
            for forgery in forgeries:
                with caller(place.parent, 0) as who:
                    conversation = front.begin(starts(place.name.encode())[1], *who)
                    assert isinstance(conversation.hear(), mounter.UnmountFacts)
                    conversation.say_bytes(forgery)
                    conversation.shut()
                    assert conversation.hear() is None
                    assert len(fuse_mounts()) == 1, forgery

    in_private_namespace(body)
