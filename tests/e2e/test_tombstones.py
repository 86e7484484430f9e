"""Tombstones, and how the filesystem that follows one comes into containers: a test commands the real mounter.

A tombstone is at a volume's target in place of a filesystem whose program is gone. A container runtime can look at it
and bind it. Whoever reads sees what is read on the dead filesystem: an error.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat as stat_module
import struct
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from fusermount3_broker.kernel import features, syscalls
from fusermount3_broker.messages import mounter, process_names
from fusermount3_broker.mounter import mount_tree, tombstone, volume_targets
from fusermount3_broker.mounter.kept_descriptors import Descriptors
from tests.e2e.conftest import let_users_in, wait_until
from tests.e2e.owned_front import PATIENCE, a_plan, facts_of
from tests.e2e.test_volume_mounts import ENDED, consumer, is_content, mount_eagerly, of, read, reader, says, with_volume
from tests.e2e.volumes import Program, Volume, mount_fusectl, publish, serve, stat, unpublish
from tests.lab import cgroups, tinyfuse
from tests.lab.commands import run
from tests.lab.forked import ending_afterwards
from tests.lab.kernel import kernel_has, needs_kernel
from tests.lab.podman import mountinfo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.owned_front import Conversation, OwnedFront

pytestmark = pytest.mark.e2e

TYPE = "fuse.tombstone"
#: The types of the mounts at a target with a tombstone. Where a dead mount can't be replaced, it stays below.
STACK = ["tmpfs", TYPE] if kernel_has("MOVE_MOUNT_BENEATH") else ["tmpfs", "fuse", TYPE]


def begin(front: OwnedFront, volume: Volume, device: int) -> Conversation:
    return front.begin(mounter.StartTombstone(PATIENCE, volume.relative(volume.target), device))


def tombstone_for(front: OwnedFront, volume: Volume, device: int) -> bool:
    """Have a tombstone put in the place of that device; return whether it was."""
    conversation = begin(front, volume, device)
    said = conversation.hear()
    conversation.close()
    assert isinstance(said, mounter.TombstonePut), said
    return said.replaced


def lines(*devices: int) -> bytes:
    """Return the lines by which a front tells the mounter which filesystems a volume had."""
    return b"".join(b"%d %d\n" % (each, inode_of(each)) for each in devices)


def inode_of(device: int) -> int:
    """Return the inode of a FUSE connection in fusectl."""
    return (mount_fusectl() / f"{device}").stat().st_ino


def look_again(front: OwnedFront, volume: Volume, former: bytes = b"", device: int | None = None) -> None:
    """Have the pod's containers restored once more; `device` instead of that of the topmost filesystem."""
    there = topmost(volume)
    target = volume.relative(volume.target)
    start = mounter.StartRestore(PATIENCE, target, device or there, inode_of(there), 0, former, eager=False)
    conversation = front.begin(start)
    said = conversation.hear()
    assert said == (mounter.Restored() if device in (None, there) else mounter.Failed(errno.ENOENT, b"open the target"))
    conversation.close()


def busy(front: OwnedFront) -> list[psutil.Process]:
    """Return the mounter's children that carry out an operation."""
    found = []
    for each in psutil.Process(front.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if each.name() == process_names.BUSY.decode():
                found.append(each)
    return found


def topmost(volume: Volume) -> int:
    """Return the device number of the topmost filesystem at the target."""
    return int(volume.mounts()[-1].device.partition(":")[2])


def bereaved(front: OwnedFront, volume: Volume, content: bytes = b"0") -> int:
    """Publish the volume, unless it is; have a program serve it that ends; return the dead device."""
    if not volume.mounts():
        for each in publish(front, volume):
            os.close(each)
    serve(front, volume, content).kill()
    return topmost(volume)


def with_tombstone(directory: Path, body: Callable[[OwnedFront, Volume], None]) -> None:
    """As `with_volume`; when `body` runs, a tombstone is at the target."""

    def with_it(front: OwnedFront, volume: Volume) -> None:
        assert tombstone_for(front, volume, bereaved(front, volume))
        assert volume.types() == STACK
        body(front, volume)

    with_volume(directory, with_it)


def test_a_container_runtime_can_look_at_it_and_bind_it(tmp_path: Path) -> None:
    def body(_front: OwnedFront, volume: Volume) -> None:
        for _ in range(2):
            looked = volume.target.stat()
            assert (stat_module.S_ISDIR(looked.st_mode), looked.st_uid) == (True, 0)
            run(["stat", volume.target])  # with the time of birth
            bound = tmp_path / "bound"
            bound.mkdir(exist_ok=True)
            run(["mount", "--bind", volume.target, bound])
            run(["mount", "-o", "remount,bind,ro", bound])
            assert bound.stat().st_mode == looked.st_mode
            run(["umount", bound])
            Path("/proc/sys/vm/drop_caches").write_text("3")

    with_tombstone(tmp_path, body)


ACCESSES: dict[str, Callable[[Path], object]] = {
    "list": os.listdir,
    "open": lambda path: os.open(path, os.O_RDONLY),
    "open a file": lambda path: os.open(f"{path}/file", os.O_RDONLY),
    "create": lambda path: os.open(f"{path}/file", os.O_CREAT | os.O_WRONLY),
    "make a directory": lambda path: os.mkdir(f"{path}/directory"),  # noqa: PTH102
    "look": lambda path: os.stat(f"{path}/file"),  # noqa: PTH116
    "remove": lambda path: os.unlink(f"{path}/file"),  # noqa: PTH108
    "change the mode": lambda path: os.chmod(path, 0o777),  # noqa: PTH101
    "ask for the size": os.statvfs,
}


@pytest.mark.parametrize("uid", [0, 1000])
def test_whatever_else_is_done_with_it_fails_as_on_the_dead_filesystem(uid: int, tmp_path: Path) -> None:
    """Again and again, and nothing of it makes the kernel forget what stat(2) says."""

    def results(volume: Volume) -> dict[str, str]:
        found = {}
        for name, access in ACCESSES.items():
            try:
                access(volume.target)
                found[name] = "done"
            except OSError as error:
                found[name] = errno.errorcode[error.errno or 0]
        return found

    def body(front: OwnedFront, volume: Volume) -> None:
        device = bereaved(front, volume)
        os.setresuid(uid, uid, 0)
        on_dead = results(volume)
        os.setresuid(0, 0, 0)
        assert tombstone_for(front, volume, device)
        os.setresuid(uid, uid, 0)
        for _ in range(3):
            found = results(volume)
            if uid:  # who may not do it is told so
                assert found.pop("change the mode") == "EPERM"
                on_dead.pop("change the mode", None)
            assert found == on_dead == dict.fromkeys(found, "ENOTCONN")
            assert volume.target.stat()
        os.setresuid(0, 0, 0)
        assert stat(front, volume).errno == errno.ENOTCONN

    let_users_in(tmp_path)
    with_volume(tmp_path, body)


def offers_idmap() -> bool:
    """Return whether the kernel offers FUSE_ALLOW_IDMAP (include/uapi/linux/fuse.h) to FUSE programs: since 6.12."""
    device = os.open("/dev/fuse", os.O_RDWR)
    context = syscalls.fsopen(b"fuse", syscalls.FSOPEN_CLOEXEC)
    for name, value in {"fd": device, "rootmode": "40000", "user_id": 0, "group_id": 0}.items():
        syscalls.fsconfig(context, syscalls.FSCONFIG_SET_STRING, name.encode(), f"{value}".encode(), 0)
    syscalls.fsconfig(context, syscalls.FSCONFIG_CMD_CREATE, None, None, 0)
    (flags,) = struct.unpack_from("=I", os.read(device, 1 << 16), 40 + 16)
    os.close(context)
    os.close(device)
    return bool(flags & 1 << 40 - 32)


def idmapped(path: Path) -> int:
    """Return a mount of a directory that is idmapped as container runtimes do it for a pod with a user namespace."""
    child = os.fork()
    if child == 0:
        with ending_afterwards():
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
            syscalls.unshare(syscalls.CLONE_NEWUSER)
            signal.pause()
    own = Path("/proc/self/ns/user").stat().st_ino
    wait_until(lambda: Path(f"/proc/{child}/ns/user").stat().st_ino != own)
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{child}/{name}").write_text("0 100000 65536")
    copy = syscalls.open_tree(syscalls.AT_FDCWD, bytes(path), volume_targets._CLONE & ~syscalls.AT_EMPTY_PATH)
    namespace = os.open(f"/proc/{child}/ns/user", os.O_RDONLY)
    attributes = struct.pack("=QQQQ", MOUNT_ATTR_IDMAP, 0, 0, namespace)
    try:
        syscalls._check(
            syscalls._syscall(syscalls._MOUNT_SETATTR, copy, b"", syscalls.AT_EMPTY_PATH, attributes, len(attributes))
        )
    finally:
        os.close(namespace)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return copy


MOUNT_ATTR_IDMAP = 0x00100000  # include/uapi/linux/mount.h


def test_a_container_with_a_user_namespace_gets_an_idmapped_mount_of_it(tmp_path: Path) -> None:
    """As of any volume with `hostUsers: false`; of the dead filesystem, there is none."""
    if not offers_idmap():
        pytest.skip(f"not run: {features.running()} lacks FUSE_ALLOW_IDMAP")

    def body(front: OwnedFront, volume: Volume) -> None:
        device = bereaved(front, volume)
        with pytest.raises(OSError, match="Invalid argument"):
            idmapped(volume.target)
        assert tombstone_for(front, volume, device)
        mount = idmapped(volume.target)
        assert os.fstat(mount).st_uid == 100000
        with pytest.raises(OSError, match="not connected"):
            os.listdir(f"/proc/self/fd/{mount}")  # noqa: PTH208
        os.close(mount)

    with_volume(tmp_path, body)


def test_who_reads_all_the_time_sees_no_placeholder_when_it_comes_and_goes(tmp_path: Path) -> None:
    """The reader has its own mount namespace, as with HostToContainer."""
    seen = tmp_path / "seen"

    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        program = serve(front, volume, b"0")
        child = reader(volume.file, seen)
        for number in range(1, 11):
            wait_until(partial(says, seen, number - 1))
            program.kill()
            device = topmost(volume)
            assert tombstone_for(front, volume, device)
            assert not tombstone_for(front, volume, device), "it is there already"
            assert not tombstone_for(front, volume, topmost(volume)), "a tombstone has none"
            assert volume.types() == STACK
            program = serve(front, volume, b"%d" % number)
            assert volume.types() == [*STACK, "fuse"]
        wait_until(partial(says, seen, 10))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        program.kill()
        lines = set(seen.read_text().split())
        if not kernel_has("MOVE_MOUNT_BENEATH"):
            lines -= {"ENOENT"}  # the placeholder
        assert lines <= {"ready", *ENDED, *map(str, range(11))}, lines

    with_volume(tmp_path, body)


def test_a_program_that_crashes_again_and_again_has_one_tombstone(tmp_path: Path) -> None:
    """Whoever keeps a descriptor of each mount keeps only one of these."""

    def body(front: OwnedFront, volume: Volume) -> None:
        held = []
        for _ in range(5):
            assert tombstone_for(front, volume, bereaved(front, volume))
            held.append(os.open(volume.target, os.O_PATH))
        assert len({os.fstat(each).st_dev for each in held}) == 1
        for each in held:
            os.close(each)

    with_volume(tmp_path, body)


def test_it_takes_the_place_of_nothing_that_lives(tmp_path: Path) -> None:
    """Whatever the front says: a program may have come back meanwhile, or the volume may have gone."""

    def body(front: OwnedFront, volume: Volume) -> None:
        assert not tombstone_for(front, volume, 7), "nothing is published"
        dead = bereaved(front, volume)
        program = serve(front, volume, b"alive")
        for device in (dead, topmost(volume), 0):
            assert not tombstone_for(front, volume, device)
        assert volume.file.read_bytes() == b"alive"
        program.kill()
        device = topmost(volume)
        unpublish(front, volume)
        assert not tombstone_for(front, volume, device)
        publish(front, volume)
        assert not tombstone_for(front, volume, device)
        assert volume.types() == ["tmpfs"]

    with_volume(tmp_path, body)


def test_a_program_that_hangs_is_not_taken_for_a_dead_one(tmp_path: Path) -> None:
    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        program = serve(front, volume, hangs=True)
        conversation = front.begin(mounter.StartTombstone(1, volume.relative(volume.target), topmost(volume)))
        time.sleep(2)
        assert volume.types() == ["tmpfs", "fuse"]
        program.kill()
        assert conversation.hear() != mounter.TombstonePut(True)
        assert volume.types() == ["tmpfs", "fuse"]
        conversation.close()

    with_volume(tmp_path, body)


@needs_kernel("fuse_connection in fdinfo")
def test_a_program_in_a_user_namespace_is_dead_when_nobody_in_the_pod_serves(tmp_path: Path) -> None:
    """Its filesystem says nothing outside of that namespace."""

    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        program = serve(front, volume, user_namespace=True)
        device = topmost(volume)
        assert not tombstone_for(front, volume, device)
        assert volume.types() == ["tmpfs", "fuse"]
        program.kill()
        assert tombstone_for(front, volume, device)
        assert volume.types() == ["tmpfs", TYPE]
        program = serve(front, volume, user_namespace=True)
        assert volume.types() == ["tmpfs", TYPE, "fuse"]
        program.kill()

    with_volume(tmp_path, body)


def test_paths_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    def body(front: OwnedFront, _volume: Volume) -> None:
        said = front.begin(mounter.StartTombstone(PATIENCE, b"pods/../x", 7)).hear()
        assert said == mounter.Failed(errno.EPERM, b"check the volume")
        said = front.begin(mounter.StartRestore(PATIENCE, b"pods/../x", 7, 1, 0, b"", eager=False)).hear()
        assert said == mounter.Failed(errno.EPERM, b"check the volume")

    with_volume(tmp_path, body)


def test_a_program_that_comes_back_at_the_same_moment_is_served(tmp_path: Path) -> None:
    """Neither of the two is refused because of the other."""

    def body(front: OwnedFront, volume: Volume) -> None:
        for number in range(20):
            device = bereaved(front, volume, b"before")
            program = Program(front, volume, b"%d" % number)
            conversation = program.begin()
            conversation.say(a_plan(facts_of(conversation), allow_other=True))
            assert isinstance(conversation.hear(), mounter.Made)
            if number % 2:
                conversation.say(mounter.Attach())
            stands = begin(front, volume, device)
            if not number % 2:
                conversation.say(mounter.Attach())
            said = conversation.hear()
            assert isinstance(said, mounter.Mounted), said
            program.keep(conversation)
            assert isinstance(stands.hear(), mounter.TombstonePut)
            assert volume.types()[-1] == "fuse"
            assert volume.file.read_bytes() == b"%d" % number
            program.kill()
            stands.close()

    with_volume(tmp_path, body)


def test_a_mount_that_finds_another_in_its_place_looks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tombstone comes after the look that found the dead filesystem."""

    def body(front: OwnedFront, volume: Volume) -> None:
        device = bereaved(front, volume)
        os.chdir("/proc")
        opened = Descriptors(os.open(tmp_path / "kubelet", os.O_PATH))
        look = volume_targets.Target._look_for_room

        def look_and_lose(self: volume_targets.Target) -> object:
            looked = look(self)
            tombstone_for(front, volume, device)
            return looked

        monkeypatch.setattr(volume_targets.Target, "_look_for_room", look_and_lose)
        copy = tombstone.create(opened)
        with volume_targets.Target(opened, volume.relative(volume.target)) as target:
            attached = target.attach(copy, PATIENCE)
        *_, first, _ = volume.mounts()
        assert attached == volume_targets.Attached(tombstone=int(first.device.partition(":")[2]))
        assert volume.types() == [*STACK, TYPE]

    with_volume(tmp_path, body)


@contextlib.contextmanager
def a_target_that_loses_its_dead_mount(
    directory: Path, front: OwnedFront, volume: Volume, place: tuple[object, str]
) -> Iterator[volume_targets.Target]:
    """Provide a target; during its first look, when this function is called, a tombstone comes."""
    device = bereaved(front, volume)
    look = getattr(*place)

    def lose_and_look(mount_id: int) -> object:
        if volume.types()[-1] != TYPE:
            assert tombstone_for(front, volume, device)
        return look(mount_id)

    os.chdir("/proc")
    opened = Descriptors(os.open(directory / "kubelet", os.O_PATH))
    with volume_targets.Target(opened, volume.relative(volume.target)) as target, pytest.MonkeyPatch.context() as patch:
        patch.setattr(*place, lose_and_look)
        yield target


@pytest.mark.parametrize("place", [(mount_tree, "chain"), (mount_tree, "fuse_if_any")])
def test_a_dead_mount_that_is_detached_during_the_look_keeps_no_other_out(
    tmp_path: Path, place: tuple[object, str]
) -> None:
    """Detached, it is no mount of the volume, and none of FUSE: what a living one of something else would be."""

    def body(front: OwnedFront, volume: Volume) -> None:
        copy = tombstone.create(Descriptors(os.open(tmp_path / "kubelet", os.O_PATH)))
        with a_target_that_loses_its_dead_mount(tmp_path, front, volume, place) as target:
            target.attach(copy, PATIENCE)
        assert volume.types() == [*STACK, TYPE]

    with_volume(tmp_path, body)


def test_a_volume_whose_dead_mount_is_detached_during_the_look_is_still_published(tmp_path: Path) -> None:
    def body(front: OwnedFront, volume: Volume) -> None:
        losing = a_target_that_loses_its_dead_mount(tmp_path, front, volume, (mount_tree, "chain"))
        with losing as target, target.seen() as (_, layers):
            assert [each.type.decode() for each in reversed(layers)] == STACK

    with_volume(tmp_path, body)


def test_before_linux_6_5_the_dead_mount_stays_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a kernel that lacks the flag: the kernel refuses a really unknown flag in the same way."""
    monkeypatch.setattr(syscalls, "MOVE_MOUNT_BENEATH", 1 << 20)

    def body(front: OwnedFront, volume: Volume) -> None:
        device = bereaved(front, volume)
        os.chdir("/proc")
        opened = Descriptors(os.open(tmp_path / "kubelet", os.O_PATH))
        for _ in range(2):
            with volume_targets.Target(opened, volume.relative(volume.target)) as target:
                assert target.put_tombstone(device, lambda: tombstone.create(opened), PATIENCE)
            assert volume.types() == ["tmpfs", "fuse", TYPE]
            program = serve(front, volume, b"next")
            assert volume.types() == ["tmpfs", "fuse", TYPE, "fuse"]
            assert volume.file.read_bytes() == b"next"
            program.kill()
            device = topmost(volume)

    with_volume(tmp_path, body)


def test_a_program_that_is_not_kept_leaves_it_there(tmp_path: Path) -> None:
    def body(front: OwnedFront, volume: Volume) -> None:
        another = Program(front, volume, commits=False)
        before = volume.mounts()
        conversation = another.mount()
        assert volume.types() == [*STACK, "fuse"]
        conversation.say(mounter.Undo())
        assert conversation.hear() == mounter.RolledBack()
        assert volume.mounts() == before
        assert volume.target.stat()
        another.kill()

    with_tombstone(tmp_path, body)


def test_an_eager_filesystem_is_mounted_on_it(tmp_path: Path) -> None:
    def body(front: OwnedFront, volume: Volume) -> None:
        device = mount_eagerly(front, volume)
        assert volume.types() == [*STACK, "fuse"]
        assert not tombstone_for(front, volume, topmost(volume)), "somebody has its descriptor"
        os.close(device)
        assert tombstone_for(front, volume, topmost(volume))

    with_tombstone(tmp_path, body)


def test_a_volume_is_published_and_unpublished_with_it(tmp_path: Path) -> None:
    def body(front: OwnedFront, volume: Volume) -> None:
        before = volume.mounts()
        for each in publish(front, volume):
            os.close(each)
        assert volume.mounts() == before
        unpublish(front, volume)
        assert volume.mounts() == []

    with_tombstone(tmp_path, body)


def test_a_mounter_that_is_killed_meanwhile_leaves_one_or_the_other(tmp_path: Path) -> None:
    """And nothing that hangs: who made the tombstone had the only descriptor of it."""

    def body(front: OwnedFront, volume: Volume) -> None:
        for milliseconds in range(12):
            device = bereaved(front, volume)
            conversation = begin(front, volume, device)
            time.sleep(milliseconds / 1000)
            for each in busy(front):
                with contextlib.suppress(psutil.NoSuchProcess):  # it was faster
                    each.kill()
            conversation.hear()
            conversation.close()
            assert volume.types() in (["tmpfs", "fuse"], [*STACK, "fuse"], STACK)
            assert read(volume.file) == b"ENOTCONN"

    with_volume(tmp_path, body)


# Containers of the pod -----------------------------------------------------------------------------------------------


def container(volume: Volume, place: Path, *, read_only: bool = False) -> int:
    """Start a process of the pod that has the volume at `place` as it is now, and receives no other mount of it."""
    place.mkdir()
    return consumer(volume, place, read_only=read_only, cgroup=f"{volume.cgroups.pod(volume.pod)}/{place.name}")


def end(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_containers_get_the_new_filesystem_whenever_they_were_started(tmp_path: Path) -> None:
    """While a program served the volume, or while there was a tombstone; and whether or not that ever came later."""
    places = [tmp_path / name for name in ("lived", "stood-in")]

    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        program = serve(front, volume, b"0")
        containers = [container(volume, places[0], read_only=True)]
        program.kill()
        former = lines(topmost(volume))
        assert tombstone_for(front, volume, topmost(volume))
        containers.append(container(volume, places[1], read_only=True))
        unattached = Program(front, volume, b"not kept", commits=False)  # it fails, and the tombstone is there again
        conversation = unattached.mount()
        conversation.say(mounter.Undo())
        assert conversation.hear() == mounter.RolledBack()
        unattached.kill()
        for number in range(1, 4):
            program = serve(front, volume, b"%d" % number, former=former)
            for pid, place in zip(containers, places, strict=True):
                wait_until(partial(is_content, b"%d" % number, of(pid, place)))
                *covered, mount = [mount for mount in mountinfo(pid) if mount.is_fuse]
                assert "ro" in mount.options
                assert kernel_has("MOVE_MOUNT_BENEATH") <= (covered == [])
            program.kill()
            former = lines(topmost(volume))
            if number != 2:
                assert tombstone_for(front, volume, topmost(volume))
        end(*containers)

    with_volume(tmp_path, body)


def test_a_later_broker_recognizes_what_only_containers_have(tmp_path: Path) -> None:
    """Where fusectl ends with the broker, nothing else identifies a dead filesystem whose place a tombstone has."""

    def body(front: OwnedFront, volume: Volume) -> None:
        def is_recognized(target: Volume, source: bytes, *, shared: bool = False) -> bool:
            path = target.relative(target.target)
            start = mounter.StartRecognizeVolume(PATIENCE, path, device, b"fuse", source, shared)
            said = front.begin(start).hear()
            assert said in (mounter.Recognized(b"%d\n" % device), mounter.Recognized(b"")), said
            return said != mounter.Recognized(b"")

        publish(front, volume)
        neighbour = volume.beside()
        program = serve(front, volume)
        pid = container(volume, tmp_path / "data")
        program.kill()
        device = topmost(volume)
        assert is_recognized(volume, b"another"), "what is at the target is known by its number"
        assert tombstone_for(front, volume, device)
        assert is_recognized(volume, b"owned")
        assert not is_recognized(volume, b"another")
        assert not is_recognized(neighbour, b"owned")
        assert is_recognized(neighbour, b"owned", shared=True)
        end(pid)
        assert not is_recognized(volume, b"owned")
        neighbour.cgroups.remove()

    with_volume(tmp_path, body)


def test_what_is_copied_into_containers_is_the_mount_at_the_target(tmp_path: Path) -> None:
    """Before Linux 6.15, the kernel makes no copies of a mount that is attached nowhere."""

    def body(front: OwnedFront, volume: Volume) -> None:
        program = serve(front, volume, b"1")
        os.chdir("/proc")
        opened = Descriptors(os.open(tmp_path / "kubelet", os.O_PATH))
        with volume_targets.Target(opened, volume.relative(volume.target)) as target:
            mount, tombstone_below, _ = target.served(topmost(volume), PATIENCE)
        there = os.open(volume.target, os.O_PATH)
        assert mount_tree.look(mount).mount_id == mount_tree.look(there).mount_id
        assert tombstone_below is not None
        for each in (mount, there):
            os.close(each)
        program.kill()

    with_tombstone(tmp_path, body)


@pytest.mark.parametrize("has", ["former", "tombstone"])
def test_a_container_that_was_not_reached_gets_the_new_filesystem_later(has: str, tmp_path: Path) -> None:
    """As one that was just starting, and was not in the cgroup of the pod yet."""
    place = tmp_path / "container"
    place.mkdir()

    def body(front: OwnedFront, volume: Volume) -> None:
        def start() -> int:
            return consumer(volume, place, read_only=False, cgroup=f"{volume.cgroups.pod(str(uuid.uuid4()))}/container")

        publish(front, volume)
        program = serve(front, volume, b"0")
        device = topmost(volume)
        former = lines(device)
        pid = start() if has == "former" else 0
        program.kill()
        assert tombstone_for(front, volume, device)
        pid = pid or start()
        before = busy(front)
        program = Program(front, volume, b"1")
        conversation = program.mount(program.begin(former=former))
        program.keep(conversation)
        conversation.close()
        wait_until(lambda: set(busy(front)) <= set(before))  # it has restored all that it reached
        look_again(front, volume, former)
        directory = cgroups.make(f"{volume.cgroups.pod(volume.pod)}/container")
        (directory / "cgroup.procs").write_text(str(pid))
        look_again(front, volume, former, device=1 << 20)
        assert read(of(pid, place)) == b"ENOTCONN"
        look_again(front, volume, former)
        assert read(of(pid, place)) == b"1"
        assert read(volume.file) == b"1"
        program.kill()
        end(pid)

    with_volume(tmp_path, body)


def test_a_program_whose_own_container_has_the_volume_gets_it_there_too(tmp_path: Path) -> None:
    """Wherever it mounts itself; at its own mountpoint it is left with what it mounts."""
    place = tmp_path / "own"
    place.mkdir()

    def body(front: OwnedFront, volume: Volume) -> None:
        program = serve(front, volume, b"next", place=place, namespace=True, in_pod=True)
        for path in (volume.target, place):
            wait_until(partial(is_content, b"next", of(program.pid, path)))
        (own,) = [mount for mount in mountinfo(program.pid) if mount.mountpoint == str(place)]
        assert own.is_fuse
        program.kill()

    with_tombstone(tmp_path, body)


def test_a_part_is_replaced_only_in_the_directory_of_the_pod(tmp_path: Path) -> None:
    """In the broker's own mount namespace, kubelet has the subPaths of all pods."""

    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        program = serve(front, volume, b"0")
        own, other = volume.sub_path("container"), tmp_path / "kubelet/pods/other-pod/part"
        other.parent.mkdir()
        for each in (own, other):
            each.touch()
            run(["mount", "--bind", volume.file, each])
        # Before Linux 6.5 the part is covered, which the kernel propagates to whatever else is bound from there.
        run(["mount", "--make-private", other])
        program.kill()
        program = serve(front, volume, b"1")
        wait_until(partial(is_content, b"1", own))
        assert read(other) == b"ENOTCONN"
        program.kill()
        for each in (own, other):
            while any(mount.mountpoint == str(each) for mount in mountinfo()):  # a mount that covers another, and that
                run(["umount", "--lazy", each])

    with_volume(tmp_path, body)


def test_no_other_filesystem_is_replaced_whatever_the_mounter_is_told(tmp_path: Path) -> None:
    """A front that an attacker has taken over may name any filesystem.

    It stays outside of the pod, also where a process of the pod is in the mounter's own mount namespace; and in the
    pod, if it only has the number of one that is gone.
    """
    other = tmp_path / "other"
    other.mkdir()
    place = tmp_path / "container"

    def body(front: OwnedFront, volume: Volume) -> None:
        alive = os.fork()
        if alive == 0:
            with ending_afterwards():
                syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
                volume.enter_pod()
                fuse = os.open("/dev/fuse", os.O_RDWR)
                data = b"fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other" % fuse
                syscalls.mount(b"other", bytes(other), b"fuse", 0, data)
                tinyfuse.serve(fuse, b"alive", hangs=False, mode=0o644)
        wait_until(partial(is_content, b"alive", other / "file"))
        named = os.minor(other.stat().st_dev)
        device = bereaved(front, volume)
        pid = container(volume, place)
        program = serve(front, volume, b"next", former=b"%d 1\n%d 1\n" % (named, 2**32 - 1))
        wait_until(partial(is_content, b"next", of(pid, place)))
        assert topmost(volume) != device
        look_again(front, volume, b"%d 1\n" % named)
        assert read(of(pid, other)) == b"alive", "that connection has another inode"
        look_again(front, volume, lines(named))
        assert read(of(pid, other)) == b"next"
        assert read(other / "file") == b"alive"
        end(alive, pid)
        program.kill()
        run(["umount", other])

    with_volume(tmp_path, body)


def test_a_filesystem_with_the_names_of_a_tombstone_harms_only_its_own_volume(tmp_path: Path) -> None:
    """However often it comes, it is one layer more."""

    def body(front: OwnedFront, volume: Volume) -> None:
        publish(front, volume)
        for _ in range(5):
            program = Program(front, volume)
            program.keep(program.mount(source=volume_targets.SOURCE, subtype=volume_targets.TOMBSTONE))
            device = topmost(volume)
            program.kill()
            tombstone_for(front, volume, device)
            assert len(volume.types()) <= 3
        program = serve(front, volume, b"next")
        assert volume.file.read_bytes() == b"next"
        program.kill()

    with_volume(tmp_path, body)
