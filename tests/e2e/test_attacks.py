"""Attacks on the broker: unmount the filesystem of another user, get a device or a descriptor of the broker, keep the
broker from serving others. Each test is one attempt, and its name states what the attacker does not achieve."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import select
import signal
import socket
import stat
import struct
import subprocess
import threading
import time
from errno import EBUSY, EEXIST, EINVAL, EOPNOTSUPP, EPERM
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.mounter import mount_tree
from fusermount3_proxy import wire
from fusermount3_proxy.wire import ProceedRequest
from tests.e2e.caller import COMM_FD, call_in
from tests.e2e.conftest import USER, containers, is_alive, make_mountpoint, nothing_left, settle, states, wait_until
from tests.e2e.hostile import (
    COMMIT,
    O_PATH,
    Client,
    check_service,
    fuse_mounts,
    in_private_namespace,
    in_process,
    mount,
    mount_request,
    slow,
    unmount,
    unmount_request,
    wait_for_mounts,
)
from tests.lab.broker import Broker
from tests.lab.commands import run
from tests.lab.forked import ending_afterwards
from tests.lab.images import BUSYBOX, image_tag
from tests.lab.kernel import kernel_has
from tests.lab.podman import RUNTIME, Container, mountinfo, namespace_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.conftest import RunBroker, Start

pytestmark = pytest.mark.e2e

DEADLINES = {"operation": 10, "commit": 10, "sync_init": 10}
AT_ONCE = 8
"""Seconds within which the broker serves an unhindered caller: less than any deadline."""


@pytest.fixture
def broker(impatient_broker: Broker) -> Iterator[Broker]:
    """A broker with short deadlines."""
    with nothing_left(impatient_broker):
        yield impatient_broker


@pytest.fixture
def place(users: Path) -> Path:
    """A mountpoint that `USER` owns."""
    return make_mountpoint(users, "mountpoint")


def become(uid: int) -> None:
    """Turn this process into one of user `uid` that other processes of the same user may inspect."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)


def enter_own_namespaces(uid: int) -> None:
    """Become a process of `USER` in its own user namespace, where the user is `uid`, and its own mount namespace."""
    become(USER)
    syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {USER} 1")
    Path("/proc/self/gid_map").write_text(f"{uid} {USER} 1")
    syscalls.mount(None, b"/", None, syscalls.MS_REC | syscalls.MS_PRIVATE, None)


@contextlib.contextmanager
def beside(body: Callable[[], object]) -> Iterator[int]:
    """Fork a process that runs `body` and then waits to be killed; yield its pid when `body` has returned."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        with ending_afterwards():
            os.close(reader)
            body()
            os.write(writer, b"done")
            os.close(writer)
            signal.pause()
    os.close(writer)
    try:
        assert os.read(reader, 16) == b"done"
        yield child
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Check that the block takes no longer than without an attack."""
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < AT_ONCE


# A FUSE program ------------------------------------------------------------------------------------------------

LOOKUP, FORGET, GETATTR, OPEN, STATFS, RELEASE, FLUSH, INIT, INTERRUPT, BATCH_FORGET = (
    1,
    2,
    3,
    14,
    17,
    18,
    25,
    26,
    36,
    42,
)
ROOT, FILE = 1, 2
ENOSYS = 38
HEADER = struct.Struct("=IIQQIIII")
INIT_REPLY = struct.pack("=IIIIHHIIHH28x", 7, 31, 65536, 0, 12, 9, 65536, 1, 0, 0)


class FuseProgram:
    """A FUSE program with one file, `file`, which it serves in a thread until the `with` block ends.

    It leaves the operations in `silent` unanswered, except for the first `spared` of them and those requested by this
    process itself. `asked` are the operations that other processes requested, `silenced` those of them left unanswered.
    """

    def __init__(self, device: int, silent: tuple[int, ...] = ()) -> None:
        self.silent = silent
        self.spared = 0
        self.asked: list[int] = []
        self.silenced: list[int] = []
        self._device = device
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> FuseProgram:
        os.set_blocking(self._device, False)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._stopped)
        self._thread.join(timeout=10)
        os.close(self._device)
        os.close(self._stop)

    def _serve(self) -> None:
        ready = select.poll()
        ready.register(self._device, select.POLLIN)
        ready.register(self._stop, 0)
        while all(descriptor == self._device for descriptor, _ in ready.poll()):
            try:
                request = os.read(self._device, 1 << 20)
            except BlockingIOError:
                continue
            except OSError:  # unmounted
                return
            self._answer(request)

    def _answer(self, request: bytes) -> None:
        _, operation, unique, node, _, _, asker, _ = HEADER.unpack_from(request)
        if asker != os.getpid() and operation not in (INIT, FORGET, BATCH_FORGET, INTERRUPT):
            self.asked.append(operation)
            if operation in self.silent and self.spared == 0:
                self.silenced.append(operation)
                return
            self.spared -= operation in self.silent
        answers = {
            INIT: INIT_REPLY,
            LOOKUP: struct.pack("=QQQQII", FILE, 0, 0, 0, 0, 0) + attributes(FILE),
            GETATTR: struct.pack("=QII", 0, 0, 0) + attributes(node),
            OPEN: struct.pack("=QII", 0, 0, 0),
            STATFS: struct.pack("=QQQQQIIII24x", 1, 1, 1, 1, 1, 4096, 255, 4096, 0),
            RELEASE: b"",
            FLUSH: b"",
        }
        if operation in (FORGET, BATCH_FORGET, INTERRUPT):
            return
        body = answers.get(operation, b"")
        error = 0 if operation in answers else -ENOSYS
        with contextlib.suppress(OSError):  # no process waits for the answer any more
            os.write(self._device, struct.pack("=IiQ", 16 + len(body), error, unique) + body)


def attributes(node: int) -> bytes:
    mode = stat.S_IFDIR | 0o777 if node == ROOT else stat.S_IFREG | 0o666
    return struct.pack("=QQQQQQIIIIIIIIII", node, 10, 1, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


# Unmounting filesystems of others ------------------------------------------------------------------------------

LOOP_SET_FD, LOOP_CLR_FD, LOOP_CTL_ADD, LOOP_CTL_REMOVE = 0x4C00, 0x4C01, 0x4C80, 0x4C81


@contextlib.contextmanager
def loop_device(number: int, image: Path, node: Path) -> Iterator[bool]:
    """Make `node` the loop device of that number. Yield True, or False if there already is such a device."""
    with Path("/dev/loop-control").open() as control:
        try:
            fcntl.ioctl(control, LOOP_CTL_ADD, number)
        except OSError as error:
            assert error.errno == EEXIST
            yield False
            return
        try:
            os.mknod(node, stat.S_IFBLK | 0o600, os.makedev(7, number))
            with node.open("r+b", buffering=0) as device, image.open("r+b") as file:
                fcntl.ioctl(device, LOOP_SET_FD, file.fileno())
                try:
                    yield True
                finally:
                    fcntl.ioctl(device, LOOP_CLR_FD, 0)
        finally:
            wait_until(lambda: has_removed_loop_device(control.fileno(), number))


def has_removed_loop_device(control: int, number: int) -> bool:
    try:
        fcntl.ioctl(control, LOOP_CTL_REMOVE, number)
    except OSError as error:
        assert error.errno == EBUSY
        return False
    return True


def test_a_block_device_filesystem_with_the_same_minor_number_is_not_unmounted(broker: Broker, users: Path) -> None:
    def attempt(number: int) -> bool:
        """Return whether a loop device could be made with the minor number of a new mount of the user. The mount stays
        while further ones are tried."""
        own = make_mountpoint(users, f"own{number}")
        device = mount(broker, own, uid=USER)
        minor = next(int(each.device.partition(":")[2]) for each in mountinfo() if each.mountpoint == str(own))
        with loop_device(minor, users / "image", users / f"loop{minor}") as made:
            if made:
                run(["mount", "-t", "ext4", users / f"loop{minor}", users / "roots"])
                try:
                    refuse()
                finally:
                    run(["umount", users / "roots"], check=False)
        done = made or (number < 50 and attempt(number + 1))
        os.close(device)
        unmount(broker, own, uid=USER)
        return done

    def refuse() -> None:
        for lazy in (False, True):
            with Client(broker, USER) as client:
                client.send(unmount_request(users / "roots", lazy=lazy), os.open(users, O_PATH))
                assert client.refused() == (EPERM, f"entry for {users}/roots not found in /etc/mtab")
        assert (users / "roots/lost+found").is_dir()

    def body() -> None:
        run(["mount", "-t", "tmpfs", "tmpfs", users])  # a filesystem where devices may be opened
        (users / "roots").mkdir()
        with (users / "image").open("wb") as image:
            image.truncate(16 << 20)
        run(["mkfs.ext4", "-q", users / "image"])
        assert attempt(0)

    in_private_namespace(body)


@pytest.mark.parametrize("what", [["tmpfs", "tmpfs", "-o", "ro"], ["proc", "proc"]], ids=["a tmpfs", "proc"])
@pytest.mark.parametrize("when", ["before", "while the program gets ready"])
def test_what_came_to_lie_on_the_mountpoint_is_not_mounted_over(
    when: str, what: list[str], broker: Broker, place: Path
) -> None:
    def body() -> None:
        pinned = os.open(place, O_PATH)
        with Client(broker, USER) as client:
            if when == "before":
                cover()
                client.send(mount_request(place), pinned)
            else:
                client.send(mount_request(place, sync_init=True), pinned)
                assert (reply := client.reply()) is not None
                assert reply.errno == 0, reply.text
                cover()
                client.send(wire.encode_request(ProceedRequest()))
            assert client.refused() == (EBUSY, "mount failed: Device or resource busy")
            assert [mount.fstype for mount in mountinfo() if mount.mountpoint == str(place)] == what[:1]
            assert fuse_mounts() == []
        run(["umount", "--lazy", place])
        check_service(broker, place)

    def cover() -> None:
        run(["mount", "-t", *what, place])

    in_private_namespace(body)


def test_a_dead_mount_that_was_made_for_root_is_not_roots_to_take_away(broker: Broker, place: Path) -> None:
    """A volume whose FUSE program may return soon, in a container whose root may not unmount by itself."""

    def body() -> None:
        device = os.open("/dev/fuse", os.O_RDWR)
        data = b"fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other" % device
        syscalls.mount(b"volume", bytes(place), b"fuse.volume", 0, data)
        os.close(device)

        in_process(without_capabilities)
        assert [mount.source for mount in fuse_mounts()] == ["volume"]

        with Client(broker) as client:
            client.send(unmount_request(place, only_dead=True), os.open(place.parent, O_PATH))
            assert (reply := client.reply()) is not None
            assert reply.errno == 0, reply.text

    def without_capabilities() -> None:
        directory = os.open(place.parent, O_PATH)
        syscalls.capset()
        with Client(broker) as client:
            client.send(unmount_request(place, only_dead=True), directory)
            assert client.refused() == (EPERM, f"{place} is not the mount that was watched")

    in_private_namespace(body)


def test_a_user_who_touches_its_connection_in_fusectl_keeps_the_right_to_unmount(
    broker: Broker, place: Path, tmp_path: Path
) -> None:
    (tmp_path / "fusectl").mkdir()

    def body() -> None:
        run(["mount", "-t", "fusectl", "fusectl", tmp_path / "fusectl"])
        device = mount(broker, place, uid=USER)
        number = next(each.device.partition(":")[2] for each in mountinfo() if each.mountpoint == str(place))
        connection = tmp_path / "fusectl" / number
        in_process(lambda: touch(connection))
        assert [mount["mountpoint"] for mount in broker.mounts()] == [str(place)]
        os.close(device)
        unmount(broker, place, uid=USER)

    def touch(connection: Path) -> None:
        become(USER)
        connection.chmod(0o700)

    in_private_namespace(body)


RENAME_EXCHANGE = 2


def test_a_lazy_unmount_takes_what_was_looked_at_although_names_are_exchanged(
    run_broker: RunBroker, users: Path, tmp_path: Path
) -> None:
    """The attacker exchanges the names in another mount namespace, where nothing is mounted on them."""
    broker = run_broker()
    own, roots = make_mountpoint(users, "own"), make_mountpoint(users, "roots")
    libc = ctypes.CDLL(None, use_errno=True)

    def exchange() -> None:
        done = libc.renameat2(syscalls.AT_FDCWD, bytes(own), syscalls.AT_FDCWD, bytes(roots), RENAME_EXCHANGE)
        assert done == 0, os.strerror(ctypes.get_errno())

    def elsewhere() -> None:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        signal.signal(signal.SIGUSR1, lambda *_: exchange())

    def body() -> None:
        with beside(elsewhere) as other:
            run(["mount", "-t", "tmpfs", "roots", roots])
            os.close(mount(broker, own, uid=USER))
            trace = tmp_path / "trace"
            with slow(broker, "umount2", 3, trace), Client(broker, USER) as client:
                changed = users.stat().st_ctime_ns
                client.send(unmount_request(own, lazy=True), os.open(users, O_PATH))
                wait_until(lambda: "umount2(" in trace.read_text())  # it has looked, and has not unmounted yet
                os.kill(other, signal.SIGUSR1)
                wait_until(lambda: users.stat().st_ctime_ns != changed)
                assert fuse_mounts(), "the names were exchanged too late"
                assert (reply := client.reply()) is not None
                assert reply.errno == 0, reply.text
            assert fuse_mounts() == []
            assert "roots" in [mount.source for mount in mountinfo()]

    in_private_namespace(body)


# Mounting where it is forbidden --------------------------------------------------------------------------------


def test_a_caller_that_changes_its_namespaces_between_two_looks_gets_nothing(
    run_broker: RunBroker, users: Path, tmp_path: Path
) -> None:
    """If root of another user namespace got a filesystem of the host's user namespace, it could clear nosuid and
    nodev."""
    broker = run_broker("[deadlines]\noperation = 30")
    settle(broker)
    # Each join of a namespace is delayed. The callers come one after the other, and move before one join more each.
    late, moves = 1.0, range(4)
    trace = tmp_path / "trace"

    def joins(seen: int) -> int:
        """Return how many joins of the child that looks at the caller are in the trace after `seen` characters.

        It is the one that joins the pid namespace; another one makes the superblock, and joins namespaces beside it.
        """
        new = trace.read_text()[seen:]
        child = re.search(r"^(\d+) +setns\(\d+, CLONE_NEWPID", new, re.MULTILINE)
        return len(re.findall(rf"^{child[1]} +setns\(", new, re.MULTILINE)) if child else 0

    def own_namespaces() -> None:
        enter_own_namespaces(0)
        run(["mount", "-t", "tmpfs", "tmpfs", users])
        for number in moves:
            (users / str(number)).mkdir()

    def moving(number: int, into: int, results: int) -> None:
        namespaces = os.pidfd_open(into)
        pinned = os.open(f"/proc/{into}/root{users}/{number}", O_PATH)
        with Client(broker, USER) as client:
            become(USER)
            seen = len(trace.read_text())
            client.send(mount_request(users), pinned)
            wait_until(lambda: joins(seen) >= number)  # of these joins, the last one is still delayed
            syscalls.setns(namespaces, syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
            reply = client.reply()
            assert reply is not None
            if reply.errno == 0:
                client.send(COMMIT)
                assert client.reply() is None
            os.write(results, bytes([reply.errno]))

    def body() -> None:
        ours, theirs = os.pipe()
        with beside(own_namespaces) as into, slow(broker, "setns", late, trace):
            for number in moves:
                in_process(partial(moving, number, into, theirs))
            got = os.read(ours, len(moves))
            assert len(got) == len(moves)
            assert EPERM in got, "nobody moved in between"
            # The kernel shows user_id as mapped in the filesystem's user namespace.
            mounts = [mount for mount in mountinfo(into) if mount.is_fuse]
            assert len(mounts) == got.count(0)
            assert all("user_id=0" in mount.super_options for mount in mounts)
        wait_until(lambda: broker.mounts() == [])

    in_private_namespace(body)


@pytest.mark.parametrize("sync_init", [False, True], ids=["before its program", "after its program"])
def test_a_mountpoint_in_no_namespace_is_refused(sync_init: bool, broker: Broker, place: Path) -> None:
    """A mount there would come along when the user attaches the mountpoint's filesystem, in any namespace."""

    def body() -> None:
        context = syscalls.fsopen(b"tmpfs", syscalls.FSOPEN_CLOEXEC)
        syscalls.fsconfig(context, syscalls.FSCONFIG_CMD_CREATE, None, None, 0)
        detached = syscalls.fsmount(context, syscalls.FSMOUNT_CLOEXEC, 0)
        os.mkdir("mountpoint", dir_fd=detached)
        with Client(broker) as client:
            pinned = os.open("mountpoint", O_PATH, dir_fd=detached)
            client.send(mount_request(place, sync_init=sync_init), pinned)
            reply = client.reply()
            if reply is not None and reply.errno == 0 and sync_init:
                client.send(wire.encode_request(ProceedRequest()))
                reply = client.reply()
            assert reply is not None
            assert reply.errno in (EBUSY, EINVAL)  # older kernels refuse it themselves
            syscalls.move_mount(detached, b"", syscalls.AT_FDCWD, bytes(place), syscalls.MOVE_MOUNT_F_EMPTY_PATH)
            os.close(detached)
            assert [mount.mountpoint for mount in mountinfo() if mount.is_fuse] == []
        run(["umount", "--lazy", place])
        check_service(broker, place)

    in_private_namespace(body)


def test_what_belongs_to_somebody_without_a_uid_here_is_not_the_overflow_users(broker: Broker, users: Path) -> None:
    roots = make_mountpoint(users, "roots", 0)
    roots.chmod(0o1777)

    def body() -> None:
        with Client(broker, USER) as client:
            enter_own_namespaces(65534)
            assert roots.stat().st_uid == os.getuid() == 65534
            client.send(mount_request(roots), os.open(roots, O_PATH))
            assert client.refused() == (EPERM, f"mountpoint {roots} not owned by user")
        assert fuse_mounts() == []

    in_process(body)


def test_mount_max_holds_for_requests_at_once(run_broker: RunBroker, users: Path) -> None:
    most = 3
    broker = run_broker(f"mount_max = {most}")
    places = [make_mountpoint(users, str(number)) for number in range(30)]

    def body() -> None:
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(Client(broker, USER)) for _ in places]
            for client, place in zip(clients, places, strict=True):
                client.send(mount_request(place), os.open(place, O_PATH))
            replies = [client.reply() for client in clients]
            for client, reply in zip(clients, replies, strict=True):
                if reply is not None and reply.errno == 0:
                    client.send(COMMIT)
                    assert client.reply() is None
            assert len(fuse_mounts()) <= most
            said = {reply.text for reply in replies if reply is not None and reply.errno}
            assert said == {f"too many FUSE filesystems mounted; mount_max=N can be set in {broker.config}".encode()}
        for mounted in fuse_mounts():
            unmount(broker, Path(mounted.mountpoint), uid=USER)
        devices = [mount(broker, place, uid=USER) for place in places[:most]]
        for device, place in zip(devices, places[:most], strict=True):
            os.close(device)
            unmount(broker, place, uid=USER)

    in_private_namespace(body)


@pytest.mark.parametrize("path", ["/", "/dev"])
@pytest.mark.parametrize("user_namespace", [False, True], ids=["", "in a user namespace"])
def test_the_root_of_a_container_hides_neither_proc_nor_devices_from_who_starts_a_program_there(
    path: str, user_namespace: bool, start: Start
) -> None:
    """The privileged exec of a container engine writes to /proc/self/attr there and opens a terminal in /dev/pts."""
    container = start(image_tag(BUSYBOX), user_namespace=user_namespace)
    outcome = call_in(container, ["fusermount3", path])
    assert outcome.stderr.splitlines()[0] == "fusermount3: mount failed: Operation not permitted"
    assert outcome.descriptor is None
    assert container.fuse_mounts() == []


# Getting devices and the broker's own resources ----------------------------------------------------------------

IN_OPEN = 0x20


class Watch:
    """A watch on a file (inotify(7)): true if any process has opened it since. Opening with O_PATH does not count."""

    def __init__(self, path: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        assert libc.inotify_add_watch(self._descriptor, bytes(path), IN_OPEN) >= 0

    def __bool__(self) -> bool:
        try:
            return bool(os.read(self._descriptor, 4096))
        except BlockingIOError:
            return False


@pytest.mark.parametrize("kind", [stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFREG])
def test_only_dead_opens_no_device(kind: int, broker: Broker, users: Path) -> None:
    """The broker may use devices that are forbidden to the container, which may have made the node."""

    def body() -> None:
        run(["mount", "-t", "tmpfs", "tmpfs", users])  # a filesystem where devices may be opened
        node = users / "node"
        os.mknod(node, kind | 0o666, {stat.S_IFCHR: os.makedev(1, 3), stat.S_IFBLK: os.makedev(7, 0)}.get(kind, 0))
        opened = Watch(node)
        with Client(broker) as client:
            client.send(unmount_request(node, only_dead=True), os.open(users, O_PATH))
            assert client.refused() == (EBUSY, f"{node} is no dead mount")
        assert not opened
        if kind == stat.S_IFREG:
            node.read_bytes()
            assert opened

    in_private_namespace(body)


def test_only_dead_opens_no_file_of_a_living_filesystem(broker: Broker, place: Path) -> None:
    def body() -> None:
        with FuseProgram(mount(broker, place), silent=(OPEN, FLUSH)) as program:
            with Client(broker) as client, at_once():
                client.send(unmount_request(place / "file", only_dead=True), os.open(place, O_PATH))
                assert client.refused() == (EBUSY, f"{place}/file is no dead mount")
            assert LOOKUP in program.asked
            assert program.silenced == []
        unmount(broker, place, lazy=True)

    in_private_namespace(body)


def test_root_of_a_container_cannot_change_the_device_node_of_others(start: Start) -> None:
    first = start(image_tag(BUSYBOX))
    second = start(image_tag(BUSYBOX), user_namespace=True)
    outcome = call_in(first, ["fusermount3", "/mnt"])
    assert outcome.descriptor is not None
    mode = os.fstat(outcome.descriptor).st_mode
    with contextlib.suppress(OSError):
        os.fchmod(outcome.descriptor, 0)
    try:
        others = call_in(second, ["fusermount3", "/mnt"])
        assert (others.status, others.stderr) == (0, "")
        others.close()
        second.exec(["fusermount3", "-u", "/mnt"])
    finally:
        with contextlib.suppress(OSError):
            os.fchmod(outcome.descriptor, mode)
        outcome.close()
        first.exec(["fusermount3", "-u", "/mnt"])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_user_cannot_send_signals_to_the_mounters_children(
    number: signal.Signals, broker: Broker, place: Path
) -> None:
    """A killed child would not remove an uncommitted mount; a stopped one would never end."""
    mounter = broker.mounter

    def attack() -> None:
        with Client(broker, USER) as client:
            client.send(mount_request(place), os.open(place, O_PATH))
            assert (reply := client.reply()) is not None
            assert reply.errno == 0, reply.text
            family = mounter.children(recursive=True)
            assert family
            become(USER)
            for child in family:
                with contextlib.suppress(PermissionError, ProcessLookupError):
                    os.kill(child.pid, number)

    def body() -> None:
        try:
            in_process(attack)
            wait_for_mounts([])
            assert psutil.STATUS_STOPPED not in states(mounter.children())
        finally:
            for child in mounter.children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.send_signal(signal.SIGCONT)
        check_service(broker, place)

    in_private_namespace(body)


FUSE_DEV_IOC_SYNC_INIT = 229 << 8 | 3


@pytest.mark.parametrize("user_namespace", [False, True])
def test_a_container_sees_no_descriptors_in_a_child_of_the_mounter(
    start: Start, broker: Broker, user_namespace: bool
) -> None:
    """The process that creates the filesystem is in the PID namespace of the container, for as long as the FUSE program
    chooses."""
    container = start(image_tag(BUSYBOX), user_namespace=user_namespace)
    with waiting_mount(container):
        (child,) = mounters_children_in(container, broker)
        process = Path(f"/proc/{child}")
        assert {path.readlink() for path in (process / "fd").iterdir()} == {
            Path("/dev/fuse"),
            Path("anon_inode:[fscontext]"),
        }
        status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines())
        assert int(status["CapPrm"], 16) == 1 << syscalls.CAP_SYS_ADMIN
        assert status["Seccomp"] == "2"  # test_superblock_creator.py tests which system calls remain
        number = status["NSpid"].split()[-1]
        for secret in ("cwd", "root", f"fd/{next((process / 'fd').iterdir()).name}"):
            assert container.exec(["readlink", f"/proc/{number}/{secret}"], check=False).returncode != 0


@pytest.mark.parametrize("user_namespace", [False, True])
def test_who_may_trace_processes_among_a_containers_finds_nothing_of_the_broker(
    start: Start, broker: Broker, user_namespace: bool
) -> None:
    """Such as a debugger that shares the caller's namespaces. It can take over what it sees: so nothing is there."""
    container = start(image_tag(BUSYBOX), user_namespace=user_namespace)
    spaces = ["--user"] if user_namespace else []
    neighbour = ["nsenter", f"--target={container.pid}", *spaces, "--pid", "--mount"]
    with waiting_mount(container):
        (child,) = mounters_children_in(container, broker)
        process = (
            f"/proc/{Path(f'/proc/{child}/status').read_text().partition('NSpid:')[2].splitlines()[0].split()[-1]}"
        )

        def shown(*command: str) -> str:
            return run([*neighbour, *command]).stdout.strip()

        assert shown("readlink", f"{process}/cwd") == "/"
        assert shown("readlink", f"{process}/exe") == "/superblock_creator"
        assert shown("cat", f"{process}/environ") == ""
        assert shown("grep", "Seccomp:", f"{process}/status").split() == ["Seccomp:", "2"]
        program = os.open(f"/proc/{child}/exe", os.O_PATH)
    with pytest.raises(OSError, match="Read-only file system"):
        os.open(f"/proc/self/fd/{program}", os.O_RDWR)
    os.close(program)


@pytest.mark.parametrize("user_namespace", [False, True])
def test_a_container_that_may_trace_processes_sees_no_child_of_the_mounter(
    broker: Broker, user_namespace: bool
) -> None:
    with containers(broker) as start:
        extra = ("--cap-add", "SYS_PTRACE")
        container = start(image_tag(BUSYBOX), user_namespace=user_namespace, extra=extra)
        with waiting_mount(container):
            assert mounters_children_in(container, broker) == []


def test_who_gets_hold_of_what_a_filesystem_is_created_from_gets_none(
    run_broker: RunBroker, place: Path, tmp_path: Path
) -> None:
    """The caller has dropped CAP_SYS_PTRACE from its bounding set only; any neighbour may do the same."""
    broker = run_broker("[deadlines]\noperation = 30")
    settle(broker)

    def attack() -> None:
        syscalls.prctl(syscalls.PR_CAPBSET_DROP, syscalls.CAP_SYS_PTRACE)
        own = Path("/proc/self").resolve()  # with the pid on the host
        with Client(broker) as client:
            client.send(mount_request(place), os.open(place, O_PATH))
            child = wait_for(lambda: in_pid_namespace_of(own, broker))
            context = take_context(child)
            syscalls.fsconfig(context, syscalls.FSCONFIG_SET_FLAG, b"allow_other", None, 0)
            os.close(context)
            assert client.refused() == (EPERM, "mount failed: Operation not permitted")

    def body() -> None:
        with slow(broker, "fsconfig", 1, tmp_path / "trace"):  # gives the attacker time to find the child
            syscalls.unshare(syscalls.CLONE_NEWPID)
            in_process(attack)
        wait_for_mounts([])

    in_private_namespace(body)


def wait_for(find: Callable[[], list[int]]) -> int:
    """Wait until `find` returns something; return the first item."""
    found: list[int] = []

    def looks() -> bool:
        found[:] = find()
        return bool(found)

    wait_until(looks)
    return found[0]


def in_pid_namespace_of(process: Path, broker: Broker) -> list[int]:
    """Return the pids of the mounter's children in the PID namespace of a process, as numbered in that namespace."""
    numbers: list[int] = []
    for child in broker.mounter.children(recursive=True):
        with contextlib.suppress(OSError):
            other = Path(f"/proc/{child.pid}")
            if (other / "ns/pid").readlink() == (process / "ns/pid").readlink():
                lines = (other / "status").read_text().splitlines()
                numbers += [int(line.split()[-1]) for line in lines if line.startswith("NSpid:")]
    return numbers


PIDFD_GETFD = 438


def take_context(pid: int) -> int:
    """Return a copy of the process's descriptor of the filesystem context. Raises AssertionError if it has none."""
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(pid)
    try:
        for number in range(100):
            taken = int(libc.syscall(PIDFD_GETFD, pidfd, number, 0))
            if taken >= 0 and "fscontext" in str(Path(f"/proc/self/fd/{taken}").readlink()):
                return taken
            if taken >= 0:
                os.close(taken)
    finally:
        os.close(pidfd)
    raise AssertionError("it has none")


FUSE_DEV_IOC_CLONE = 0x8004E500


def test_a_descriptor_that_was_made_another_of_a_live_connection_is_no_new_filesystem(
    broker: Broker, place: Path, users: Path
) -> None:
    """With --sync-init the caller has a descriptor that serves nothing yet. Without this refusal it could mount one
    filesystem any number of times, which counts once, and with the options of the caller that created it."""
    other = make_mountpoint(users, "other")

    def body() -> None:
        live = mount(broker, place, uid=USER)
        before = fuse_mounts()
        with Client(broker, USER) as client:
            client.send(mount_request(other, sync_init=True), os.open(other, O_PATH))
            assert (reply := client.reply()) is not None
            assert reply.errno == 0, reply.text
            fcntl.ioctl(client.devices[0], FUSE_DEV_IOC_CLONE, struct.pack("I", live))
            client.send(wire.encode_request(ProceedRequest()))
            number = EBUSY if kernel_has("FSCONFIG_CMD_CREATE_EXCL") else EOPNOTSUPP
            assert client.refused() == (number, f"mount failed: {os.strerror(number)}")
            assert fuse_mounts() == before
        os.close(live)
        unmount(broker, place, uid=USER)

    in_private_namespace(body)


@contextlib.contextmanager
def waiting_mount(container: Container) -> Iterator[None]:
    """Make the mount in the container wait, in the kernel, for a FUSE program that does not answer."""
    ours, theirs = socket.socketpair()
    ours.settimeout(20)
    with ours, theirs:
        preserve = ["--preserve-fds", "1"]
        helper = ["fusermount3", "--sync-init", "--comm-fd", str(COMM_FD), "-o", "rw", "--", "/mnt"]
        shell = ["bash", "-c", f'exec "$@" {COMM_FD}<&"$0"', str(theirs.fileno())]
        caller = subprocess.Popen(
            [*shell, "podman", *RUNTIME, "exec", *preserve, container.name, *helper],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        _, (device,), _, _ = socket.recv_fds(ours, 1, 1)
        try:
            fcntl.ioctl(device, FUSE_DEV_IOC_SYNC_INIT)
        except OSError:
            pytest.skip("this kernel's mount waits for no FUSE program")
        ours.send(b"\0")
        assert select.select([device], [], [], 20)[0], "the kernel asks for nothing"
        try:
            yield
        finally:
            os.close(device)
            ours.close()
            caller.wait(timeout=20)


def mounters_children_in(container: Container, broker: Broker) -> list[int]:
    """Return the host pids of the mounter's children that the container can see."""
    namespace = namespace_of(container.pid)
    return [child.pid for child in broker.mounter.children(recursive=True) if namespace_of(child.pid) == namespace]


# Keeping the broker from serving others ------------------------------------------------------------------------


@contextlib.contextmanager
def lingering_socket(_broker: Broker, _directory: Path) -> Iterator[int]:
    """A socket whose close waits for the other end to read data that it never reads."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        connection = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            connection.send(b"x" * 65536)
    connection.setblocking(True)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 30))
    with other:
        yield connection.detach()


@contextlib.contextmanager
def unflushed_file(broker: Broker, directory: Path) -> Iterator[int]:
    """A file whose close waits for a FUSE program that does not answer."""
    place = make_mountpoint(directory, "hung", 0)
    with FuseProgram(mount(broker, place), silent=(FLUSH,)) as program:
        yield os.open(place / "file", os.O_RDONLY)
        wait_until(lambda: {FLUSH, RELEASE} & {*program.asked})  # the receiver of the descriptor flushes it too
    unmount(broker, place, lazy=True)


@contextlib.contextmanager
def stopped(broker: Broker) -> Iterator[None]:
    """Suspend the front during the block, so that it sees all messages at once and is the last holder of their
    descriptors."""
    front = broker.front
    front.suspend()
    try:
        yield
    finally:
        front.resume()


def instead_of_a_mountpoint(client: Client, broker: Broker, place: Path, descriptor: int) -> None:
    with stopped(broker):
        client.send(mount_request(place), descriptor)


def beside_a_mountpoint(client: Client, broker: Broker, place: Path, descriptor: int) -> None:
    with stopped(broker):
        client.send(mount_request(place), os.open(place, O_PATH), descriptor)


def with_what_is_no_request(client: Client, broker: Broker, _place: Path, descriptor: int) -> None:
    with stopped(broker):
        client.send(b"noise", descriptor)


def behind_what_is_no_request(client: Client, broker: Broker, _place: Path, descriptor: int) -> None:
    with stopped(broker):
        client.send(b"noise")
        client.send(b"more", descriptor)


def instead_of_a_commit(client: Client, broker: Broker, place: Path, descriptor: int) -> None:
    client.send(mount_request(place), os.open(place, O_PATH))
    assert client.reply() is not None
    with stopped(broker):
        client.send(b"noise", descriptor)


def with_a_request_and_gone(client: Client, broker: Broker, place: Path, descriptor: int) -> None:
    with stopped(broker):
        client.send(mount_request(place), descriptor)
        client.socket.close()


SENT = (
    instead_of_a_mountpoint,
    beside_a_mountpoint,
    with_what_is_no_request,
    behind_what_is_no_request,
    instead_of_a_commit,
    with_a_request_and_gone,
)


@pytest.mark.parametrize("send", SENT, ids=lambda send: send.__name__)
@pytest.mark.parametrize("hanging", [lingering_socket, unflushed_file], ids=lambda hanging: hanging.__name__)
def test_a_descriptor_whose_close_hangs_holds_nobody_up(
    hanging: Callable[[Broker, Path], contextlib.AbstractContextManager[int]],
    send: Callable[[Client, Broker, Path, int], None],
    broker: Broker,
    users: Path,
    place: Path,
) -> None:
    def body() -> None:
        with hanging(broker, users) as descriptor, Client(broker, USER) as client:
            send(client, broker, make_mountpoint(users, "another"), descriptor)
            time.sleep(0.2)  # by now the broker is closing it
            with at_once():
                check_service(broker, place)

    in_private_namespace(body)


def test_what_is_said_when_a_rollback_has_ended_holds_nobody_up(
    run_broker: RunBroker, users: Path, place: Path, tmp_path: Path
) -> None:
    """By then the child of the mounter has ended, and the front has not closed its connection to the caller yet."""
    broker = run_broker()
    settle(broker)
    mounter = broker.mounter
    spares = mounter.children()

    def body() -> None:
        with lingering_socket(broker, users) as descriptor, Client(broker, USER) as client:
            trace = tmp_path / "trace"
            with slow(broker, "umount2", 0.5, trace):
                client.send(mount_request(place), os.open(place, O_PATH))
                assert client.reply() is not None
                client.send(b"noise")
                wait_until(lambda: "umount2(" in trace.read_text())  # by now the front waits for the rollback
                with stopped(broker):
                    wait_for_mounts([])
                    with contextlib.suppress(AssertionError):  # the child may also wait for the front
                        wait_until(lambda: any(not is_alive(spare.pid) for spare in spares), seconds=1)
                    client.send(b"more", descriptor)
            with at_once():
                check_service(broker, place)

    in_private_namespace(body)


def test_a_mount_that_was_made_unbindable_is_unmounted(broker: Broker, place: Path) -> None:
    def body() -> None:
        device = mount(broker, place)
        run(["mount", "--make-unbindable", place])
        unmount(broker, place)
        assert fuse_mounts() == []
        os.close(device)

    in_private_namespace(body)


def test_who_waits_until_a_mount_is_not_busy_any_more_has_no_lock(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mount_tree, "BUSY_MOMENT", 10)

    def body() -> None:
        run(["mount", "-t", "tmpfs", "none", place])
        busy = os.open(place, O_PATH)
        directory = os.open(place.parent, O_PATH)
        locks = os.memfd_create("locks")
        os.chdir("/proc")
        looked = mount_tree.look_up(directory, bytes(place.name, "ascii"))
        if (child := os.fork()) == 0:
            with ending_afterwards():
                os.close(busy)
                mount_tree.unmount(directory, bytes(place.name, "ascii"), looked, False, locks, 10)
        try:
            time.sleep(0.5)  # by now the child tries to unmount
            for _ in range(20):
                with mount_tree.alone(locks, [looked.mount_id], 5):
                    time.sleep(0.01)
        finally:
            os.close(busy)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    in_private_namespace(body)


def test_a_hung_lookup_of_one_user_does_not_hold_up_another(broker: Broker, users: Path, place: Path) -> None:
    hung = make_mountpoint(users, "hung", 0)

    def body() -> None:
        with FuseProgram(mount(broker, hung)) as program:
            inner = mount(broker, hung / "file")
            with Client(broker) as client:
                directory = os.open(hung, O_PATH)
                program.silent, program.spared = (LOOKUP,), 1  # the mounter acts after the second lookup
                client.send(unmount_request(hung / "file"), directory)
                wait_until(lambda: program.silenced)
                with at_once():
                    check_service(broker, place)
            program.silent = ()
            os.close(inner)
        run(["umount", "--lazy", hung])

    in_private_namespace(body)
