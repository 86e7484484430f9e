"""Attacks by a compromised front: a process plays the front and sends arbitrary records to the real mounter.

The mounter acts only for a caller, in the caller's namespaces, with the caller's rights.
"""

from __future__ import annotations

import os
import socket
import stat
from errno import EACCES, EAGAIN, EINVAL, EPERM
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.messages import mounter
from fusermount3_broker.mounter import filesystem
from tests.e2e.hostile import O_PATH, fuse_mounts, in_private_namespace
from tests.e2e.owned_front import PATIENCE, USER, a_plan, caller, facts_of, make_users_place, playing_the_front
from tests.lab.commands import run
from tests.lab.kernel import kernel_has
from tests.lab.podman import Mount, mountinfo

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.e2e


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return make_users_place(tmp_path)


START = mounter.StartMount(seconds=PATIENCE, commit_seconds=PATIENCE)
PLAIN = mounter.StartPlainMount(seconds=PATIENCE, commit_seconds=PATIENCE)


REFUSED = mounter.Failed(EPERM, b"check the plan")


def test_a_plan_for_a_caller_is_carried_out_and_undone(place: Path) -> None:
    """This proves that the plans below are refused for what is wrong in them."""

    def body() -> None:
        with playing_the_front() as front, caller(place, USER) as who:
            conversation = front.begin(START, *who)
            conversation.say(a_plan(facts_of(conversation)))
            assert isinstance(conversation.attached(), mounter.Mounted)
            assert [mount.source for mount in fuse_mounts()] == ["owned"]
            conversation.say(mounter.Undo())
            assert conversation.hear() == mounter.RolledBack()

    in_private_namespace(body)


def test_the_namespaces_are_those_of_who_connected_whatever_pidfd_comes_with_it(place: Path) -> None:
    """Otherwise a caller in a container who also controls the front could mount anywhere on the machine."""

    def body() -> None:
        with playing_the_front() as front, caller(place, USER, namespace=True) as (connection, _):
            own = os.pidfd_open(os.getpid())
            conversation = front.begin(START, connection, own)
            if kernel_has("SO_PEERPIDFD"):
                facts = facts_of(conversation)
                assert facts.mount_namespace != Path("/proc/self/ns/mnt").stat().st_ino
                conversation.say(mounter.LetGo())
                assert conversation.hear() == mounter.HasLetGo()
            else:
                assert conversation.hear() == mounter.Failed(EPERM, b"join")
            os.close(own)

    in_private_namespace(body)


def test_the_front_is_no_caller(place: Path) -> None:
    """Where the front has no uid of its own, it would act as root."""

    def body() -> None:
        with playing_the_front() as front:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with ours, theirs:
                descriptor, own = os.open(place, O_PATH), os.pidfd_open(os.getpid())
                socket.send_fds(ours, [b"anything"], [descriptor])
                assert front.begin(START, theirs.fileno(), own).hear() == mounter.Failed(EPERM, b"join")
                os.close(descriptor)
                os.close(own)

    in_private_namespace(body)


def test_a_front_that_says_it_is_somebody_else_is_not_believed(place: Path) -> None:
    """Each record carries the sender's pid, and a process without capabilities can't claim another."""

    def body() -> None:
        with playing_the_front() as front, caller(place, USER) as (connection, pidfd):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with ours, theirs:
                descriptors = [theirs.fileno(), connection, pidfd]
                rights = (
                    socket.SOL_SOCKET,
                    socket.SCM_RIGHTS,
                    b"".join(each.to_bytes(4, "little") for each in descriptors),
                )
                forged = (
                    socket.SOL_SOCKET,
                    socket.SCM_CREDENTIALS,
                    b"".join(each.to_bytes(4, "little") for each in (os.getppid(), 0, 0)),
                )
                os.setresuid(USER, USER, USER)
                syscalls.capset()
                with pytest.raises(PermissionError):
                    front.control.sendmsg([mounter.dump(START)], [rights, forged])

    in_private_namespace(body)


@pytest.mark.parametrize("path", ["/proc/sys", "/proc/self/fdinfo", "/sys/fs"])
def test_nothing_is_mounted_over_a_filesystem_of_the_kernel(path: str) -> None:
    def body() -> None:
        with playing_the_front() as front, caller(Path(path), 0) as who:
            conversation = front.begin(START, *who)
            conversation.say(a_plan(facts_of(conversation)))
            assert conversation.hear() == REFUSED

    in_private_namespace(body)


def test_nothing_is_mounted_on_what_hides_a_filesystem_of_the_kernel(tmp_path: Path) -> None:
    def body() -> None:
        run(["mount", "-t", "tmpfs", "tmpfs", tmp_path])
        (tmp_path / "proc").mkdir()
        run(["mount", "-t", "proc", "proc", tmp_path / "proc"])
        with playing_the_front() as front, caller(tmp_path, 0) as who:
            conversation = front.begin(START, *who)
            conversation.say(a_plan(facts_of(conversation)))
            assert conversation.hear() == mounter.Failed(EPERM, b"mount")
            run(["umount", tmp_path / "proc"])
        run(["umount", tmp_path])

    in_private_namespace(body)


def make_roots(path: Path) -> None:
    path.mkdir(mode=0o755)


def make_closed(path: Path) -> None:
    path.mkdir(mode=0o700)


def make_sticky(path: Path) -> None:
    path.mkdir()
    path.chmod(0o1777)


def make_file(path: Path) -> None:
    path.touch(mode=0o644)


def make_fifo(path: Path) -> None:
    os.mkfifo(path)
    path.chmod(0o666)


def make_link(path: Path) -> None:
    path.symlink_to(path.parent)


def make_socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o777)
    path.chmod(0o777)


NOT_THE_USERS = (make_roots, make_closed, make_sticky, make_file, make_fifo, make_link, make_socket)


@pytest.mark.parametrize("make", NOT_THE_USERS, ids=lambda make: make.__name__)
def test_nothing_is_mounted_where_the_caller_may_not(make: Callable[[Path], None], place: Path) -> None:
    target = place.parent / "target"
    make(target)

    def body() -> None:
        with playing_the_front() as front, caller(target, USER) as who:
            conversation = front.begin(START, *who)
            conversation.say(a_plan(facts_of(conversation)))
            assert conversation.hear() == REFUSED

    in_private_namespace(body)


@pytest.mark.parametrize(
    "forged",
    [
        {"uid": 0},
        {"gid": 0},
        {"root_mode": stat.S_IFREG},
        {"access_errno": EACCES},
        {"filesystem": 0x01021997},
        {"foreign_sticky": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("start", [START, PLAIN], ids=lambda start: type(start).__name__)
def test_a_plan_on_other_facts_than_the_mounters_own_is_none(
    start: mounter.Record, forged: dict[str, int], place: Path
) -> None:
    """These facts include the uid and the gid of the filesystem."""

    def body() -> None:
        with playing_the_front() as front, caller(place, USER) as who:
            conversation = front.begin(start, *who)
            facts = facts_of(conversation)
            conversation.say(a_plan(facts, **forged))
            assert conversation.hear() == REFUSED
            assert fuse_mounts() == []

    in_private_namespace(body)


@pytest.mark.parametrize("field", ["block_size", "max_read"])
def test_no_option_hides_in_the_value_of_another(field: str, place: Path) -> None:
    """If a value is too long for fsconfig(2), all options are passed as one string."""
    hidden = {field: b"512,user_id=0", "source": b"x" * (filesystem.LONGEST_STRING + 1)}

    def body() -> None:
        with playing_the_front() as front, caller(place, USER) as who:
            conversation = front.begin(START, *who)
            conversation.say(a_plan(facts_of(conversation), **hidden))
            assert conversation.hear() == REFUSED

    in_private_namespace(body)


def make_no_fuse(path: Path) -> None:
    run(["mount", "-t", "tmpfs", "tmpfs", path])


def make_roots_fuse(path: Path) -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    syscalls.mount(b"roots", bytes(path), b"fuse", 0, b"fd=%d,rootmode=40000,user_id=0,group_id=0" % device)
    os.close(device)


def mounts_at(place: Path) -> list[Mount]:
    return [mount for mount in mountinfo() if mount.mountpoint == str(place)]


@pytest.mark.parametrize("make, uid", [(make_no_fuse, 0), (make_no_fuse, USER), (make_roots_fuse, USER)])
@pytest.mark.parametrize("lazy", [False, True])
def test_nothing_is_unmounted_but_the_callers_own_fuse_filesystem(
    make: Callable[[Path], None], uid: int, lazy: bool, place: Path
) -> None:

    def body() -> None:
        make(place)
        before = mounts_at(place)
        assert before
        with playing_the_front() as front, caller(place.parent, uid) as who:
            conversation = front.begin(mounter.StartUnmount(PATIENCE, bytes(place.name, "ascii"), False), *who)
            assert isinstance(conversation.hear(), mounter.UnmountFacts)
            conversation.say(mounter.UnmountPlan(lazy, b"request"))
            assert conversation.hear() == REFUSED
            assert mounts_at(place) == before
        run(["umount", "--lazy", place])

    in_private_namespace(body)


@pytest.mark.parametrize("name", [b"..", b".", b"", b"/proc", b"../mountpoint", b"x" * 256])
def test_a_name_leads_nowhere_but_into_the_directory_that_the_caller_sent(name: bytes, place: Path) -> None:
    def body() -> None:
        with playing_the_front() as front, caller(place, 0) as who:
            conversation = front.begin(mounter.StartUnmount(PATIENCE, name, False), *who)
            assert conversation.hear() == mounter.Failed(EINVAL, b"access mountpoint")

    in_private_namespace(body)


def test_a_filesystem_that_is_served_is_not_reaped(place: Path) -> None:
    def body() -> None:
        device = os.open("/dev/fuse", os.O_RDWR)
        data = b"fd=%d,rootmode=40000,user_id=0,group_id=0" % device
        syscalls.mount(b"alive", bytes(place), b"fuse", 0, data)
        (mount,) = fuse_mounts()
        number = int(mount.device.partition(":")[2])
        namespace = Path("/proc/self/ns/mnt").stat().st_ino
        with playing_the_front() as front:
            # Its FUSE program answers nothing, so any request to it would wait. This is visible as long as the program
            # has not begun.
            said = front.begin(mounter.StartReap(PATIENCE, namespace, True, b"%d\n" % number)).hear()
            assert said == mounter.Asked(number, EAGAIN, 0)
            assert fuse_mounts() == [mount]
        os.close(device)
        run(["umount", place])

    in_private_namespace(body)


def test_what_is_no_record_ends_one_child_and_no_more() -> None:
    def body() -> None:
        with playing_the_front() as front:
            for record in (b"\0", b"noise", b"x" * 60000, mounter.dump(START), mounter.dump(mounter.Keep())):
                for count in (0, 1, 3, 200):
                    descriptors = [os.open("/dev/null", os.O_RDONLY)] * count
                    socket.send_fds(front.control, [record], descriptors)
                    for each in set(descriptors):
                        os.close(each)
            front.check()

    in_private_namespace(body)
