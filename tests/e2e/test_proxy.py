"""The proxy as an executable: its file, what it opens, where it looks for the broker, and how long it waits."""

from __future__ import annotations

import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fusermount3_proxy import FUSERMOUNT_VERSION, __version__
from tests.callers import build
from tests.callers.conftest import or_not_run
from tests.e2e.caller import call, call_in
from tests.e2e.conftest import containers, wait_until
from tests.e2e.hostile import fuse_mounts, in_private_namespace
from tests.lab.broker import PROXY
from tests.lab.commands import run
from tests.lab.images import BUSYBOX, DEBIAN, image_tag
from tests.lab.podman import FUSE_STAND_IN, Container, Options, Volume
from tests.lab.programs import whoamifs

if TYPE_CHECKING:
    from tests.e2e.conftest import RunBroker, Start
    from tests.lab.broker import Broker

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).parents[2]
VARIABLE = "FUSERMOUNT3PROXY_FDPASSING_SOCKPATH"
LARGEST = 5_000_000

# The same code, once frozen into the static executable and once as a module of an installed Python.
FORMS = {"frozen": [str(PROXY)], "unfrozen": [sys.executable, "-m", "fusermount3_proxy"]}
either = pytest.mark.parametrize("command", FORMS.values(), ids=FORMS.keys())


# The file ------------------------------------------------------------------------------------------------------


def test_the_executable_is_static_and_small() -> None:
    assert "no dynamic section" in run(["readelf", "--dynamic", PROXY]).stdout
    assert "INTERP" not in run(["readelf", "--program-headers", PROXY]).stdout
    assert ".symtab" not in run(["readelf", "--section-headers", PROXY]).stdout
    assert PROXY.stat().st_size <= LARGEST


def opened(*arguments: str | Path, tmp_path: Path) -> list[str]:
    """Return the paths that the executable opens, or tries to open, with these arguments."""
    log = tmp_path / "strace"
    calls = "trace=open,openat,openat2,creat,execve"
    run(["strace", "-f", "-e", calls, "-o", log, PROXY, *arguments], check=False)
    executed, *paths = re.findall(r'^\d+ +\w+\(.*?"(.*?)"', log.read_text(), re.MULTILINE)
    assert executed == str(PROXY)  # strace does see system calls
    return paths


def test_it_opens_nothing_to_say_its_version(tmp_path: Path) -> None:
    assert opened("-V", tmp_path=tmp_path) == []
    assert opened("-h", tmp_path=tmp_path) == []
    assert opened("--no-such-option", tmp_path=tmp_path) == []


def test_it_opens_nothing_but_the_way_to_the_mountpoint(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert broker.socket.exists()
    place = tmp_path / "mountpoint"
    monkeypatch.setenv(VARIABLE, str(broker.socket))
    assert opened("-u", place, tmp_path=tmp_path) == [f"{tmp_path}/"]
    monkeypatch.delenv(VARIABLE)


def test_it_reads_the_file_that_may_name_the_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In a container without a broker this would wait; here the file names a socket that refuses at once.
    monkeypatch.delenv(VARIABLE, raising=False)

    def body() -> None:
        run(["mount", "-t", "tmpfs", "tmpfs", "/etc"])
        Path("/etc/fusermount3-proxy").mkdir()
        Path("/etc/fusermount3-proxy/socket").write_text("/dev/null/no/socket\n")
        paths = opened("-u", "/srv/mountpoint", tmp_path=tmp_path)
        assert paths == ["/srv/", "/etc/fusermount3-proxy/socket"]

    in_private_namespace(body)


# The command line ----------------------------------------------------------------------------------------------


HELPER_VERSION = f"fusermount3 version: {FUSERMOUNT_VERSION}\n"


@pytest.mark.parametrize("option", ["-V", "--version"])
@pytest.mark.parametrize("name", ["fusermount3", "fusermount", "mergerfs-fusermount"])
def test_under_a_helpers_name_it_prints_the_helpers_version(name: str, option: str, tmp_path: Path) -> None:
    """The names are those of symbolic links in its package, and of its file as mounted in a container."""
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / name).symlink_to(PROXY)
    shutil.copy(PROXY, tmp_path / name)
    for helper in (tmp_path / "linked" / name, tmp_path / name):
        result = run([helper, option])
        assert (result.stdout, result.stderr) == (HELPER_VERSION, "")


@pytest.mark.parametrize("option", ["-V", "--version"])
def test_under_its_own_name_it_prints_its_own_version_too(option: str) -> None:
    result = run([PROXY, option])
    assert (result.stdout, result.stderr) == (f"fusermount3-proxy version: {__version__}\n{HELPER_VERSION}", "")


def test_as_a_module_it_prints_the_helpers_version() -> None:
    result = run([*FORMS["unfrozen"], "--version"])
    assert (result.stdout, result.stderr) == (HELPER_VERSION, "")


@either
def test_the_help_is_told_without_a_broker_and_with_status_1(command: list[str]) -> None:
    result = run([*command, "-h"], check=False)
    assert (result.returncode, result.stderr) == (1, "")
    assert result.stdout.splitlines()[0].endswith(": [options] mountpoint")
    assert all(f" -{letter}" in result.stdout for letter in "hVouqz")


@either
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_version_and_help_work_with_closed(closed: str, command: list[str]) -> None:
    for argument, status in (("-V", 0), ("-h", 1)):
        result = run(["sh", "-c", f'exec "$0" "$@" {closed}', *command, argument], check=False)
        assert (result.returncode, result.stderr) == (status, "")


MISTAKES = {
    "no mountpoint": ([], "missing mountpoint argument"),
    "two mountpoints": (["/a", "/b"], "extra arguments after the mountpoint"),
    "-z without -u": (["-z", "/a"], "-z can only be used with -u"),
    "an unknown letter": (["-x", "/a"], "invalid option -- 'x'"),
    "an unknown word": (["--foo", "/a"], "unrecognized option '--foo'"),
    "an empty mountpoint": (["-u", ""], "invalid mountpoint ''"),
    "no comm socket": (["/"], "old style mounting not supported"),
    "a directory that is not there": (["/no/such/place"], "bad mount point /no/such/place: No such file or directory"),
}


@either
@pytest.mark.parametrize("arguments, message", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_told_in_one_line_without_a_broker(arguments: list[str], message: str, command: list[str]) -> None:
    result = run([*command, *arguments], check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.endswith(f": {message}\n")
    assert result.stderr.count("\n") == 1


@either
def test_a_comm_fd_that_is_no_socket_is_refused(command: list[str]) -> None:
    result = run(["env", "_FUSE_COMMFD=0", *command, "/tmp"], check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.endswith(": file descriptor 0 is not a socket, can't send fuse fd\n")


@either
def test_it_mounts_and_unmounts(
    command: list[str], broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(broker.socket))
    place = tmp_path / "mountpoint"
    place.mkdir()

    def body() -> None:
        outcome = call([*command, "-o", "ro,fsname=source,subtype=test", "--", str(place)])
        assert (outcome.status, outcome.stdout, outcome.stderr) == (0, "", "")
        assert outcome.descriptor is not None
        assert Path(f"/proc/self/fd/{outcome.descriptor}").readlink() == Path("/dev/fuse")
        (mount,) = fuse_mounts()
        assert (mount.mountpoint, mount.fstype, mount.source) == (str(place), "fuse.test", "source")
        result = run([*command, "-u", place])
        assert (result.stdout, result.stderr) == ("", "")
        outcome.close()

    in_private_namespace(body)


@either
def test_what_was_just_mounted_can_be_unmounted_at_once(
    command: list[str], broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker has released the mount by the time fusermount3 exits, so the mount is not busy."""
    monkeypatch.setenv(VARIABLE, str(broker.socket))
    place = tmp_path / "mountpoint"
    place.mkdir()

    def body() -> None:
        for _ in range(25):
            outcome = call([*command, place])
            assert (outcome.status, outcome.stderr) == (0, "")
            run([*command, "-u", place])
            outcome.close()

    in_private_namespace(body)


@either
def test_nothing_stays_mounted_when_the_program_is_gone(
    command: list[str], broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The FUSE program dies while its helper runs, so the descriptor has no receiver.

    The mount is gone when the helper ends, not some time later.
    """
    monkeypatch.setenv(VARIABLE, str(broker.socket))
    place = tmp_path / "mountpoint"
    place.mkdir()
    # A socket whose other end is closed already.
    script = (
        "import os, socket, sys; ours, theirs = socket.socketpair(); ours.close(); os.set_inheritable(theirs.fileno(),"
        " True); os.environ['_FUSE_COMMFD'] = str(theirs.fileno()); os.execv(sys.argv[1], sys.argv[1:])"
    )

    def body() -> None:
        for _ in range(20):
            result = run([sys.executable, "-c", script, *command, place], check=False)
            assert fuse_mounts() == []
            assert (result.returncode, result.stdout) == (1, "")
            assert result.stderr.endswith(": sending file descriptor: Broken pipe\n")

    in_private_namespace(body)


# Where the broker is -------------------------------------------------------------------------------------------


def test_the_socket_is_found_at_its_default_place(start: Start) -> None:
    container = start(image_tag(BUSYBOX), user="1000:1000")
    assert "ok=yes" in container.exec(["whoamifs", "--probe", "/home/user/mnt"]).stdout


def container_elsewhere(broker: Broker, *volumes: Volume) -> Container:
    """A container with the socket's directory at /srv/broker."""
    everything = [
        FUSE_STAND_IN,
        Volume(PROXY, "/usr/bin/fusermount3"),
        Volume(whoamifs(), "/usr/bin/whoamifs"),
        Volume(broker.socket.parent, "/srv/broker"),
        *volumes,
    ]
    return Container(image_tag(BUSYBOX), options=Options(user="1000:1000", volumes=everything))


PROBE = ["whoamifs", "--probe", "/home/user/mnt"]


def test_the_socket_is_found_where_the_environment_says(broker: Broker) -> None:
    with container_elsewhere(broker) as container:
        assert "ok=yes" in container.exec(PROBE, env={VARIABLE: "/srv/broker/broker.sock"}).stdout


def test_the_socket_is_found_by_a_helper_that_has_no_environment(broker: Broker) -> None:
    """go-fuse passes no environment to its helper: the variable is in the environment of the FUSE program."""
    with or_not_run():
        programs = build.go_programs()
    with container_elsewhere(broker, Volume(programs, "/callers")) as container:
        mountpoint = "/home/user/mnt"
        program = container.start(["/callers/gofuse", mountpoint], env={VARIABLE: "/srv/broker/broker.sock"})
        wait_until(lambda: container.fuse_mounts(mountpoint) or program.poll() is not None)
        assert container.exec(["cat", f"{mountpoint}/hello"]).stdout == "hello\n"
        container.exec(["fusermount3", "-u", mountpoint], env={VARIABLE: "/srv/broker/broker.sock"})
        program.wait(timeout=20)


def test_the_socket_is_found_where_the_file_says(broker: Broker, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)  # the user reads it
    (tmp_path / "socket").write_text("/srv/broker/broker.sock\nwhat comes after the first line is for people\n")
    with container_elsewhere(broker, Volume(tmp_path, "/etc/fusermount3-proxy")) as container:
        assert "ok=yes" in container.exec(PROBE).stdout
        assert "ok=yes" in container.exec(PROBE, env={VARIABLE: ""}).stdout


def test_the_environment_comes_before_the_file(broker: Broker, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "socket").write_text("/no/such/socket\n")
    with container_elsewhere(broker, Volume(tmp_path, "/etc/fusermount3-proxy")) as container:
        assert "ok=yes" in container.exec(PROBE, env={VARIABLE: "/srv/broker/broker.sock"}).stdout


def test_the_unfrozen_proxy_serves_a_container_that_has_python(start: Start, tmp_path: Path) -> None:
    helper = tmp_path / "fusermount3"
    helper.write_text('#!/bin/sh\nPYTHONPATH=/opt exec python3 -m fusermount3_proxy "$@"\n')
    helper.chmod(0o755)
    volumes = (
        Volume(helper, "/usr/local/bin/fusermount3"),
        Volume(REPOSITORY / "fusermount3_proxy", "/opt/fusermount3_proxy"),
    )
    container = start(image_tag(DEBIAN), user="1000:1000", volumes=volumes)
    outcome = call_in(container, ["/usr/local/bin/fusermount3", "/home/user/mnt"])
    assert (outcome.status, outcome.stderr) == (0, "")
    assert len(container.fuse_mounts()) == 1
    container.exec(["/usr/local/bin/fusermount3", "-u", "/home/user/mnt"])
    outcome.close()


# A late broker, and no broker at all ---------------------------------------------------------------------------


def test_a_broker_that_starts_two_seconds_later_is_waited_for(run_broker: RunBroker) -> None:
    broker = run_broker()
    with containers(broker) as start:
        container = start(image_tag(BUSYBOX), user="1000:1000")
        broker.stop()
        program = container.start(["whoamifs", "-f", "/home/user/mnt"])
        time.sleep(2)
        assert program.poll() is None
        broker.start()
        wait_until(lambda: container.fuse_mounts() or program.poll() is not None)
        container.exec(["fusermount3", "-u", "/home/user/mnt"])
        assert program.wait(timeout=20) == 0


def test_a_front_that_is_replaced_meanwhile_is_asked_again(run_broker: RunBroker) -> None:
    broker = run_broker()
    with containers(broker) as start:
        container = start(image_tag(BUSYBOX), user="1000:1000")
        front = broker.front
        front.suspend()
        program = container.start(["whoamifs", "-f", "/home/user/mnt"])
        time.sleep(1)  # by now it has connected and waits for an answer
        front.kill()
        wait_until(lambda: container.fuse_mounts() or program.poll() is not None)
        container.exec(["fusermount3", "-u", "/home/user/mnt"])
        assert program.wait(timeout=20) == 0


def test_without_a_broker_one_line_says_so_in_time_and_nothing_else_happens(tmp_path: Path) -> None:
    sockets = {"Connection refused": tmp_path / "deaf", "No such file or directory": tmp_path / "nothing"}
    bind = "import socket, sys; socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).bind(sys.argv[1])"
    run([sys.executable, "-c", bind, tmp_path / "deaf"])

    def check(form: str, reason: str, *arguments: str) -> None:
        begun = time.monotonic()
        outcome = call([*FORMS[form], *arguments, tmp_path], env={VARIABLE: str(sockets[reason])})
        assert 8 < time.monotonic() - begun < 40
        assert (outcome.status, outcome.stdout, outcome.descriptor) == (1, "", None)
        message = f": no broker at {sockets[reason]}: {reason}, waited 10 seconds for it\n"
        assert outcome.stderr.endswith(message)
        assert outcome.stderr.count("\n") == 1

    # Run in parallel, since each takes a while.
    calls = [(form, reason, *unmount) for form in FORMS for reason in sockets for unmount in ((), ("-u",))]
    with ThreadPoolExecutor(len(calls)) as pool:
        for result in [pool.submit(check, *each) for each in calls]:
            result.result()
    assert fuse_mounts() == []
