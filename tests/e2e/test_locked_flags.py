"""A FUSE program can't raise anybody's privilege by what it serves, whatever is done to binds of its mount."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.messages import mounter
from fusermount3_broker.mounter import filesystem, volume_helper
from fusermount3_broker.mounter.daemon import SPARES
from fusermount3_broker.mounter.kept_descriptors import Descriptors, detached
from fusermount3_broker.mounter.namespaces import PidNamespace
from fusermount3_broker.service import sandbox
from tests.e2e import setuid
from tests.e2e.conftest import let_users_in, wait_until
from tests.e2e.hostile import in_private_namespace, in_process, slow_processes
from tests.e2e.owned_front import PATIENCE, a_plan, caller, facts_of, playing_the_front
from tests.e2e.test_volume_mounts import ROOTS_FACTS, consumer, mount_eagerly, with_volume
from tests.e2e.volumes import Program, publish, serve
from tests.lab import runtimes
from tests.lab.commands import run
from tests.lab.forked import ending_afterwards
from tests.lab.podman import mountinfo

if TYPE_CHECKING:
    from tests.e2e.owned_front import OwnedFront
    from tests.e2e.volumes import Volume

pytestmark = [pytest.mark.e2e, pytest.mark.long]

USER = 1000
LOCKED = {"nosuid", "nodev"}
_PROGRAM: dict[str, object] = {"content": setuid.program(), "mode": setuid.MODE}
START = mounter.StartMount(seconds=PATIENCE, commit_seconds=PATIENCE)


# What root of the node can do ----------------------------------------------------------------------------------


def remount(place: Path, flags: int) -> int:
    """Set the flags of a mount to exactly these, as runtimes do; return the errno."""
    try:
        syscalls.mount(None, bytes(place), None, _MS_REMOUNT | _MS_BIND | flags, None)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


_MS_REMOUNT, _MS_BIND = 32, 4096


def is_locked(place: Path, *, file: bool = False) -> bool:
    """Return whether nosuid and nodev, and no other flags, are locked even for root, at `place` and on a bind of it.

    This sends no request to the filesystem, to which root may have no access.
    """
    bound = place.parent / f"{place.name}.bound"
    bound.touch() if file else bound.mkdir()
    syscalls.mount(bytes(place), bytes(bound), None, _MS_BIND, None)
    try:
        refused = {remount(each, flags) for each in (place, bound) for flags in _LACKING}
        allowed = {remount(bound, _BOTH | more) for more in (syscalls.MS_RDONLY, syscalls.MS_NOEXEC, 0)}
        (options,) = [mount.options for mount in mountinfo() if mount.mountpoint == str(bound)]
    finally:
        syscalls.umount2(bytes(bound), syscalls.MNT_DETACH)
        bound.unlink() if file else bound.rmdir()
    assert allowed == {0}
    return refused == {errno.EPERM} and options >= LOCKED


_BOTH = syscalls.MS_NOSUID | syscalls.MS_NODEV
_LACKING = (0, syscalls.MS_RDONLY, syscalls.MS_NOSUID, syscalls.MS_NODEV)


def executed(path: Path) -> int:
    """Return the status of a program that a user executes."""
    with suppress(subprocess.TimeoutExpired):
        return subprocess.run([path], user=USER, group=USER, extra_groups=[], timeout=PATIENCE).returncode
    return -1


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("user_namespace", [False, True])
@pytest.mark.parametrize("pinned", [False, True])
def test_root_of_the_node_can_not_clear_nosuid_and_nodev_of_a_volume(
    pinned: bool, user_namespace: bool, read_only: bool, tmp_path: Path
) -> None:
    let_users_in(tmp_path)
    place = tmp_path / "own"
    place.mkdir()

    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        own = place if pinned else None
        program = Program(front, volume, place=own, namespace=True, user_namespace=user_namespace, **_PROGRAM)  # type: ignore[arg-type]
        program.keep(program.mount(program.begin(read_only=read_only), read_only=read_only))
        _, mount = volume.mounts()
        assert ("ro" in mount.options) == read_only
        assert "relatime" in mount.options
        if not user_namespace:
            assert executed(volume.file) == setuid.status_of(USER)
        assert is_locked(volume.target)
        program.kill()

    with_volume(tmp_path, body)


def test_nor_of_an_eager_volume(tmp_path: Path) -> None:
    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        device = mount_eagerly(front, volume)
        program = Program(front, volume)
        program.keep(program.mount(program.begin(held=device)))
        os.close(device)
        assert is_locked(volume.target)
        program.kill()

    with_volume(tmp_path, body)


def test_nor_of_what_takes_the_place_of_a_dead_one(tmp_path: Path) -> None:
    """It holds at the target, and in another container of the pod, for the whole volume and for a part of it."""
    places = [tmp_path / "whole"]
    places[0].mkdir()

    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        first = serve(front, volume)
        name = f"{volume.cgroups.pod(volume.pod)}/container"
        pid = consumer(volume, places[0], read_only=False, cgroup=name)
        part = volume.sub_path("container")
        part.touch()
        run(["mount", "--bind", volume.file, part])
        first.kill()
        second = serve(front, volume, b"second")
        wait_until(lambda: part.read_bytes() == b"second" if part_is_served(part) else False)
        assert is_locked(volume.target)
        assert is_locked(part, file=True)
        wait_until(partial(is_unmounted, part))

        def in_the_container() -> None:
            descriptor = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
            syscalls.setns(descriptor, syscalls.CLONE_NEWNS)
            assert is_locked(places[0])

        in_process(in_the_container)
        second.kill()
        os.kill(pid, 9)
        os.waitpid(pid, 0)

    with_volume(tmp_path, body)


def is_unmounted(part: Path) -> bool:
    """Unmount what is mounted there: a helper may just have mounted it, and before Linux 6.5 the dead one lies below;
    return whether nothing is left."""
    run(["umount", part], check=False)
    return not any(mount.mountpoint == str(part) for mount in mountinfo())


def part_is_served(part: Path) -> bool:
    try:
        part.read_bytes()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("file", [False, True])
@pytest.mark.parametrize("namespace", [False, True])
def test_nor_of_a_mount_in_place(namespace: bool, file: bool, tmp_path: Path) -> None:
    """A user's mount, on the host or in a container without a user namespace; an engine may bind it further."""
    let_users_in(tmp_path)
    place = tmp_path / "mountpoint"
    place.touch() if file else place.mkdir()
    os.chown(place, USER, USER)

    def body() -> None:
        with playing_the_front() as front, caller(place, USER, namespace=namespace) as (connection, pidfd):
            conversation = front.begin(START, connection, pidfd)
            conversation.say(a_plan(facts_of(conversation), noexec=True, read_only=True, noatime=True))
            assert isinstance(conversation.attached(), mounter.Mounted)

            def in_the_callers_namespace() -> None:
                syscalls.setns(pidfd, syscalls.CLONE_NEWNS)
                (mount,) = [each for each in mountinfo() if each.mountpoint == str(place)]
                assert mount.options == {"ro", "noexec", "noatime", *LOCKED}
                assert is_locked(place, file=file)

            in_process(in_the_callers_namespace)
            conversation.say(mounter.Undo())
            assert conversation.hear() == mounter.RolledBack()

    in_private_namespace(body)


@pytest.mark.parametrize("eager", [False, True])
def test_who_has_mounted_it_there_unmounts_a_volume(eager: bool, tmp_path: Path) -> None:
    """Kubelet does, too, without the broker, as soon as the broker has answered: the mount is not locked.

    No process of the broker keeps it busy, even if the process takes long to end.
    """

    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        mounters = psutil.Process(front.pid)
        pids = [mounters.pid, *(each.pid for each in mounters.children(recursive=True))]
        with slow_processes(pids, "exit_group", 1, tmp_path / "strace"):
            closed = mount_eagerly(front, volume) if eager else serve(front, volume)
            device = volume.mounts()[1].device
            syscalls.umount2(bytes(volume.target), 0)  # umount(8) would first ask the program, which is not there yet
        assert volume.types() == ["tmpfs"]
        if isinstance(closed, Program):
            wait_until(lambda: not is_connected(device))
            closed.kill()
        else:
            os.close(closed)

    with_volume(tmp_path, body)


def is_connected(device: str) -> bool:
    """Return whether the FUSE connection with a device number (MAJOR:MINOR) still exists."""
    directory = detached(b"fusectl")
    try:
        return Path(f"/proc/self/fd/{directory}", device.rpartition(":")[2]).exists()
    finally:
        os.close(directory)


# How flags are locked ------------------------------------------------------------------------------------------


def test_a_twin_attaches_no_filesystem_whose_flags_could_be_cleared(tmp_path: Path) -> None:
    """An attacker who takes over the child, which works among a caller's files, could send such a filesystem."""

    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        os.chdir("/proc")
        opened = Descriptors(os.open(tmp_path / "kubelet", os.O_PATH))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        child = os.fork()
        if child == 0:
            with ending_afterwards():
                ours.close()
                volume_helper.HelperProcess(opened, volume.start_mount()).attend(theirs)
        theirs.close()
        device = os.open("/dev/fuse", os.O_RDWR)
        here = PidNamespace(mounter.PIDS_SEEN)
        made = filesystem.create(a_plan(ROOTS_FACTS, allow_other=True), device, here, opened.programs, None)
        helper = volume_helper.VolumeHelper(ours, PATIENCE, 0)
        with pytest.raises(PermissionError):
            helper.attach(made)
        assert volume.types() == ["tmpfs"]
        os.close(made)
        ours.close()
        os.waitpid(child, 0)

    with_volume(tmp_path, body)


def test_the_maker_has_nothing_but_what_it_makes_and_no_uid(tmp_path: Path) -> None:
    """No account is the maker's; an attacker in it has an empty directory, an empty file, and no right on the host."""

    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        program = serve(front, volume)
        maker = Path(f"/proc/{front.maker.pid}")
        assert (maker / "uid_map").read_text() == (maker / "gid_map").read_text() == ""
        assert not [mount for mount in mountinfo(front.maker.pid) if mount.fstype != "tmpfs"]
        assert {str(each.readlink()).partition(":")[0] for each in (maker / "fd").iterdir()} <= {"socket", "/"}

        def in_its_place() -> None:
            user, mounts = (os.open(maker / name, os.O_RDONLY) for name in ("ns/user", "ns/mnt"))
            of_the_host = os.open("/proc/self/ns/mnt", os.O_RDONLY)
            syscalls.setns(user, syscalls.CLONE_NEWUSER)
            syscalls.setns(mounts, syscalls.CLONE_NEWNS)
            assert sorted(each.name for each in Path("/").iterdir()) == ["directory", "file"]
            with pytest.raises(OSError, match="Read-only"):
                Path("/more").touch()
            with pytest.raises(PermissionError):
                syscalls.setns(of_the_host, syscalls.CLONE_NEWNS)

        in_process(in_its_place)
        program.kill()

    with_volume(tmp_path, body)


def test_another_maker_takes_the_place_of_one_that_was_killed(tmp_path: Path) -> None:
    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        first = front.maker
        first.kill()
        for number in range(2 * SPARES):
            program = serve(front, volume, b"%d" % number)
            assert is_locked(volume.target)
            program.kill()
        assert front.maker.pid != first.pid

    with_volume(tmp_path, body)


def test_a_maker_holds_nothing_that_was_mounted_before_it_began(tmp_path: Path) -> None:
    """This includes mounts that another mount hides, such as a private /tmp where systemd gives the broker one."""
    let_users_in(tmp_path)
    place = tmp_path / "mountpoint"
    place.mkdir()
    os.chown(place, USER, USER)

    def body() -> None:
        with playing_the_front() as front, caller(place, USER) as who:
            conversation = front.begin(START, *who)
            conversation.say(a_plan(facts_of(conversation)))
            assert isinstance(conversation.attached(), mounter.Mounted)
            (mount,) = [each for each in mountinfo() if each.mountpoint == str(place)]
            run(["mount", "-t", "tmpfs", "tmpfs", tmp_path])
            first = front.maker
            first.kill()
            for _ in range(2 * SPARES):
                front.check()
            assert front.maker.pid != first.pid
            run(["umount", tmp_path])
            conversation.say(mounter.Undo())
            assert conversation.hear() == mounter.RolledBack()
            conversation.close()
            wait_until(lambda: not is_connected(mount.device))

    in_private_namespace(body)


def test_what_is_mounted_in_a_cell_is_in_no_other_however_slow_the_maker_is(tmp_path: Path) -> None:
    let_users_in(tmp_path)
    place = tmp_path / "mountpoint"
    place.mkdir()
    os.chown(place, USER, USER)

    def mount_and_undo(front: OwnedFront) -> str:
        with caller(place, USER) as who:
            conversation = front.begin(START, *who)
            conversation.say(a_plan(facts_of(conversation)))
            assert isinstance(conversation.attached(), mounter.Mounted)
            (mount,) = [each for each in mountinfo() if each.mountpoint == str(place)]
            conversation.say(mounter.Undo())
            assert conversation.hear() == mounter.RolledBack()
            conversation.close()
            return mount.device

    def body() -> None:
        with playing_the_front() as front, slow_processes([front.maker.pid], "unshare", 0.3, tmp_path / "strace"):
            devices = [mount_and_undo(front) for _ in range(3 * SPARES)]
            wait_until(lambda: not any(map(is_connected, devices)))

    in_private_namespace(body)


def test_where_the_host_allows_no_user_namespace_no_volume_is_served_and_mounts_in_place_are_as_fusermount3s(
    tmp_path: Path,
) -> None:
    let_users_in(tmp_path)
    place = tmp_path / "mountpoint"
    place.mkdir()
    os.chown(place, USER, USER)
    refused = mounter.Failed(errno.EPERM, b"lock nosuid and nodev, because the host allows no user namespaces")

    def body(front: OwnedFront, volume: Volume) -> None:
        assert not front.locks_flags
        assert front.begin(volume.start_publish()).hear() == refused
        start = volume.start_eager()
        assert front.begin(start).hear() == refused
        program = Program(front, volume)
        conversation = program.begin()
        conversation.say(a_plan(facts_of(conversation), allow_other=True))
        assert conversation.hear() == refused
        program.kill()
        with caller(place, USER) as who:
            conversation = front.begin(START, *who)
            conversation.say(a_plan(facts_of(conversation)))
            assert isinstance(conversation.attached(), mounter.Mounted)
            (mount,) = [each for each in mountinfo() if each.mountpoint == str(place)]
            assert mount.options >= LOCKED
            conversation.say(mounter.Undo())
            assert conversation.hear() == mounter.RolledBack()

    def on_such_a_host() -> None:
        forbid_user_namespaces()
        with_volume(tmp_path, body)

    in_process(on_such_a_host)


def forbid_user_namespaces() -> None:
    """Deny user namespaces to this process and its children, as with user.max_user_namespaces = 0."""
    seccomp = vars(sandbox)["seccomp"]  # of either package
    rules = seccomp.SyscallFilter(seccomp.ALLOW)
    flag = seccomp.Arg(0, seccomp.MASKED_EQ, syscalls.CLONE_NEWUSER, syscalls.CLONE_NEWUSER)
    rules.add_rule(seccomp.ERRNO(errno.ENOSPC), "unshare", flag)
    rules.load()


# What runtimes do ----------------------------------------------------------------------------------------------

OPTIONS = {
    "none": ("rbind", "rslave"),
    "ro": ("rbind", "rslave", "ro"),
    "rw": ("rbind", "rslave", "rw"),
    "recursively read-only": ("rbind", "rslave", "rro"),
    "without a word of propagation": ("bind", "ro"),
    "as podman does": ("rbind", "rslave", "ro", "nosuid", "nodev"),
    "suid and dev": ("rbind", "rslave", "suid", "dev"),
    "recursively suid and dev": ("rbind", "rslave", "rsuid", "rdev"),
}
EXPLICIT = {"recursively suid and dev"}
OLD_RUNC = EXPLICIT | {"ro", "without a word of propagation"}
#: By runtime and release, the bind options with which the runtime starts no container; docs/compatibility.md lists
#: them, too. This is the behaviour of the present releases; the last may learn more.
REFUSED = {
    ("runc", "bookworm"): OLD_RUNC,
    ("runc", "trixie"): OLD_RUNC,
    ("runc", "sid"): EXPLICIT | {"suid and dev"},
    **{("crun", suite): EXPLICIT for suite in runtimes.SUITES},
}
SCRIPT = "grep ' /data' /proc/mounts; /data/file; echo euid $?"


@pytest.mark.parametrize("suite", runtimes.SUITES)
@pytest.mark.parametrize("name", runtimes.NAMES)
def test_whatever_a_runtime_does_with_a_bind_nobody_becomes_root(name: str, suite: str, tmp_path: Path) -> None:
    """The binds are of a volume (read-only or not), of a subPath of it, and of a user's mount in place."""
    let_users_in(tmp_path)
    place = tmp_path / "mountpoint"
    place.mkdir()
    part = tmp_path / "part"
    part.mkdir()

    def body(front: OwnedFront, volume: Volume) -> None:
        runtime = runtimes.Runtime(name, suite, tmp_path / "root")
        publish(front, volume)
        program = serve(front, volume, place=place, **_PROGRAM)  # type: ignore[arg-type]
        run(["mount", "--bind", volume.target, part])
        refused: dict[str, set[str]] = {each.name: set() for each in (volume.target, part, place)}
        for source in (volume.target, part, place):
            for key, options in OPTIONS.items():
                ran = runtime.run(tmp_path, source, options, SCRIPT)
                if "euid" not in ran.output:
                    assert ran.status != 0
                    assert "not permitted" in ran.error, ran
                    refused[source.name].add(key)
                    continue
                flags = set(ran.output.split()[3].split(","))
                assert flags >= LOCKED, (key, ran)
                assert f"euid {setuid.status_of(USER)}" in ran.output, (key, ran)
        run(["umount", part])
        program.kill()
        syscalls.umount2(bytes(place), syscalls.MNT_DETACH)
        assert all(found == REFUSED[name, suite] for found in refused.values()), (runtime.version(), refused)

    with_volume(tmp_path, body)
