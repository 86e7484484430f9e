"""Invalid input: the broker answers each error of a caller with a refusal or by closing the connection. It mounts
nothing, leaks nothing, and serves the next caller."""

from __future__ import annotations

import os
import socket
import time
from errno import EBADMSG, EBUSY, EINVAL, EMSGSIZE, ENOENT, ENOTCONN, EOPNOTSUPP, EPERM, EPROTONOSUPPORT, ETIMEDOUT
from typing import TYPE_CHECKING

import pytest

from fusermount3_proxy import wire
from tests.e2e.caller import call_in
from tests.e2e.conftest import containers, nothing_left, wait_until
from tests.e2e.hostile import (
    COMMIT,
    O_PATH,
    Client,
    check_service,
    fuse_mounts,
    in_private_namespace,
    mount,
    mount_request,
    unmount,
    unmount_request,
    wait_for_mounts,
)
from tests.lab.broker import Broker
from tests.lab.forked import ending_afterwards
from tests.lab.images import BUSYBOX, image_tag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.e2e.conftest import RunBroker, Start

pytestmark = pytest.mark.e2e

DEADLINES = {"request": 1, "operation": 4, "commit": 4}


@pytest.fixture
def broker(impatient_broker: Broker) -> Iterator[Broker]:
    """A broker with short deadlines."""
    with nothing_left(impatient_broker):
        yield impatient_broker


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A mountpoint."""
    path = tmp_path / "mountpoint"
    path.mkdir()
    return path


# The contents of a record --------------------------------------------------------------------------------------

GOOD = b"protocol=1-1\0operation=mount\0mountpoint=/m\0options=\0"

BAD_RECORDS: dict[str, tuple[bytes, int, str]] = {
    "a single NUL": (b"\0", EBADMSG, "malformed field"),
    "no NUL at its end": (GOOD[:-1], EBADMSG, "does not end with a NUL byte"),
    "cut in a value": (GOOD[:20], EBADMSG, "does not end with a NUL byte"),
    "cut after the first field": (GOOD[:13], EBADMSG, "field 'operation' is missing"),
    "noise": (bytes(range(1, 256)) + b"\0", EBADMSG, "malformed field"),
    "a field without =": (GOOD + b"word\0", EBADMSG, "malformed field"),
    "a field without a name": (GOOD + b"=value\0", EBADMSG, "malformed field"),
    "a name in capitals": (GOOD + b"Name=value\0", EBADMSG, "malformed field"),
    "a name without end": (GOOD + b"n" * 33 + b"=value\0", EBADMSG, "malformed field"),
    "an empty field": (GOOD + b"\0", EBADMSG, "malformed field"),
    "too many fields": (GOOD + b"".join(b"f%d=\0" % n for n in range(33)), EBADMSG, "more than 32 fields"),
    "a field twice": (GOOD + b"options=ro\0", EBADMSG, "field 'options' given twice"),
    "no mountpoint": (b"protocol=1\0operation=mount\0", EBADMSG, "field 'mountpoint' is missing"),
    "no operation": (b"protocol=1\0mountpoint=/m\0", EBADMSG, "field 'operation' is missing"),
    "no version": (b"operation=mount\0mountpoint=/m\0", EBADMSG, "field 'protocol' is missing"),
    "an unknown operation": (b"protocol=1\0operation=chmod\0", EOPNOTSUPP, "unknown operation 'chmod'"),
    "an operation in capitals": (b"protocol=1\0operation=MOUNT\0", EOPNOTSUPP, "unknown operation 'MOUNT'"),
    "an empty operation": (b"protocol=1\0operation=\0", EOPNOTSUPP, "unknown operation ''"),
    "a newer version": (GOOD.replace(b"1-1", b"2-3"), EPROTONOSUPPORT, "versions 1 to 1 are supported"),
    "an older version": (GOOD.replace(b"1-1", b"0"), EPROTONOSUPPORT, "versions 1 to 1 are supported"),
    "no number as version": (GOOD.replace(b"1-1", b"one"), EBADMSG, "a number is malformed"),
    "a negative version": (GOOD.replace(b"1-1", b"-1"), EBADMSG, "a number is malformed"),
    "an endless version": (GOOD.replace(b"1-1", b"1" * 5000), EBADMSG, "a number is malformed"),
    "one byte too many": (GOOD.ljust(wire.MAX_MESSAGE, b"x") + b"\0", EMSGSIZE, "more than 65536 bytes"),
    "far too many bytes": (b"x" * 150_000, EMSGSIZE, "more than 65536 bytes"),
    "a name with a slash": (b"protocol=1\0operation=unmount\0mountpoint=/m\0name=a/b\0", EBADMSG, "'name' is not one"),
    "a name that is ..": (b"protocol=1\0operation=unmount\0mountpoint=/m\0name=..\0", EBADMSG, "'name' is not one"),
    "a name that is .": (b"protocol=1\0operation=unmount\0mountpoint=/m\0name=.\0", EBADMSG, "'name' is not one"),
    "an empty name": (b"protocol=1\0operation=unmount\0mountpoint=/m\0name=\0", EBADMSG, "'name' is not one"),
    "an absolute name": (b"protocol=1\0operation=unmount\0mountpoint=/m\0name=/m\0", EBADMSG, "'name' is not one"),
    "no name": (b"protocol=1\0operation=unmount\0mountpoint=/m\0", EBADMSG, "field 'name' is missing"),
    "lazy as a word": (
        b"protocol=1\0operation=unmount\0mountpoint=/m\0name=m\0lazy=yes\0",
        EBADMSG,
        "'lazy' is neither 0 nor 1",
    ),
}


@pytest.mark.parametrize("record, errno, text", BAD_RECORDS.values(), ids=BAD_RECORDS.keys())
def test_a_record_is_refused_that_has(record: bytes, errno: int, text: str, broker: Broker, place: Path) -> None:
    def body() -> None:
        with Client(broker) as client:
            client.send(record, os.open(place, O_PATH))
            said = client.refused()
            assert said[0] == errno
            assert said[1].startswith("bad request: ")
            assert text in said[1]
            assert client.reply() is None
        check_service(broker, place)

    in_private_namespace(body)


def test_an_empty_record_is_a_hang_up(broker: Broker, place: Path) -> None:
    def body() -> None:
        with Client(broker) as client:
            client.send(b"", os.open(place, O_PATH))
            assert client.reply() is None
        check_service(broker, place)

    in_private_namespace(body)


def test_a_field_that_is_not_known_is_ignored(broker: Broker, place: Path) -> None:
    def body() -> None:
        with Client(broker) as client:
            client.send(mount_request(place) + b"colour=green\0", os.open(place, O_PATH))
            reply = client.reply()
            assert reply is not None
            assert reply.errno == 0
            client.send(COMMIT + b"colour=green\0")
            assert client.reply() is None
        unmount(broker, place)

    in_private_namespace(body)


@pytest.mark.parametrize(
    "options",
    [b"suid," * 12_000, b"suid," * 12_000 + b"colour=green", b"c" * 65_400, b"fsname=" + b"c" * 65_400],
    ids=["more warnings than a reply holds", "and an unknown option", "one long option", "a long name"],
)
def test_an_answer_comes_to_options_that_would_make_it_too_long(options: bytes, broker: Broker, place: Path) -> None:
    def body() -> None:
        with Client(broker) as client:
            client.send(b"protocol=1\0operation=mount\0mountpoint=/m\0options=%b\0" % options, os.open(place, O_PATH))
            reply = client.reply()
            assert reply is not None
            assert bool(reply.errno) == bool(reply.text)
        wait_for_mounts([])
        check_service(broker, place)

    in_private_namespace(body)


def test_a_path_is_refused_that_makes_the_answer_too_long(broker: Broker, place: Path) -> None:
    def body() -> None:
        with Client(broker) as client:
            reader, _ = os.pipe()
            path = b"/" + b"m" * 65_450
            client.send(b"protocol=1\0operation=mount\0mountpoint=%b\0" % path, reader)
            assert client.refused()[1]
        check_service(broker, place)

    in_private_namespace(body)


# The order of messages -----------------------------------------------------------------------------------------


def test_a_commit_before_a_mount_is_refused(broker: Broker, place: Path) -> None:
    def body() -> None:
        with Client(broker) as client:
            client.send(COMMIT)
            assert client.refused() == (EBADMSG, "bad request: 'commit' before a mount")
        check_service(broker, place)

    in_private_namespace(body)


INSTEAD_OF_COMMIT = {
    "a second mount": GOOD,
    "an unmount": b"protocol=1\0operation=unmount\0mountpoint=/m\0name=m\0",
    "noise": b"noise",
    "a commit of another version": COMMIT.replace(b"1-1", b"2-2"),
}


@pytest.mark.parametrize("record", INSTEAD_OF_COMMIT.values(), ids=INSTEAD_OF_COMMIT.keys())
@pytest.mark.parametrize("early", [True, False], ids=["before the reply", "after the reply"])
def test_a_mount_is_rolled_back_that_is_followed_by(record: bytes, early: bool, broker: Broker, place: Path) -> None:
    def body() -> None:
        before = fuse_mounts()
        with Client(broker) as client:
            client.send(mount_request(place), os.open(place, O_PATH))
            if early:
                client.send(record, os.open("/", O_PATH))
            reply = client.reply()
            assert reply is None or reply.errno == 0
            if not early:
                client.send(record, os.open("/", O_PATH))
            wait_for_mounts(before)
            assert client.reply() is None
        check_service(broker, place)

    in_private_namespace(body)


def test_a_commit_with_a_descriptor_is_none(broker: Broker, place: Path) -> None:
    def body() -> None:
        with Client(broker) as client:
            client.send(mount_request(place), os.open(place, O_PATH))
            assert client.reply() is not None
            client.send(COMMIT, os.open("/", O_PATH))
            wait_for_mounts([])
        check_service(broker, place)

    in_private_namespace(body)


def test_nothing_is_heard_after_a_commit(broker: Broker, place: Path) -> None:
    def body() -> None:
        with Client(broker) as client:
            client.send(mount_request(place), os.open(place, O_PATH))
            assert client.reply() is not None
            client.send(COMMIT)
            assert client.reply() is None
            with pytest.raises(BrokenPipeError):
                client.send(mount_request(place))
            assert len(fuse_mounts()) == 1
        unmount(broker, place)

    in_private_namespace(body)


# Descriptors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 2, 4, 5, 200, 253])
@pytest.mark.parametrize("operation", ["mount", "unmount"])
def test_a_request_is_refused_with_that_many_descriptors(
    operation: str, count: int, broker: Broker, place: Path
) -> None:
    request = {"mount": mount_request(place), "unmount": unmount_request(place)}[operation]
    text = f"'{operation}' takes 1 file descriptors, {count} came"

    def body() -> None:
        with Client(broker) as client:
            client.send(request, *[os.open(place, O_PATH)] * count)
            assert client.refused() == (EBADMSG, f"bad request: {text}")
        check_service(broker, place)

    in_private_namespace(body)


def a_pipe(_: Path) -> int:
    return os.pipe()[0]


def a_socket(_: Path) -> int:
    return socket.socketpair()[0].detach()


def an_anonymous_file(_: Path) -> int:
    return os.memfd_create("file")


def an_open_file(directory: Path) -> int:
    return os.open(directory / "file", os.O_RDWR | os.O_CREAT)


def an_open_directory(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY)


def a_device(_: Path) -> int:
    return os.open("/dev/null", O_PATH)


def a_pinned_pipe(directory: Path) -> int:
    os.mkfifo(directory / "fifo")
    return os.open(directory / "fifo", O_PATH)


def a_symbolic_link(directory: Path) -> int:
    (directory / "link").symlink_to(directory)
    return os.open(directory / "link", O_PATH)


def a_deleted_directory(directory: Path) -> int:
    (directory / "deleted").mkdir()
    pinned = os.open(directory / "deleted", O_PATH)
    (directory / "deleted").rmdir()
    return pinned


def a_process(_: Path) -> int:
    return os.pidfd_open(os.getpid())


NO_MOUNTPOINT = (
    a_pipe,
    a_socket,
    an_anonymous_file,
    an_open_file,
    an_open_directory,
    a_device,
    a_pinned_pipe,
    a_symbolic_link,
    a_deleted_directory,
    a_process,
)


@pytest.mark.parametrize("make", NO_MOUNTPOINT, ids=lambda make: make.__name__.replace("_", " "))
@pytest.mark.parametrize("uid", [0, 1000])
def test_nothing_is_mounted_on(
    make: Callable[[Path], int], uid: int, broker: Broker, place: Path, tmp_path: Path
) -> None:
    tmp_path.chmod(0o777)

    def body() -> None:
        with Client(broker, uid) as client:
            client.send(mount_request(place), make(tmp_path))
            errno, text = client.refused()
            assert (errno, text) != (0, "")
        check_service(broker, place)

    in_private_namespace(body)


@pytest.mark.parametrize(
    "make", [*NO_MOUNTPOINT[:3], a_device, a_pinned_pipe, a_symbolic_link], ids=lambda make: make.__name__
)
@pytest.mark.parametrize("uid", [0, 1000])
def test_nothing_is_unmounted_in(
    make: Callable[[Path], int], uid: int, broker: Broker, place: Path, tmp_path: Path
) -> None:
    def body() -> None:
        device = mount(broker, place)
        with Client(broker, uid) as client:
            client.send(unmount_request(place), make(tmp_path))
            assert client.refused()[1]
        assert len(fuse_mounts()) == 1
        os.close(device)
        unmount(broker, place)

    in_private_namespace(body)


def test_a_directory_of_another_container_is_no_mountpoint(start: Start, broker: Broker, place: Path) -> None:
    container = start(image_tag(BUSYBOX))
    pinned = os.open(container.root() / "tmp", O_PATH)

    def body() -> None:
        with Client(broker) as client:
            client.send(mount_request(place), os.dup(pinned))
            assert client.refused() == (EINVAL, "mount failed: Invalid argument")
        check_service(broker, place)

    in_private_namespace(body)
    os.close(pinned)
    assert container.fuse_mounts() == []


@pytest.mark.parametrize("lazy", [False, True])
def test_what_another_container_has_mounted_is_not_unmounted(
    lazy: bool, start: Start, broker: Broker, place: Path
) -> None:
    container = start(image_tag(BUSYBOX))
    container.exec(["mkdir", "/tmp/mountpoint"])
    outcome = call_in(container, ["fusermount3", "/tmp/mountpoint"])
    directory = os.open(container.root() / "tmp", O_PATH)

    def body() -> None:
        with Client(broker) as client:
            client.send(unmount_request(place, lazy=lazy), os.dup(directory))
            errno, text = client.refused()
            assert errno in (EPERM, EINVAL)
            assert text.startswith(f"failed to unmount {place}: ")
        check_service(broker, place)

    in_private_namespace(body)
    os.close(directory)
    assert [mount.mountpoint for mount in container.fuse_mounts()] == ["/tmp/mountpoint"]
    container.exec(["fusermount3", "-u", "/tmp/mountpoint"])
    outcome.close()


def test_a_mountpoint_whose_program_is_dead_is_refused(broker: Broker, place: Path) -> None:
    def body() -> None:
        os.close(mount(broker, place))
        with Client(broker) as client:
            client.send(mount_request(place), os.open(place, O_PATH))
            message = f"failed to access mountpoint {place}: Transport endpoint is not connected"
            assert client.refused() == (ENOTCONN, message)
        unmount(broker, place)
        check_service(broker, place)

    in_private_namespace(body)


def test_a_mountpoint_whose_program_hangs_is_refused_in_time_and_holds_nobody_up(
    broker: Broker, place: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()

    def body() -> None:
        device = mount(broker, place)  # no process ever reads from it
        begun = time.monotonic()
        with Client(broker) as client:
            client.send(mount_request(place), os.open(place, O_PATH))
            check_service(broker, other)
            assert time.monotonic() - begun < DEADLINES["operation"]
            errno, text = client.refused()
            assert (errno, text) == (ETIMEDOUT, "mount failed: Connection timed out")
        assert time.monotonic() - begun < DEADLINES["operation"] + 10
        unmount(broker, place)
        os.close(device)

    in_private_namespace(body)


def test_a_mountpoint_that_vanishes_meanwhile_is_mounted_or_refused(broker: Broker, tmp_path: Path) -> None:
    def attempt(place: Path) -> None:
        place.mkdir()
        with Client(broker) as client:
            client.send(mount_request(place), os.open(place, O_PATH))
            try:
                place.rmdir()
            except OSError:  # it has become a mountpoint in the meantime
                assert (reply := client.reply()) is not None
                assert reply.errno == 0
            else:
                assert client.refused() == (ENOENT, "mount failed: No such file or directory")

    def body() -> None:
        for number in range(20):
            attempt(tmp_path / str(number))

    in_private_namespace(body)


# Callers that hang or disappear --------------------------------------------------------------------------------


def test_a_caller_that_says_nothing_is_told_so_in_time(broker: Broker, place: Path) -> None:
    def body() -> None:
        begun = time.monotonic()
        with Client(broker) as client:
            assert client.refused() == (ETIMEDOUT, "no request came in time")
            assert DEADLINES["request"] <= time.monotonic() - begun < DEADLINES["request"] + 10
            assert client.reply() is None
        check_service(broker, place)

    in_private_namespace(body)


def test_callers_that_say_nothing_hold_nobody_up_for_long(broker: Broker, place: Path) -> None:
    def body() -> None:
        silent = [Client(broker) for _ in range(150)]
        begun = time.monotonic()
        check_service(broker, place)
        assert time.monotonic() - begun < 3 * DEADLINES["request"] + 10
        for client in silent:
            client.__exit__()

    in_private_namespace(body)


def test_a_caller_may_go_at_once(broker: Broker, place: Path) -> None:
    def body() -> None:
        for _ in range(20):
            Client(broker).__exit__()
        check_service(broker, place)

    in_private_namespace(body)


def test_a_caller_that_goes_after_its_request_has_nothing_mounted(broker: Broker, place: Path) -> None:
    def body() -> None:
        for number, pause in enumerate((0, 0, 0.001, 0.002, 0.004, 0.01), 1):
            with Client(broker) as client:
                client.send(mount_request(place), os.open(place, O_PATH))
                time.sleep(pause)
            wait_until(lambda: records() == number)  # noqa: B023
            assert fuse_mounts() == []
        check_service(broker, place)

    def records() -> int:
        return sum(record.get("mountpoint") == str(place) for record in broker.records("mount "))

    in_private_namespace(body)


def test_a_caller_that_goes_without_a_commit_has_nothing_mounted(broker: Broker, place: Path) -> None:
    def body() -> None:
        with Client(broker) as client:
            client.send(mount_request(place), os.open(place, O_PATH))
            assert client.reply() is not None
            assert len(fuse_mounts()) == 1
        wait_for_mounts([])
        check_service(broker, place)

    in_private_namespace(body)


def test_a_mount_is_not_put_on_one_that_came_since_its_mountpoint_was_pinned(broker: Broker, place: Path) -> None:
    def body() -> None:
        pinned = os.open(place, O_PATH)
        with Client(broker) as first:
            first.send(mount_request(place), os.dup(pinned))
            assert first.reply() is not None
            with Client(broker) as second:
                second.send(mount_request(place), os.dup(pinned))
                assert second.refused() == (EBUSY, "mount failed: Device or resource busy")
                assert len(fuse_mounts()) == 1
        wait_for_mounts([])
        os.close(pinned)
        check_service(broker, place)

    in_private_namespace(body)


@pytest.mark.parametrize("reads", [True, False], ids=["but reads the reply", "and reads nothing"])
def test_a_mount_is_rolled_back_when_the_caller_commits_nothing(reads: bool, broker: Broker, place: Path) -> None:
    def body() -> None:
        with Client(broker) as client:
            begun = time.monotonic()
            client.send(mount_request(place), os.open(place, O_PATH))
            if reads:
                assert client.reply() is not None
            wait_until(fuse_mounts)
            wait_for_mounts([])
            assert time.monotonic() - begun >= DEADLINES["commit"]
        check_service(broker, place)

    in_private_namespace(body)


def test_a_request_is_not_carried_out_for_a_process_that_has_ended(broker: Broker, place: Path) -> None:
    """The connection stays open in another process, which is not the one that connected."""

    def body() -> None:
        ours, theirs = socket.socketpair()
        if (child := os.fork()) == 0:
            with ending_afterwards():
                client = Client(broker)
                socket.send_fds(theirs, [b"x"], [client.socket.fileno()])
        _, (inherited,), _, _ = socket.recv_fds(ours, 1, 1)
        os.waitpid(child, 0)
        connection = socket.socket(fileno=inherited)
        connection.settimeout(10)
        try:
            socket.send_fds(connection, [mount_request(place)], [os.open(place, O_PATH)])
            answer = connection.recv(wire.MAX_MESSAGE)
        except OSError:
            answer = b""
        assert not answer or wire.decode_reply(answer).errno != 0
        assert fuse_mounts() == []
        check_service(broker, place)

    in_private_namespace(body)


# Refusals by configuration, in fusermount3's words -------------------------------------------------------------


def test_allow_other_is_for_users_if_the_configuration_says_so(run_broker: RunBroker) -> None:
    broker = run_broker()
    with containers(broker) as start:
        container = start(image_tag(BUSYBOX), user="1000:1000")
        argv = ["fusermount3", "-o", "rw,allow_other", "/home/user/mnt"]
        refused = call_in(container, argv, "1000:1000")
        assert (refused.status, refused.stdout, refused.descriptor) == (1, "", None)
        message = f"option allow_other only allowed if 'user_allow_other' is set in {broker.config}"
        assert refused.stderr.splitlines()[0] == f"fusermount3: {message}"

        broker.configure("user_allow_other = true")
        broker.reload()
        outcome = call_in(container, argv, "1000:1000")
        assert (outcome.status, outcome.stderr) == (0, "")
        assert "allow_other" in container.fuse_mounts()[0].super_options
        container.exec(["fusermount3", "-u", "/home/user/mnt"])
        outcome.close()

    with containers(broker) as start:
        container = start(image_tag(BUSYBOX))
        outcome = call_in(container, ["fusermount3", "-o", "allow_other", "/mnt"])
        assert outcome.status == 0
        container.exec(["fusermount3", "-u", "/mnt"])
        outcome.close()


def test_a_user_has_at_most_mount_max_filesystems_in_each_container(run_broker: RunBroker) -> None:
    broker = run_broker("mount_max = 2")
    with containers(broker) as start:
        first, second = (start(image_tag(BUSYBOX), user="1000:1000") for _ in range(2))
        for container in (first, second):
            container.exec(["mkdir", "/tmp/1", "/tmp/2", "/tmp/3"])
            outcomes = [call_in(container, ["fusermount3", f"/tmp/{n}"], "1000:1000") for n in (1, 2, 3)]
            assert [outcome.status for outcome in outcomes] == [0, 0, 1]
            message = f"too many FUSE filesystems mounted; mount_max=N can be set in {broker.config}"
            assert outcomes[2].stderr.splitlines()[0] == f"fusermount3: {message}"

            container.exec(["fusermount3", "-u", "/tmp/1"])
            outcomes[0].close()
            again = call_in(container, ["fusermount3", "/tmp/3"], "1000:1000")
            assert again.status == 0
            for place in ("/tmp/2", "/tmp/3"):
                container.exec(["fusermount3", "-u", place])
            outcomes[1].close()
            again.close()


def test_a_user_gets_no_device_and_no_setuid(start: Start) -> None:
    container = start(image_tag(BUSYBOX), user="1000:1000")
    outcome = call_in(container, ["fusermount3", "-o", "suid,dev", "/home/user/mnt"], "1000:1000")
    said = "fusermount3: unsafe option suid ignored\nfusermount3: unsafe option dev ignored\n"
    assert (outcome.status, outcome.stderr) == (0, said)
    assert {"nosuid", "nodev"} <= container.fuse_mounts()[0].options
    container.exec(["fusermount3", "-u", "/home/user/mnt"])
    outcome.close()
