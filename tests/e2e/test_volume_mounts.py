"""The mounter's operations on volumes, in a directory that stands for kubelet's: a test commands the real mounter.

What the front and the CSI plugin add to this is tested elsewhere, with all of them.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat as stat_module
import time
import uuid
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from fusermount3_broker.kernel import ownership_marks, syscalls
from fusermount3_broker.messages import mounter
from fusermount3_broker.mounter import fuse_connections, volume_helper, volume_targets
from fusermount3_broker.mounter.daemon import FEW_SPARES
from fusermount3_broker.mounter.kept_descriptors import Descriptors
from tests.e2e.conftest import is_alive, wait_until
from tests.e2e.hostile import in_private_namespace
from tests.e2e.owned_front import PATIENCE, a_plan, facts_of
from tests.e2e.volumes import NONCE, SOCKET, Program, Volume, a_volume, mount_fusectl, publish, serve, stat, unpublish
from tests.lab import cgroups, tinyfuse
from tests.lab.commands import run
from tests.lab.forked import ending_afterwards
from tests.lab.kernel import kernel_has, needs_kernel
from tests.lab.podman import mountinfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.owned_front import OwnedFront

pytestmark = pytest.mark.e2e

#: What readers get while a FUSE program ends, with ECONNREFUSED if it had not answered FUSE_INIT.
ENDED = {"ENOTCONN", "ECONNREFUSED", "ECONNABORTED", "EIO"}


def with_volume(directory: Path, body: Callable[[OwnedFront, Volume], None]) -> None:
    """Run `body` in a private mount namespace, with a mounter and a volume that must have been removed by the end."""

    def in_namespace() -> None:
        kubelet = directory / "kubelet"
        kubelet.mkdir()
        with a_volume(kubelet) as (front, volume):
            body(front, volume)

    in_private_namespace(in_namespace)


def is_marked(path: Path) -> bool:
    return ownership_marks.MARK.decode() in os.listxattr(path, follow_symlinks=False)


# Publish -------------------------------------------------------------------------------------------------------


def test_a_published_volume_is_an_empty_directory_that_nobody_can_write_to(tmp_path: Path) -> None:
    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        (mount,) = volume.mounts()
        assert mount.options <= {"rw", "relatime"}
        assert "ro" in mount.super_options
        assert list(volume.target.iterdir()) == []
        with pytest.raises(OSError, match="Read-only"):
            (volume.target / "file").touch()

    with_volume(tmp_path, body)


@pytest.mark.parametrize("old_clients", [False, True])
def test_the_sockets_in_the_emptydir_are_for_everybody_in_it(old_clients: bool, tmp_path: Path) -> None:
    kinds = {SOCKET: socket.SOCK_SEQPACKET}
    if old_clients:
        kinds = {f"{SOCKET}.seqpacket": socket.SOCK_SEQPACKET, SOCKET: socket.SOCK_STREAM}

    def body(front: OwnedFront, volume: Volume) -> None:
        listeners = [socket.socket(fileno=each) for each in publish(front, volume, old_clients=old_clients)]
        assert {each.name for each in volume.empty_dir.iterdir()} == set(kinds)
        for listener, (name, kind) in zip(listeners, kinds.items(), strict=True):
            path = volume.empty_dir / name
            assert stat_module.S_IMODE(path.stat().st_mode) == 0o666
            assert is_marked(path)
            with socket.socket(socket.AF_UNIX, kind) as client:
                os.chdir(volume.empty_dir)  # in a pod, the path is shorter
                client.connect(name)
                listener.accept()[0].close()
            listener.close()

    with_volume(tmp_path, body)


def test_what_is_published_already_stays_and_its_sockets_are_new_unless_they_are_served(tmp_path: Path) -> None:
    def body(front: OwnedFront, volume: Volume) -> None:
        first = publish(front, volume)
        (mount,) = volume.mounts()
        path = volume.empty_dir / SOCKET
        inode = path.stat().st_ino
        assert publish(front, volume, serving=True) == []
        assert path.stat().st_ino == inode
        second = publish(front, volume)
        assert path.stat().st_ino != inode
        path.unlink()
        assert len(publish(front, volume, serving=True)) == 1, "the pod has removed it"
        assert volume.mounts() == [mount]
        for each in first + second:
            os.close(each)

    with_volume(tmp_path, body)


def plant_link(path: Path) -> None:
    (path.parent / "other").touch()
    path.symlink_to("other")


def plant_dangling_link(path: Path) -> None:
    path.symlink_to("/nowhere")


def plant_fifo(path: Path) -> None:
    os.mkfifo(path)


def plant_directory(path: Path) -> None:
    path.mkdir()
    (path / "file").write_text("the pod's")


def plant_file(path: Path) -> None:
    path.write_text("the pod's")


def plant_socket(path: Path) -> None:
    os.mknod(path, stat_module.S_IFSOCK | 0o666)


PLANTED = (plant_link, plant_dangling_link, plant_fifo, plant_directory, plant_file, plant_socket)


def tree(directory: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Return the entries of a directory, with their attributes and content."""
    found = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path)] = status.st_ino, status.st_mode, status.st_uid, content
    return found


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("name", [SOCKET, f"{SOCKET}.seqpacket"])
def test_what_the_pod_has_where_a_socket_should_be_is_named_and_left_alone(
    plant: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    def body(front: OwnedFront, volume: Volume) -> None:
        plant(volume.empty_dir / name)
        before = tree(volume.empty_dir)
        for _ in range(2):
            said = front.begin(volume.start_publish(old_clients=True)).hear()
            assert said == mounter.Failed(errno.EEXIST, f"make the socket {name}".encode())
            assert tree(volume.empty_dir) == before
            assert not volume.target.exists()
        unpublish(front, volume)
        assert tree(volume.empty_dir) == before

    with_volume(tmp_path, body)


UNFINISHED = [f".fusermount3-broker.{NONCE.decode()}.{number}" for number in range(4)]
"""The temporary names of a volume's socket."""


@pytest.mark.parametrize("act", [publish, unpublish])
@pytest.mark.parametrize("marked", [True, False])
def test_what_a_killed_child_has_left_unfinished_is_removed_and_nothing_like_it(
    marked: bool, act: Callable[[OwnedFront, Volume], object], tmp_path: Path
) -> None:
    def body(front: OwnedFront, volume: Volume) -> None:
        for name in (UNFINISHED[0][:-2], UNFINISHED[0][:-1], f"{UNFINISHED[0]}0", ".fusermount3-broker.fedcba98.0"):
            plant_socket(volume.empty_dir / name)
        plant_file(volume.empty_dir / ".fusermount3-broker.file")
        before = tree(volume.empty_dir)
        for name in UNFINISHED:
            plant_socket(volume.empty_dir / name)
            if marked:
                os.setxattr(volume.empty_dir / name, ownership_marks.MARK, b"1")
        act(front, volume)
        after = tree(volume.empty_dir)
        after.pop(str(volume.empty_dir / SOCKET), None)
        assert after == before

    with_volume(tmp_path, body)


@pytest.mark.parametrize("plant", [plant_link, plant_dangling_link, plant_fifo, plant_directory, plant_file])
def test_what_is_no_socket_was_not_left_unfinished(plant: Callable[[Path], None], tmp_path: Path) -> None:
    def body(front: OwnedFront, volume: Volume) -> None:
        for name in UNFINISHED:
            plant(volume.empty_dir / name)
        before = tree(volume.empty_dir)
        said = front.begin(volume.start_publish()).hear()
        assert said == mounter.Failed(errno.EADDRINUSE, f"make the socket {SOCKET}".encode())
        unpublish(front, volume)
        assert tree(volume.empty_dir) == before

    with_volume(tmp_path, body)


def test_what_another_child_is_about_to_finish_stays_and_holds_nobody_up(tmp_path: Path) -> None:
    def body(front: OwnedFront, volume: Volume) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as others:
            os.chdir(volume.empty_dir)
            others.bind(UNFINISHED[0])
            for each in publish(front, volume):
                os.close(each)
            assert {each.name for each in volume.empty_dir.iterdir()} == {SOCKET, UNFINISHED[0]}
            unpublish(front, volume)
            assert [each.name for each in volume.empty_dir.iterdir()] == [UNFINISHED[0]]
        unpublish(front, volume)
        assert list(volume.empty_dir.iterdir()) == []

    with_volume(tmp_path, body)


@pytest.mark.parametrize("plant", [plant_link, plant_dangling_link, plant_fifo, plant_file, plant_socket])
def test_nothing_is_followed_on_the_way_to_the_emptydir(plant: Callable[[Path], None], tmp_path: Path) -> None:
    """A pod can't change that path, but its volumes may be on a filesystem that another party controls."""

    def body(front: OwnedFront, volume: Volume) -> None:
        volume.empty_dir.rmdir()
        elsewhere = tmp_path / "other"
        elsewhere.mkdir()
        if plant is plant_link:
            volume.empty_dir.symlink_to(elsewhere)
        else:
            plant(volume.empty_dir)
        said = front.begin(volume.start_publish()).hear()
        assert isinstance(said, mounter.Failed)
        assert said.step.startswith(b"open the emptyDir ")
        assert list(elsewhere.iterdir()) == []
        unpublish(front, volume)

    with_volume(tmp_path, body)


@pytest.mark.parametrize("plant", [plant_link, plant_dangling_link, plant_fifo, plant_file, plant_socket])
def test_a_target_that_is_no_directory_is_left_alone(plant: Callable[[Path], None], tmp_path: Path) -> None:
    def body(front: OwnedFront, volume: Volume) -> None:
        plant(volume.target)
        before = tree(volume.target.parent)
        assert front.begin(volume.start_publish()).hear() == mounter.Failed(errno.EEXIST, b"make the target")
        assert list(volume.empty_dir.iterdir()) == []
        unpublish(front, volume)
        assert tree(volume.target.parent) == before
        volume.target.unlink()

    with_volume(tmp_path, body)


def test_nobody_writes_to_a_placeholder(tmp_path: Path) -> None:
    """Not even root, by whatever call."""

    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        place = volume.target
        attempts: list[Callable[[], object]] = [
            lambda: (place / "file").touch(),
            lambda: (place / "directory").mkdir(),
            lambda: place.chmod(0o777),
            lambda: os.chown(place, 1000, 1000),
            lambda: os.utime(place),
            lambda: os.setxattr(place, "trusted.name", b"value"),
        ]
        for attempt in attempts:
            with pytest.raises(OSError, match="Read-only file system"):
                attempt()

    with_volume(tmp_path, body)


def test_in_another_user_namespace_a_placeholder_can_be_bound_writable(tmp_path: Path) -> None:
    """As container runtimes do; nobody can write all the same."""

    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        bound = tmp_path / "bound"
        bound.mkdir()
        writable = f"mount --bind {volume.target} {bound} && mount -o remount,bind,rw {bound}"
        run(["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", f"{writable} && ! touch {bound}/file"])

    with_volume(tmp_path, body)


def test_a_placeholder_that_comes_late_covers_nothing(tmp_path: Path) -> None:
    """It comes from a child of an earlier mounter, which saw the directory before anything was on it."""

    def body(front: OwnedFront, volume: Volume) -> None:
        volume.target.mkdir()
        entry = os.open(volume.target, os.O_PATH)
        for each in publish(front, volume):
            os.close(each)
        before = volume.mounts()
        os.chdir("/proc")
        volume_targets._attach_placeholder(entry)
        assert volume.mounts() == before
        os.close(entry)
        unpublish(front, volume)
        volume.target.rmdir()

    with_volume(tmp_path, body)


def test_what_somebody_else_has_mounted_at_the_target_stays(tmp_path: Path) -> None:
    def body(front: OwnedFront, volume: Volume) -> None:
        volume.target.mkdir()
        run(["mount", "-t", "tmpfs", "theirs", volume.target])
        (volume.target / "file").write_text("theirs")
        before = volume.mounts()
        assert front.begin(volume.start_publish()).hear() == mounter.Failed(errno.EEXIST, b"make the target")
        assert stat(front, volume) == mounter.Stated(False, False, 0, 0, 0, 0, 0, 0)
        unpublish(front, volume)
        assert volume.mounts() == before
        run(["umount", volume.target])
        unpublish(front, volume)
        volume.target.rmdir()

    with_volume(tmp_path, body)


def test_a_directory_in_which_something_is_becomes_no_target(tmp_path: Path) -> None:
    """So no other directory, such as one of another plugin, is hidden."""

    def body(front: OwnedFront, volume: Volume) -> None:
        volume.target.mkdir()
        (volume.target / "file").write_text("theirs")
        assert front.begin(volume.start_publish()).hear() == mounter.Failed(errno.EEXIST, b"make the target")
        assert (volume.target / "file").read_text() == "theirs"
        (volume.target / "file").unlink()
        volume.target.rmdir()

    with_volume(tmp_path, body)


@pytest.mark.parametrize(
    "start",
    [
        mounter.StartPublish(PATIENCE, b"../x", b"pods/a/volumes/kubernetes.io~empty-dir/b", b"s", False, False, NONCE),
        mounter.StartPublish(PATIENCE, b"x", b"plugins", b"s", False, False, NONCE),
        mounter.StartUnpublish(PATIENCE, b"pods/a", b"", b"", b""),
        mounter.StartStat(PATIENCE, b"/etc"),
        mounter.StartEager(PATIENCE, b"pods/../x", mounter.NO_GROUP, b""),
    ],
    ids=lambda start: type(start).__name__,
)
def test_paths_that_lead_elsewhere_are_refused(start: mounter.Start, tmp_path: Path) -> None:
    def body(front: OwnedFront, _volume: Volume) -> None:
        assert front.begin(start).hear() == mounter.Failed(errno.EPERM, b"check the volume")

    with_volume(tmp_path, body)


# Mount ---------------------------------------------------------------------------------------------------------


def test_a_program_is_seen_at_its_own_mountpoint_and_at_the_volume(tmp_path: Path) -> None:
    place = tmp_path / "own"
    place.mkdir()

    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        program = serve(front, volume, b"there", place=place)
        assert (place / "file").read_bytes() == b"there"
        assert volume.file.read_bytes() == b"there"
        assert stat(front, volume) == mounter.Stated(
            published=True,
            served=True,
            errno=0,
            total_bytes=tinyfuse.BLOCKS * tinyfuse.BLOCK_SIZE,
            free_bytes=tinyfuse.BLOCKS // 2 * tinyfuse.BLOCK_SIZE,
            available_bytes=tinyfuse.BLOCKS // 4 * tinyfuse.BLOCK_SIZE,
            total_inodes=100,
            free_inodes=50,
        )
        run(["umount", place])
        assert volume.file.read_bytes() == b"there"
        program.kill()

    with_volume(tmp_path, body)


def test_a_program_without_a_mountpoint_is_seen_at_the_volume_only(tmp_path: Path) -> None:
    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        program = serve(front, volume, b"there", uid=1000)
        assert volume.file.read_bytes() == b"there"
        (mount,) = [mount for mount in mountinfo() if mount.is_fuse]
        assert mount.mountpoint == str(volume.target)
        assert "user_id=1000" in mount.super_options
        program.kill()

    with_volume(tmp_path, body)


def test_a_program_is_served_when_no_children_were_forked_ahead(tmp_path: Path) -> None:
    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        for content in (b"one", b"two", b"three"):
            before = [front.begin(mounter.StartCheck(PATIENCE)) for _ in range(8)]
            program = Program(front, volume, content)
            conversation = program.begin()
            for each in before:
                assert each.hear() == mounter.Checked()
                each.close()
            program.keep(program.mount(conversation))
            assert volume.file.read_bytes() == content
            program.kill()

    with_volume(tmp_path, body)


def forked_ahead(front: OwnedFront) -> list[psutil.Process]:
    """Return the children of the mounter's children; with no operation under way, they wait for a volume."""
    return [each for child in psutil.Process(front.pid).children() for each in child.children()]


def test_a_program_is_served_when_children_that_were_forked_ahead_have_been_killed(tmp_path: Path) -> None:
    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        wait_until(lambda: len(forked_ahead(front)) == FEW_SPARES)
        killed = forked_ahead(front)
        for each in killed:
            each.kill()
        wait_until(lambda: not any(is_alive(each.pid) for each in killed))
        for content in (b"one", b"two", b"three", b"four"):
            program = serve(front, volume, content)
            assert volume.file.read_bytes() == content
            program.kill()

    with_volume(tmp_path, body)


def test_children_that_were_forked_ahead_for_nothing_leave_nobody_to_reap(tmp_path: Path) -> None:
    def body(front: OwnedFront, _: Volume) -> None:
        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)  # as if this were pid 1
        wait_until(lambda: len(forked_ahead(front)) == FEW_SPARES)
        spares = [each for each in psutil.Process(front.pid).children() if each.children()]

        def all_had_other_things_to_do() -> bool:
            conversation = front.begin(mounter.StartCheck(PATIENCE))
            assert conversation.hear() == mounter.Checked()
            conversation.close()
            return not any(each.is_running() for each in spares)

        wait_until(all_had_other_things_to_do)
        assert [each.pid for each in psutil.Process().children()] == [front.pid]

    with_volume(tmp_path, body)


@pytest.mark.parametrize("pinned", [True, False])
def test_in_a_user_namespace_a_program_serves_the_volume_and_is_asked_for_its_size(
    pinned: bool, tmp_path: Path
) -> None:
    place = tmp_path / "own"
    place.mkdir()

    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        for _ in range(2):  # the second replaces the first, whose death no outside process can test
            program = serve(front, volume, place=place if pinned else None, user_namespace=True)
            assert volume.types() == ["tmpfs", "fuse"]
            assert stat(front, volume).total_bytes == tinyfuse.BLOCKS * tinyfuse.BLOCK_SIZE
            another = Program(front, volume, user_namespace=True)
            conversation = another.begin()
            conversation.say(mounter.Ask())
            facts = conversation.hear()
            assert isinstance(facts, mounter.MountFacts)
            conversation.say(a_plan(facts))
            assert conversation.attached() == mounter.Failed(errno.EBUSY, b"mount on the volume")
            another.kill()
            program.kill()
            assert stat(front, volume).errno == errno.ENOTCONN

    with_volume(tmp_path, body)


def test_a_volume_that_is_read_only_is_so_at_the_target(tmp_path: Path) -> None:
    place = tmp_path / "own"
    place.mkdir()

    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        program = Program(front, volume, place=place)
        program.keep(program.mount(program.begin(read_only=True)))
        own, at_target = (
            [mount for mount in mountinfo() if mount.mountpoint == str(path)][-1] for path in (place, volume.target)
        )
        assert "rw" in own.options
        assert "ro" in at_target.options
        run(["umount", place])
        program.kill()

    with_volume(tmp_path, body)


def test_the_group_of_the_volume_is_that_of_the_filesystem(tmp_path: Path) -> None:
    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        program = Program(front, volume, uid=1000)
        program.keep(program.mount(program.begin(group=2000)))
        assert "group_id=2000" in volume.mounts()[-1].super_options
        program.kill()

    with_volume(tmp_path, body)


def serving(front: OwnedFront, program: Program) -> list[int]:
    """Return the pids of the processes that serve the program, with a helper as parent: of the children of the
    mounter's children, any of which may end at any moment, those that have its socket connection.
    """
    connection = Path(f"/proc/self/fd/{program.connection.fileno()}").readlink()
    found = []
    for child in psutil.Process(front.pid).children():
        with suppress(psutil.NoSuchProcess):
            found += [each.pid for each in child.children() if connection in opened(each.pid)]
    return found


def opened(pid: int) -> list[Path]:
    """Return the targets of a process's descriptors; nothing if it has ended."""
    links = []
    with suppress(FileNotFoundError):
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                links.append(each.readlink())
    return links


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("ends", ["undo", "hang up", "killed"])
def test_what_is_not_kept_is_taken_away_everywhere(ends: str, pinned: bool, tmp_path: Path) -> None:
    place = tmp_path / "own"
    place.mkdir()

    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        program = Program(front, volume, place=place if pinned else None, commits=False)
        conversation = program.mount()
        assert volume.types() == ["tmpfs", "fuse"]
        if ends == "undo":
            conversation.say(mounter.Undo())
            assert conversation.hear() == mounter.RolledBack()
        elif ends == "hang up":
            program.connection.close()
            conversation.close()
        else:
            (child,) = serving(front, program)
            os.kill(child, signal.SIGKILL)
        wait_until(lambda: volume.types() == ["tmpfs"])
        program.kill()
        if ends == "killed" and pinned:
            run(["umount", "--lazy", place])  # the process that would have done this was killed

    with_volume(tmp_path, body)


def test_without_a_front_the_mount_stays_if_the_program_commits(tmp_path: Path) -> None:
    place = tmp_path / "own"
    place.mkdir()

    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        program = Program(front, volume, place=place)
        program.mount().close()
        wait_until(lambda: not serving(front, program))
        assert (place / "file").read_bytes() == volume.file.read_bytes() == b"hello"
        run(["umount", place])
        program.kill()

    with_volume(tmp_path, body)


def test_a_volume_that_is_served_has_no_other_program(tmp_path: Path) -> None:
    place = tmp_path / "own"
    place.mkdir()

    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        program = serve(front, volume, b"first")
        another = Program(front, volume, place=place)
        conversation = another.begin()
        conversation.say(mounter.Ask())
        facts = conversation.hear()
        assert isinstance(facts, mounter.MountFacts)
        conversation.say(a_plan(facts))
        assert conversation.attached() == mounter.Failed(errno.EBUSY, b"mount on the volume")
        assert volume.file.read_bytes() == b"first"
        assert not [mount for mount in mountinfo() if mount.mountpoint == str(place)]
        another.kill()
        program.kill()

    with_volume(tmp_path, body)


def test_nothing_is_mounted_on_a_volume_that_is_not_published(tmp_path: Path) -> None:
    def body(front: OwnedFront, volume: Volume) -> None:
        volume.target.mkdir()
        program = Program(front, volume)
        conversation = program.begin()
        conversation.say(mounter.Ask())
        facts = conversation.hear()
        assert isinstance(facts, mounter.MountFacts)
        conversation.say(a_plan(facts))
        assert conversation.attached() == mounter.Failed(errno.ENOENT, b"mount on the volume")
        program.kill()
        volume.target.rmdir()

    with_volume(tmp_path, body)


# A dead FUSE program -------------------------------------------------------------------------------------------


def reader(path: Path, seen: Path, *not_its_own: int) -> int:
    """Start a process that reads the file in a loop, in a mount namespace that receives the mounts made here; return
    its pid.

    Each change in what it reads is a line in `seen`: the content, or the name of the error. It closes the descriptors
    `not_its_own`: a process with the descriptor of a filesystem keeps that filesystem from dying.
    """
    child = os.fork()
    if child:
        return child
    with ending_afterwards():
        for descriptor in not_its_own:
            os.close(descriptor)
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        syscalls.unshare(syscalls.CLONE_NEWNS)
        run(["mount", "--make-rslave", "/"])
        last = ""
        with seen.open("a", buffering=1) as log:
            log.write("ready\n")
            while True:
                try:
                    now = path.read_text()
                except OSError as error:
                    now = errno.errorcode[error.errno or 0]
                if now != last:
                    log.write(f"{now}\n")
                last = now


def says(seen: Path, last: object) -> bool:
    """Return whether this is the last result that a reader has recorded."""
    return seen.exists() and seen.read_text().endswith(f"{last}\n")


def test_who_reads_all_the_time_sees_one_program_after_the_other_and_no_placeholder(tmp_path: Path) -> None:
    """The reader has its own mount namespace, as with HostToContainer."""
    seen = tmp_path / "seen"
    place = tmp_path / "own"
    place.mkdir()

    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        program = serve(front, volume, b"0")
        child = reader(volume.file, seen)
        for number in range(1, 21):
            wait_until(partial(says, seen, number - 1))
            program.kill()
            if number % 5 == 0:  # an uncommitted one in between
                not_kept = Program(front, volume, b"not kept", commits=False)
                conversation = not_kept.mount()
                not_kept.kill()
                conversation.say(mounter.Undo())
                assert conversation.hear() == mounter.RolledBack()
                conversation.close()
            program = serve(front, volume, b"%d" % number, namespace=True, place=place if number % 2 else None)
            assert volume.types() == ["tmpfs", "fuse"]
        wait_until(partial(says, seen, 20))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        program.kill()
        lines = set(seen.read_text().split())
        if not kernel_has("MOVE_MOUNT_BENEATH"):
            lines -= {"ENOENT"}  # the placeholder
        assert lines <= {"ready", "not", "kept", *ENDED, *map(str, range(21))}, lines

    with_volume(tmp_path, body)


def test_a_volume_whose_files_are_read_all_the_time_is_not_served_once_its_program_is_dead(tmp_path: Path) -> None:
    """The kernel counts the requests of the reader for a moment each, though nobody is there to answer them."""

    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        fusectl = os.open(mount_fusectl(), os.O_PATH)
        program = serve(front, volume)
        child = reader(volume.file, tmp_path / "seen")
        wait_until(partial(says, tmp_path / "seen", "hello"))
        program.kill()
        wait_until(partial(says, tmp_path / "seen", "ENOTCONN"))
        device = int(volume.mounts()[-1].device.partition(":")[2])
        with fuse_connections.Connection(fusectl, device) as connection:
            assert any(connection.waiting() for _ in range(1_000_000)), "it does not count: nothing is tested here"
        for _ in range(5_000):
            assert fuse_connections.alive(fusectl, [device]) == set()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(fusectl)

    with_volume(tmp_path, body)


def test_a_program_that_dies_while_it_is_asked_whether_it_is_alive_is_dead(tmp_path: Path) -> None:
    """The question that waits then is not answered like later ones: the kernel says that the connection was aborted."""

    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        mount_fusectl()
        dying = serve(front, volume, hangs=True)
        program = Program(front, volume, b"next")
        conversation = program.begin()
        conversation.say(a_plan(facts_of(conversation), allow_other=True))
        assert isinstance(conversation.hear(), mounter.Made)
        conversation.say(mounter.Attach())
        wait_until(lambda: _connection(volume, "waiting") != "0\n")
        dying.kill()
        said = conversation.hear()
        assert isinstance(said, mounter.Mounted), said
        program.keep(conversation)
        assert volume.file.read_bytes() == b"next"
        program.kill()

    with_volume(tmp_path, body)


def test_before_linux_6_5_the_dead_mount_is_taken_away_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a kernel that lacks the flag: the kernel refuses a really unknown flag in the same way."""
    monkeypatch.setattr(syscalls, "MOVE_MOUNT_BENEATH", 1 << 20)

    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        serve(front, volume).kill()
        _, dead = volume.mounts()
        os.chdir("/proc")
        opened = Descriptors(os.open(tmp_path / "kubelet", os.O_PATH))
        copy = syscalls.open_tree(syscalls.AT_FDCWD, bytes(volume.target), volume_targets._CLONE)
        with volume_targets.Target(opened, volume.relative(volume.target)) as target:
            assert target.attach(copy, PATIENCE) is not None
        placeholder, new = volume.mounts()
        assert (placeholder.fstype, new.device) == ("tmpfs", dead.device)
        assert new.id != dead.id

    with_volume(tmp_path, body)


def test_what_replaces_a_dead_mount_and_is_not_kept_leaves_it_as_it_was(tmp_path: Path) -> None:
    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        serve(front, volume).kill()
        _, dead = volume.mounts()
        another = Program(front, volume, commits=False)
        conversation = another.mount()
        conversation.say(mounter.Undo())
        assert conversation.hear() == mounter.RolledBack()
        placeholder, again = volume.mounts()
        assert (placeholder.fstype, again.device) == ("tmpfs", dead.device)
        with pytest.raises(OSError, match="not connected"):
            volume.file.read_bytes()
        another.kill()

    with_volume(tmp_path, body)


# A hung FUSE program -------------------------------------------------------------------------------------------


def hanging(front: OwnedFront, volume: Volume) -> tuple[Program, int]:
    """Return a program that answers nothing, and the pid of a process that waits for it for ever."""
    program = serve(front, volume, hangs=True)
    mount_fusectl()
    waiting = os.fork()
    if waiting == 0:
        with ending_afterwards():
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
            volume.file.read_bytes()
    wait_until(lambda: _connection(volume, "waiting") != "0\n")
    return program, waiting


def _connection(volume: Volume, name: str) -> str:
    _, _, number = volume.mounts()[-1].device.partition(":")
    return Path(f"/sys/fs/fuse/connections/{number}/{name}").read_text()


def test_a_volume_whose_program_hangs_is_said_to_hang_in_time(tmp_path: Path) -> None:
    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        program, waiting = hanging(front, volume)
        begun = time.monotonic()
        said = stat(front, volume, seconds=2)
        assert (said.published, said.served, said.errno) == (True, False, errno.ETIMEDOUT)
        assert time.monotonic() - begun < PATIENCE
        program.kill()
        os.waitpid(waiting, 0)
        assert stat(front, volume).errno == errno.ENOTCONN

    with_volume(tmp_path, body)


def test_a_volume_whose_program_hangs_is_unpublished_in_time(tmp_path: Path) -> None:
    """Processes that waited for the program get an error then."""

    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        program, waiting = hanging(front, volume)
        begun = time.monotonic()
        unpublish(front, volume, seconds=4)
        assert time.monotonic() - begun < PATIENCE
        assert volume.mounts() == []
        os.waitpid(waiting, 0)
        program.kill()

    with_volume(tmp_path, body)


@pytest.mark.parametrize("eager", [False, True])
def test_who_asks_whether_a_program_is_dead_that_hangs_holds_nobody_up(eager: bool, tmp_path: Path) -> None:
    """The program never answers that test's request: only the program that wants to replace it may pay for this."""

    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        program = serve(front, volume, hangs=True)
        if eager:
            conversation = front.begin(volume.start_eager())
            conversation.say(a_plan(ROOTS_FACTS, allow_other=True))
        else:
            another = Program(front, volume)
            conversation = another.begin()
            conversation.say(mounter.Ask())
            facts = conversation.hear()
            assert isinstance(facts, mounter.MountFacts)
            conversation.say(a_plan(facts, allow_other=True))
        assert isinstance(conversation.hear(), mounter.Made)
        conversation.say(mounter.Attach())
        time.sleep(1)  # by now, the request has been sent
        begun = time.monotonic()
        unpublish(front, volume, seconds=4)
        assert time.monotonic() - begun < PATIENCE
        assert volume.mounts() == []
        conversation.close()
        program.kill()
        if not eager:
            another.kill()

    with_volume(tmp_path, body)


# Unpublish -----------------------------------------------------------------------------------------------------


def nothing(_front: OwnedFront, _volume: Volume) -> None:
    pass


def published(front: OwnedFront, volume: Volume) -> None:
    publish(front, volume, old_clients=True)


def published_twice(front: OwnedFront, volume: Volume) -> None:
    publish(front, volume)
    publish(front, volume)


def served(front: OwnedFront, volume: Volume) -> None:
    publish(front, volume)
    serve(front, volume)


def died(front: OwnedFront, volume: Volume) -> None:
    publish(front, volume)
    serve(front, volume).kill()


def without_its_mounts(front: OwnedFront, volume: Volume) -> None:
    """Leave the volume as after a reboot of the node."""
    publish(front, volume)
    run(["umount", volume.target])


def without_its_directory(front: OwnedFront, volume: Volume) -> None:
    publish(front, volume)
    run(["umount", volume.target])
    volume.target.rmdir()


def without_its_emptydir(front: OwnedFront, volume: Volume) -> None:
    publish(front, volume)
    (volume.empty_dir / SOCKET).unlink()
    volume.empty_dir.rmdir()


def without_the_pod(front: OwnedFront, volume: Volume) -> None:
    without_its_emptydir(front, volume)
    run(["umount", volume.target])
    volume.target.rmdir()
    volume.target.parent.rmdir()


STATES = (
    *(nothing, published, published_twice, served, died),
    *(without_its_mounts, without_its_directory, without_its_emptydir, without_the_pod),
)


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_whatever_is_left_of_a_volume_is_taken_away_and_once_more_is_no_mistake(
    state: Callable[[OwnedFront, Volume], None], tmp_path: Path
) -> None:
    def body(front: OwnedFront, volume: Volume) -> None:
        state(front, volume)
        for _ in range(3):
            unpublish(front, volume)
            assert volume.mounts() == []
            assert not volume.target.exists()
            assert not (volume.empty_dir / SOCKET).exists()
            assert not (volume.empty_dir / f"{SOCKET}.seqpacket").exists()

    with_volume(tmp_path, body)


def test_after_the_node_was_started_again_the_volume_can_be_published(tmp_path: Path) -> None:
    def body(front: OwnedFront, volume: Volume) -> None:
        without_its_mounts(front, volume)
        publish(front, volume)
        program = serve(front, volume)
        assert volume.file.read_bytes() == b"hello"
        program.kill()

    with_volume(tmp_path, body)


def test_a_directory_that_somebody_else_has_made_stays_and_so_does_all_that_is_the_pods(tmp_path: Path) -> None:
    def body(front: OwnedFront, volume: Volume) -> None:
        volume.target.mkdir()
        (volume.empty_dir / "directory").mkdir()
        for plant in (plant_link, plant_fifo, plant_socket):
            plant(volume.empty_dir / plant.__name__)
        (volume.empty_dir / "directory/file").write_text("the pod's")
        before = tree(volume.empty_dir)
        publish(front, volume)
        unpublish(front, volume)
        assert volume.target.is_dir()
        assert tree(volume.empty_dir) == before
        volume.target.rmdir()

    with_volume(tmp_path, body)


def test_what_the_pod_has_put_in_the_place_of_a_socket_meanwhile_stays(tmp_path: Path) -> None:
    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        path = volume.empty_dir / SOCKET
        path.rename(volume.empty_dir / "elsewhere")
        path.write_text("the pod's")
        unpublish(front, volume)
        assert path.read_text() == "the pod's"

    with_volume(tmp_path, body)


def test_a_pod_that_closes_its_emptydir_does_not_keep_its_volume(tmp_path: Path) -> None:
    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        volume.empty_dir.chmod(0)
        unpublish(front, volume)
        assert volume.mounts() == []

    with_volume(tmp_path, body)


# Eager ---------------------------------------------------------------------------------------------------------


def mount_eagerly(front: OwnedFront, volume: Volume, *, keep: bool = True) -> int:
    """Return the descriptor of a filesystem at the target that no program serves yet."""
    conversation = front.begin(volume.start_eager())
    conversation.say(a_plan(ROOTS_FACTS, allow_other=True))
    assert isinstance(conversation.hear(), mounter.Made)
    conversation.say(mounter.Attach())
    said, (device,) = conversation.hear_with_descriptors()
    assert isinstance(said, mounter.Mounted)
    conversation.say(mounter.Keep() if keep else mounter.Undo())
    assert conversation.hear() == (mounter.Kept() if keep else mounter.RolledBack())
    conversation.close()
    return device


ROOTS_FACTS = mounter.MountFacts(0, 0, stat_module.S_IFDIR, False, 0, 0, 0, 0)


@pytest.mark.parametrize("pinned", [True, False])
def test_who_looks_into_an_eager_volume_waits_for_its_program(pinned: bool, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    place = tmp_path / "own"
    place.mkdir()

    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        device = mount_eagerly(front, volume)
        child = reader(volume.file, seen, device)
        wait_until(lambda: seen.exists() and seen.read_text() == "ready\n")
        program = Program(front, volume, b"1", place=place if pinned else None, namespace=True)
        conversation = program.mount(program.begin(held=device))
        assert volume.types() == ["tmpfs", "fuse"]
        program.keep(conversation)
        os.close(device)
        wait_until(partial(says, seen, 1))
        assert seen.read_text() == "ready\n1\n"
        mounted = (Path(f"/proc/{program.pid}/root") / place.relative_to("/") / "file").exists()
        assert mounted == pinned
        program.kill()
        wait_until(lambda: seen.read_text().endswith("ENOTCONN\n"))
        program = serve(front, volume, b"2")
        wait_until(partial(says, seen, 2))
        program.kill()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    with_volume(tmp_path, body)


def test_a_program_that_does_not_take_an_eager_volume_leaves_it_to_the_next(tmp_path: Path) -> None:
    place = tmp_path / "own"
    place.mkdir()

    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        device = mount_eagerly(front, volume)
        before = volume.mounts()
        program = Program(front, volume, place=place, commits=False)
        conversation = program.mount(program.begin(held=device))
        program.kill()
        conversation.say(mounter.Undo())
        assert conversation.hear() == mounter.RolledBack()
        conversation.close()
        assert volume.mounts() == before
        assert [mount for mount in mountinfo() if mount.is_fuse] == before[1:]
        program = Program(front, volume, place=place)
        program.keep(program.mount(program.begin(held=device)))
        os.close(device)
        assert (place / "file").read_bytes() == volume.file.read_bytes() == b"hello"
        run(["umount", place])
        program.kill()

    with_volume(tmp_path, body)


def test_an_eager_filesystem_that_is_not_kept_is_taken_away(tmp_path: Path) -> None:
    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        os.close(mount_eagerly(front, volume, keep=False))
        assert volume.types() == ["tmpfs"]

    with_volume(tmp_path, body)


@pytest.mark.parametrize("wanted", [{"uid": 1000}, {"root_mode": stat_module.S_IFREG}, {"sync_init": True}], ids=str)
def test_an_eager_filesystem_is_roots(wanted: dict[str, int], tmp_path: Path) -> None:
    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        conversation = front.begin(volume.start_eager())
        conversation.say(a_plan(ROOTS_FACTS, **wanted))
        assert conversation.hear() == mounter.Failed(errno.EPERM, b"check the plan")

    with_volume(tmp_path, body)


@needs_kernel("fuse_connection in fdinfo")
def test_a_descriptor_of_another_filesystem_is_not_given_out(tmp_path: Path) -> None:
    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        device, other = mount_eagerly(front, volume), os.open("/dev/fuse", os.O_RDWR)
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        data = b"fd=%d,rootmode=40000,user_id=0,group_id=0" % other
        syscalls.mount(b"other", bytes(elsewhere), b"fuse", 0, data)
        program = Program(front, volume)
        conversation = program.begin(held=other)
        conversation.say(mounter.Ask())
        facts = conversation.hear()
        assert isinstance(facts, mounter.MountFacts)
        conversation.say(a_plan(facts))
        assert conversation.hear() == mounter.Failed(errno.EBADF, b"mount")
        program.kill()
        conversation.close()
        os.close(device)
        os.close(other)
        syscalls.umount2(bytes(elsewhere), syscalls.MNT_DETACH)

    with_volume(tmp_path, body)


# Other containers of the pod -----------------------------------------------------------------------------------


def consumer(volume: Volume, place: Path, *, read_only: bool, cgroup: str) -> int:
    """Start a process of the pod that has the volume at `place` as it is now, and receives no other mount of it."""
    directory = cgroups.make(cgroup)
    child = os.fork()
    if child == 0:
        with ending_afterwards():
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
            (directory / "cgroup.procs").write_text(str(os.getpid()))
            syscalls.unshare(syscalls.CLONE_NEWNS)
            run(["mount", "--make-rprivate", "/"])
            run(["mount", "--bind", volume.target, place])
            if read_only:
                run(["mount", "-o", "remount,bind,ro", place])
            for mount in reversed(volume.mounts()):
                run(["umount", mount.mountpoint])
            (place.parent / f"{place.name}.ready").touch()
            signal.pause()
    wait_until((place.parent / f"{place.name}.ready").exists)
    return child


def of(pid: int, place: Path) -> Path:
    """Return the path of the volume's file as a process sees it."""
    return Path(f"/proc/{pid}/root") / place.relative_to("/") / "file"


def test_containers_that_have_the_dead_filesystem_get_the_new_one_but_only_those_of_the_pod(tmp_path: Path) -> None:
    """Each gets it as it was started: read-only stays read-only. Another pod has a cgroup with this pod's name."""
    places = [tmp_path / name for name in ("plain", "read-only", "foreign")]
    for place in places:
        place.mkdir()

    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        program = serve(front, volume, b"0")
        names = [
            f"{volume.cgroups.pod(volume.pod)}/container",
            volume.cgroups.pod_by_systemd(volume.pod),
            f"{volume.cgroups.pod(str(uuid.uuid4()))}/pod{volume.pod}",
        ]
        consumers = [
            consumer(volume, place, read_only=place is places[1], cgroup=name)
            for place, name in zip(places, names, strict=True)
        ]
        for number in range(1, 4):
            program.kill()
            program = serve(front, volume, b"%d" % number)
            for pid, place in zip(consumers[:2], places, strict=False):
                wait_until(partial(is_content, b"%d" % number, of(pid, place)))
                *dead, mount = [mount for mount in mountinfo(pid) if mount.is_fuse]
                assert ("ro" in mount.options) == (place is places[1])
                assert len(dead) == (0 if kernel_has("MOVE_MOUNT_BENEATH") else number)
            assert read(of(consumers[2], places[2])) == b"ENOTCONN"
        for pid in consumers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        program.kill()

    with_volume(tmp_path, body)


def read(path: Path) -> bytes:
    """Return the content of a file, or the name of the error."""
    try:
        return path.read_bytes()
    except OSError as error:
        return errno.errorcode[error.errno or 0].encode()


def is_content(content: bytes, path: Path) -> bool:
    return read(path) == content


# What a mounter child may order its helper to do -----------------------------------------------------------------


def test_a_twin_attaches_nothing_but_fuse_filesystems(tmp_path: Path) -> None:
    """An attacker who takes over the child, which works among a caller's files, controls the helper's orders."""

    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        os.chdir("/proc")
        kubelet = os.open(tmp_path / "kubelet", os.O_PATH)
        opened = Descriptors(kubelet)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        child = os.fork()
        if child == 0:
            with ending_afterwards():
                ours.close()
                volume_helper.HelperProcess(opened, volume.start_mount()).attend(theirs)
        theirs.close()
        helper = volume_helper.VolumeHelper(ours, PATIENCE, 0)
        for path in ("/", "/proc", str(volume.target)):
            copy = syscalls.open_tree(syscalls.AT_FDCWD, path.encode(), volume_targets._CLONE)
            with pytest.raises(PermissionError):
                helper.attach(copy)
            os.close(copy)
        with pytest.raises(FileNotFoundError):
            helper.clone()
        ours.close()
        os.waitpid(child, 0)
        assert volume.types() == ["tmpfs"]

    with_volume(tmp_path, body)
