"""FUSE programs that stop answering: they hold up only the users of their filesystem, and the hang can be ended.

Linux 6.18 aborts the FUSE connection first when the last mount of an ordinary FUSE filesystem goes. It does not send
FUSE_DESTROY, and it writes nothing back then, because the close(2) of each file has waited for that. So unmounting
blocks on other things: a path through a FUSE filesystem, or a FUSE program that is itself stuck in another FUSE
filesystem while it takes a request.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import subprocess
import time
from errno import ETIMEDOUT
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.e2e.conftest import RunBroker, containers, settle, wait_until
from tests.e2e.hostile import (
    O_PATH,
    Client,
    check_service,
    fuse_mounts,
    in_private_namespace,
    mount,
    mount_request,
    unmount,
    unmount_request,
)
from tests.e2e.test_sync_init import READY, FakeLibfuse319
from tests.lab.broker import PROXY, Broker
from tests.lab.commands import CommandFailed, run
from tests.lab.forked import ending_afterwards
from tests.lab.images import BUSYBOX, image_tag
from tests.lab.pace import SLOWNESS
from tests.lab.podman import Container, Volume
from tests.lab.programs import stopfs

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.e2e, pytest.mark.long]

MOUNTPOINT = "/home/user/mnt"
SOON = 2000 * SLOWNESS  # milliseconds, as promised for an unmount
REAPED = 5  # seconds, as promised for a dead mount
OPERATION = 2
SIZE = 1 << 17  # of a file, and the most that a FUSE program may read at once
CONFIGURATION = f"""\
hung_seconds = 1
dead_mounts_seconds = 1
[deadlines]
operation = {OPERATION}
sync_init = 3
"""


@pytest.fixture
def broker(run_broker: RunBroker) -> Iterator[Broker]:
    """A broker that checks its mounts often, and must have no stuck process when the test has ended."""
    broker = run_broker(CONFIGURATION)
    settle(broker)
    before = len(children_of_mounter(broker))
    yield broker
    wait_until(lambda: len(children_of_mounter(broker)) == before)
    assert blocked(broker) == []


def children_of_mounter(broker: Broker) -> list[psutil.Process]:
    return broker.mounter.children(recursive=True)


def blocked(broker: Broker) -> list[psutil.Process]:
    """Return the children of the mounter that not even SIGKILL ends."""
    found = []
    for child in children_of_mounter(broker):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [child] if child.status() == psutil.STATUS_DISK_SLEEP else []
    return found


def state(broker: Broker) -> str:
    (mount,) = broker.mounts()
    return str(mount["state"])


def named(container: Container, name: str) -> list[psutil.Process]:
    """Return the processes of a container with this name."""
    found = []
    for pid in container.processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended in the meantime
            process = psutil.Process(pid)
            if process.name() == name:
                found.append(process)
    return found


class Hung:
    """A container with a FUSE program that stops answering, and a user process that waits for it."""

    def __init__(self, container: Container, options: str, use: str) -> None:
        """Mount with these options of stopfs; run `use` in the mountpoint by a shell."""
        self.container = container
        self.program = container.start(["stopfs", "-f", "-o", options, MOUNTPOINT])
        wait_until(lambda: container.fuse_mounts(MOUNTPOINT))
        self.user = container.start(["sh", "-c", f"cd {MOUNTPOINT} && {use}"])

    def process(self) -> psutil.Process:
        (program,) = named(self.container, "stopfs")
        return program

    def end(self) -> str:
        """Kill the program; return the error output of the user process."""
        with contextlib.suppress(ValueError):
            self.process().kill()
        _, said = self.user.communicate(timeout=20)
        return said


HANGS = {
    "init": ("silent_at=init", "true"),
    "init, stopped": ("stop_at=init", "true"),
    "getattr": ("silent_at=getattr", "stat ."),
    "getattr, stopped": ("stop_at=getattr", "stat ."),
    "read": ("silent_at=read", "echo some > file; cat file"),
    "read, stopped": ("stop_at=read", "echo some > file; cat file"),
    "writeback": ("writeback,silent_at=write", "dd if=/dev/zero of=file bs=4k count=100"),
    "writeback, stopped": ("writeback,stop_at=write", "dd if=/dev/zero of=file bs=4k count=100"),
}


@pytest.fixture(params=list(HANGS.values()), ids=list(HANGS))
def hang(request: pytest.FixtureRequest) -> tuple[str, str]:
    options: tuple[str, str] = request.param
    return options


def stopfs_volume() -> Volume:
    return Volume(stopfs(), "/usr/bin/stopfs")


def test_what_hangs_is_called_so_and_can_be_ended_while_its_program_stays(
    broker: Broker, hang: tuple[str, str]
) -> None:
    with containers(broker) as start:
        hung = Hung(start(image_tag(BUSYBOX), volumes=(stopfs_volume(),)), *hang)
        wait_until(lambda: state(broker) == "hung")
        (mount,) = broker.mounts()
        assert mount["waiting"] > 0
        assert f"{mount['request_id']} hung " in broker.ask("mounts")
        assert broker.ask("abort", mount["request_id"]).startswith(f"aborted {mount['request_id']}: {MOUNTPOINT}")
        hung.user.communicate(timeout=20)
        wait_until(lambda: not hung.container.fuse_mounts(), REAPED)
        (record,) = broker.records("aborted a FUSE connection: an administrator asked for it")
        assert record["request_id"] == mount["request_id"]
        assert record["mountpoint"] == MOUNTPOINT
        hung.end()


@pytest.mark.parametrize("user", [None, "1000:1000"])
@pytest.mark.parametrize("user_namespace", [False, True])
def test_whoever_has_mounted_it_can_be_ended(broker: Broker, user: str | None, user_namespace: bool) -> None:
    with containers(broker) as start:
        volumes = (stopfs_volume(),)
        container = start(image_tag(BUSYBOX), user=user, user_namespace=user_namespace, volumes=volumes)
        hung = Hung(container, *HANGS["getattr"])
        wait_until(lambda: state(broker) == "hung")
        broker.ask("abort", broker.mounts()[0]["request_id"])
        wait_until(lambda: not container.fuse_mounts(), REAPED)
        hung.end()


@pytest.mark.parametrize("flags", ["-u", "-uz"])
def test_the_answer_to_an_unmount_comes_soon(broker: Broker, hang: tuple[str, str], flags: str) -> None:
    """The unmount is refused while a process uses the mount, as by fusermount3; a lazy unmount is carried out."""
    with containers(broker) as start:
        container = start(image_tag(BUSYBOX), volumes=(stopfs_volume(),))
        hung = Hung(container, *hang)
        wait_until(lambda: state(broker) == "hung")
        result = container.exec(["fusermount3", flags, MOUNTPOINT], check=False)
        (record,) = [each for each in broker.records("unmount ") if each["message"] != "unmounted a dead mount"]
        assert record["milliseconds"] < SOON
        if flags == "-uz":
            assert (result.returncode, result.stderr) == (0, "")
            assert not container.fuse_mounts()
        else:
            assert "Device or resource busy" in result.stderr
        hung.end()
        wait_until(lambda: not container.fuse_mounts())


@pytest.mark.parametrize("operation", ["init", "destroy"])
@pytest.mark.parametrize("flags", ["-u", "-uz"])
def test_a_program_that_hangs_at_its_beginning_or_end_is_unmounted_soon(
    broker: Broker, operation: str, flags: str
) -> None:
    """No process uses the mount. The program reaches its end after the unmount, which does not wait for that."""
    with containers(broker) as start:
        container = start(image_tag(BUSYBOX), volumes=(stopfs_volume(),))
        hung = Hung(container, f"silent_at={operation}", "cd /")
        if operation == "destroy":
            hung.user.wait(timeout=20)
        else:
            hung.user.kill()
            for shell in named(container, "sh"):
                shell.kill()
        wait_until(lambda: container.exec(["fusermount3", flags, MOUNTPOINT], check=False).returncode == 0)
        assert broker.records("unmount unmounted")[0]["milliseconds"] < SOON
        assert not container.fuse_mounts()
        hung.end()


def test_a_lazy_unmount_loses_nothing_that_is_slowly_written_back(broker: Broker) -> None:
    """The writes come page by page; in total the program takes several times as long as a hung one is allowed."""
    with containers(broker) as start:
        container = start(image_tag(BUSYBOX), volumes=(stopfs_volume(),))
        writes = "dd if=/dev/zero of=file bs=64k count=128"
        slow = Hung(container, "writeback,delay_at=write,delay_ms=5", writes)
        wait_until(lambda: broker.mounts()[0]["waiting"] > 0)
        assert container.exec(["fusermount3", "-u", MOUNTPOINT], check=False).returncode == 1
        container.exec(["fusermount3", "-uz", MOUNTPOINT])
        slow.user.communicate(timeout=60)
        assert slow.user.returncode == 0
        written, _ = slow.program.communicate(timeout=20)
        assert int(written) == 128 * 64 * 1024
        assert broker.records("aborted") == []


def test_others_are_served_while_some_hang(broker: Broker) -> None:
    with containers(broker) as start:
        hung = [Hung(start(image_tag(BUSYBOX), volumes=(stopfs_volume(),)), *HANGS[name]) for name in ("init", "read")]
        wait_until(lambda: {each["state"] for each in broker.mounts()} == {"hung"})
        other = start(image_tag(BUSYBOX), user="1000:1000")
        for _ in range(5):
            assert other.exec(["whoamifs", "--probe", MOUNTPOINT]).stdout.splitlines()[-1] == "ok=yes"
        assert len(broker.mounts()) == len(hung)
        for each in hung:
            each.container.exec(["fusermount3", "-uz", MOUNTPOINT])
            each.end()


# abort ---------------------------------------------------------------------------------------------------------


def test_who_aborts_what_is_not_there_is_told(broker: Broker, tmp_path: Path) -> None:
    def body() -> None:
        device = mount(broker, tmp_path)
        (mounted,) = broker.mounts()
        os.close(device)
        unmount(broker, tmp_path)
        for wanted in ("0" * 16, mounted["request_id"]):
            with pytest.raises(CommandFailed, match=f"no live mount has the id '{wanted}'"):
                broker.ask("abort", wanted)

    in_private_namespace(body)


def test_an_id_may_be_cut_to_four_digits(broker: Broker, tmp_path: Path) -> None:
    """As long as no other begins so (`request_ids`); fewer may have become another mount's meanwhile."""

    def body() -> None:
        places = [tmp_path / f"{number}" for number in range(2)]
        for place in places:
            place.mkdir()
        devices = [mount(broker, place) for place in places]
        first, second = (each["request_id"] for each in broker.mounts())
        with pytest.raises(CommandFailed, match=f"'{first[:3]}' is too short"):
            broker.ask("abort", first[:3])
        assert len(broker.mounts()) == 2
        assert broker.ask("abort", first[:4]).startswith(f"aborted {first}: ")
        wait_until(lambda: [each["request_id"] for each in broker.mounts()] == [second])
        for device in devices:
            os.close(device)
        wait_until(lambda: not fuse_mounts())

    in_private_namespace(body)


# Where a child of the mounter blocks ---------------------------------------------------------------------------


@contextlib.contextmanager
def program(broker: Broker, place: Path, options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run stopfs at `place`, mounted through the broker in this mount namespace, until the block ends; then kill it."""
    run(["mount", "--bind", PROXY, "/usr/bin/fusermount3"])
    run(["mount", "--bind", "/dev/null", "/dev/fuse"])
    environment = {"FUSERMOUNT3PROXY_FDPASSING_SOCKPATH": str(broker.socket)}
    unprivileged = ["/usr/bin/setpriv", "--bounding-set", "-sys_admin"]  # otherwise libfuse would mount by itself
    process = subprocess.Popen(
        [*unprivileged, str(stopfs()), "-f", "-o", options, str(place)], env=environment, stdout=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: str(place) in [each.mountpoint for each in fuse_mounts()])
        (place / "file").write_bytes(bytes(SIZE))
        yield process
    finally:
        process.kill()
        process.wait()


def place_in(directory: Path, name: str) -> Path:
    path = directory / name
    path.mkdir()
    return path


@pytest.mark.parametrize("lazy", [False, True])
def test_an_unmount_inside_a_filesystem_that_hangs_ends(broker: Broker, tmp_path: Path, lazy: bool) -> None:
    outer = place_in(tmp_path, "outer")

    def body() -> None:
        with program(broker, outer, "later,silent_at=lookup") as hangs:
            device = mount(broker, outer / "file")
            directory = os.open(outer, O_PATH)
            hangs.send_signal(signal.SIGUSR1)
            with Client(broker) as client:
                client.send(unmount_request(outer / "file", lazy=lazy), directory)
                errno, text = client.refused()
            assert errno == ETIMEDOUT, text
            check_service(broker, place_in(tmp_path, "other"))
            wait_until(lambda: broker.records("aborted a FUSE connection: its FUSE program hangs"))
            wait_until(lambda: blocked(broker) == [])
            os.close(device)
        wait_until(lambda: not fuse_mounts())

    in_private_namespace(body)


@pytest.mark.parametrize("sync_init", [False, True])
def test_a_mount_on_a_filesystem_that_hangs_ends(broker: Broker, tmp_path: Path, sync_init: bool) -> None:
    outer = place_in(tmp_path, "outer")

    def body() -> None:
        with program(broker, outer, "later,silent_at=getattr") as hangs:
            mountpoint = os.open(outer / "file", O_PATH)
            hangs.send_signal(signal.SIGUSR1)
            with Client(broker) as client:
                client.send(mount_request(outer / "file", sync_init=sync_init), mountpoint)
                errno, text = client.refused()
            assert errno == ETIMEDOUT, text
            wait_until(lambda: broker.records("aborted a FUSE connection: its FUSE program hangs"))
            wait_until(lambda: blocked(broker) == [])
        wait_until(lambda: not fuse_mounts())

    in_private_namespace(body)


def test_a_slow_filesystem_around_the_mountpoint_is_not_aborted(run_broker: RunBroker, tmp_path: Path) -> None:
    """It takes longer for one answer than the time in which a hung one must make progress."""
    broker = run_broker("dead_mounts_seconds = 1\ndeadlines.operation = 10")
    outer = place_in(tmp_path, "outer")

    def body() -> None:
        with program(broker, outer, "later,delay_at=lookup,delay_ms=1300") as slow:
            device = mount(broker, outer / "file")
            slow.send_signal(signal.SIGUSR1)
            os.close(device)
            unmount(broker, outer / "file")
            assert broker.records("aborted") == []
            assert (outer / "file").stat().st_size == SIZE
        wait_until(lambda: not fuse_mounts())

    in_private_namespace(body)


def test_a_filesystem_that_is_not_of_the_broker_is_not_aborted(broker: Broker, tmp_path: Path) -> None:
    """The broker waits for the child that blocks on it, and serves all other callers."""
    outer = place_in(tmp_path, "outer")

    def body() -> None:
        process = subprocess.Popen([stopfs(), "-f", "-o", "later,silent_at=getattr", outer], stdout=subprocess.DEVNULL)
        wait_until(fuse_mounts)
        (outer / "file").touch()
        mountpoint = os.open(outer / "file", O_PATH)
        process.send_signal(signal.SIGUSR1)
        with Client(broker) as client:
            client.send(mount_request(outer / "file"), mountpoint)
            errno, text = client.refused()
        assert errno == ETIMEDOUT, text
        time.sleep(2)
        wait_until(lambda: len(blocked(broker)) == 1)
        check_service(broker, place_in(tmp_path, "other"))
        assert broker.records("aborted") == []
        process.kill()
        process.wait()
        wait_until(lambda: blocked(broker) == [])
        run(["umount", "--lazy", outer])

    in_private_namespace(body)


@pytest.mark.parametrize("lazy", [False, True])
def test_an_unmount_that_blocks_in_the_kernel_has_the_connection_aborted_soon(
    broker: Broker, tmp_path: Path, lazy: bool
) -> None:
    """The program of `first` reads its requests into memory mapped from a file of `second`, which hangs. So the kernel
    can't end the requests of `first` until `second` is aborted too."""
    first, second = place_in(tmp_path, "first"), place_in(tmp_path, "second")

    def take_requests(device: int) -> None:
        with (second / "file").open("r+b") as file:
            memory = mmap.mmap(file.fileno(), SIZE)
        ctypes.CDLL(None).read(device, ctypes.byref(ctypes.c_char.from_buffer(memory)), SIZE)

    def body() -> None:
        with program(broker, second, "silent_at=read"):
            device = mount(broker, first)
            if (taker := os.fork()) == 0:
                with ending_afterwards():
                    take_requests(device)
            os.close(device)
            wait_until(lambda: psutil.Process(taker).status() == psutil.STATUS_DISK_SLEEP)
            with Client(broker) as client:
                begun = time.monotonic()
                client.send(unmount_request(first, lazy=lazy), os.open(tmp_path, O_PATH))
                wait_until(lambda: broker.records("aborted a FUSE connection: its FUSE program hangs"))
                assert 1000 * (time.monotonic() - begun) < SOON
                check_service(broker, place_in(tmp_path, "other"))
                assert client.refused()[0] == ETIMEDOUT
            wait_until(lambda: len(blocked(broker)) == 1)
            ids = {each["mountpoint"]: each["request_id"] for each in broker.mounts()}
            broker.ask("abort", ids[str(second)])
            os.waitpid(taker, 0)
            wait_until(lambda: blocked(broker) == [])
        wait_until(lambda: not fuse_mounts())

    in_private_namespace(body)


# Under --sync-init ---------------------------------------------------------------------------------------------


def answer_nothing(program: FakeLibfuse319) -> None:
    """Make the fake libfuse take FUSE_INIT without answering."""
    assert program.wait_for_init(), "this kernel waits for no FUSE_INIT"
    program.comm.send(READY)
    wait_until(lambda: take(program.descriptor))


def take(device: int) -> bytes:
    try:
        return os.read(device, 65536)
    except PermissionError:  # not mounted yet
        return b""


def test_a_mount_that_waits_for_a_program_ends_with_its_caller(broker: Broker, tmp_path: Path) -> None:
    def body() -> None:
        waiting = FakeLibfuse319(broker, tmp_path)
        answer_nothing(waiting)
        before = children_of_mounter(broker)
        waiting.helper.kill()
        wait_until(lambda: not blocked(broker) and len(children_of_mounter(broker)) < len(before), SOON / 1000)
        assert not fuse_mounts()
        waiting.end()

    in_private_namespace(body)


def test_a_mount_that_waits_for_a_program_is_given_up_in_time(broker: Broker, tmp_path: Path) -> None:
    def body() -> None:
        waiting = FakeLibfuse319(broker, tmp_path)
        answer_nothing(waiting)
        _, said = waiting.helper.communicate(timeout=20)
        assert "Connection timed out" in said
        assert blocked(broker) == []
        assert not fuse_mounts()
        waiting.comm.close()
        os.close(waiting.descriptor)

    in_private_namespace(body)
