"""The executable under its other names, in containers: `run`, the probe, and fuse-starter; see docs/programs.md."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from fusermount3_broker.kernel import syscalls
from fusermount3_proxy import wire
from fusermount3_proxy.wire import CommitRequest, Reply, VolumeRequest
from tests.callers import build
from tests.callers import images as callers_images
from tests.callers.conftest import or_not_run
from tests.e2e.conftest import has_ended_all, wait_until
from tests.e2e.documented import block
from tests.e2e.hostile import in_private_namespace
from tests.e2e.mergerfs import use_mergerfs
from tests.e2e.sshfs import introduce
from tests.lab.broker import PROXY
from tests.lab.commands import run
from tests.lab.images import BUSYBOX, DEBIAN, MERGERFS, SSHFS, image_tag
from tests.lab.podman import Container, Options, Volume
from tests.lab.programs import SOURCES, stopfs, whoamifs
from tests.lab.sshd import sshd_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from subprocess import CompletedProcess, Popen

    from tests.e2e.conftest import Start
    from tests.lab.broker import Broker

pytestmark = pytest.mark.e2e

OPT = "/opt/fusermount3-proxy"
STARTER = "/opt/fuse-starter"
USER = "1000:1000"
MOUNTPOINT = "/home/user/mnt"


# run -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def untouched(
    broker: Broker,
    image: str,
    user: str | None = None,
    volumes: Sequence[Volume] = (),
    *,
    read_only: bool = False,
    user_namespace: bool = False,
    extra: Sequence[str] = (),
) -> Iterator[Container]:
    """A container of an image without the proxy: no /dev/fuse, and its own fusermount3 if it has one.

    The executable and the broker's socket are mounted, as any volume could provide them.
    """
    brought = [Volume(broker.socket.parent, "/run/fusermount3-proxy"), Volume(PROXY, OPT)]
    options = Options(
        user=user,
        volumes=[*brought, *volumes],
        read_only=read_only,
        user_namespace=user_namespace,
        extra=extra,
    )
    with Container(image, options=options) as container:
        yield container
        assert container.fuse_mounts() == []


def mounted(container: Container, argv: list[str], mountpoint: str = MOUNTPOINT) -> Popen[str]:
    """Start a FUSE program by `run`; return when it has mounted."""
    program = container.start([OPT, "run", "--", *argv])
    wait_until(lambda: container.fuse_mounts(mountpoint) or program.poll() is not None)
    assert program.poll() is None, program.communicate()
    return program


def test_sshfs_mounts_in_an_untouched_debian(broker: Broker) -> None:
    with untouched(broker, image_tag(SSHFS)) as container, sshd_for(container) as sshd:
        sshd.authorize(container)
        (sshd.export / "file").write_text("of the server\n")
        argv = ["sshfs", *sshd.sshfs_arguments(), "/mnt", "-f"]
        without = container.exec(argv, check=False)
        assert without.returncode != 0
        assert container.fuse_mounts() == []

        program = mounted(container, argv, "/mnt")
        assert container.exec(["cat", "/mnt/file"]).stdout == "of the server\n"
        container.exec(["sh", "-c", "echo of the client > /mnt/other"])
        assert (sshd.export / "other").read_text() == "of the client\n"
        container.exec(["fusermount3", "-u", "/mnt"])
        assert program.wait(timeout=20) == 0
        assert program.communicate() == ("", "")
        wait_until(lambda: has_ended_all(container))


def test_mergerfs_mounts_in_an_untouched_debian(broker: Broker) -> None:
    """mergerfs uses a different helper, which `run` also replaces."""
    with untouched(broker, image_tag(MERGERFS)) as container:
        use_mergerfs(container, "/mnt", OPT, "run", "--")


def test_sshfs_mounts_by_the_documented_command(broker: Broker) -> None:
    (command,) = block("programs.md", "FUSERMOUNT3PROXY_").commands
    elsewhere = [Volume(broker.socket.parent, "/broker"), Volume(PROXY, "/usr/local/bin/fusermount3-proxy")]
    options = Options(volumes=elsewhere)
    with Container(image_tag(SSHFS), options=options) as container, sshd_for(container) as sshd:
        introduce(sshd, container, "root", "host")
        (sshd.export / "file").write_text("of the server\n")
        program = container.start(["sh", "-c", command])
        wait_until(lambda: container.fuse_mounts("/mnt") or program.poll() is not None)
        assert container.exec(["cat", "/mnt/file"]).stdout == "of the server\n"
        socket_path = {"FUSERMOUNT3PROXY_FDPASSING_SOCKPATH": "/broker/broker.sock"}
        container.exec(["fusermount3", "-u", "/mnt"], env=socket_path)
        assert program.wait(timeout=20) == 0
        wait_until(lambda: has_ended_all(container))


@pytest.mark.parametrize("user_namespace", [False, True], ids=["", "in a user namespace"])
@pytest.mark.parametrize("read_only", [False, True], ids=["", "read-only root"])
def test_root_of_any_container_has_all_that_is_needed(broker: Broker, read_only: bool, user_namespace: bool) -> None:
    volumes = [Volume(whoamifs(), "/usr/bin/whoamifs")]
    tag = image_tag(BUSYBOX)
    with untouched(broker, tag, None, volumes, read_only=read_only, user_namespace=user_namespace) as container:
        program = mounted(container, ["whoamifs", "-f", MOUNTPOINT])
        container.exec([OPT, "run", "fusermount3", "-u", MOUNTPOINT])
        assert program.wait(timeout=20) == 0
        assert said_by_run(program) == []


def said_by_run(program: Popen[str]) -> list[str]:
    """Return the lines of stderr that are not the FUSE program's."""
    return [line for line in program.communicate()[1].splitlines() if line.startswith(f"{OPT}: ")]


def test_a_user_is_told_what_could_not_be_prepared_and_has_the_rest(broker: Broker) -> None:
    """The libfuse of this program, 3.14, does not open /dev/fuse if auto_unmount is requested."""
    volumes = [Volume(whoamifs(), "/usr/bin/whoamifs")]
    with untouched(broker, image_tag(BUSYBOX), USER, volumes) as container:
        program = mounted(container, ["whoamifs", "-f", "-o", "auto_unmount", MOUNTPOINT])
        read = container.exec(["sh", "-c", f"read -r seen < {MOUNTPOINT}/whoami; echo $seen"])
        assert read.stdout.startswith("uid=1000 gid=1000 pid=")
        kill(container, "whoamifs")
        wait_until(lambda: has_ended_all(container))
        (line,) = said_by_run(program)
        assert line.startswith(f"{OPT}: /dev/fuse can't be opened or made: Permission denied; ")
        assert line.endswith("start the container with -v /dev/null:/dev/fuse:ro")


def test_a_genuine_helper_that_cannot_be_replaced_is_told(broker: Broker) -> None:
    with untouched(broker, image_tag(SSHFS), USER) as container:
        result = container.exec([OPT, "run", "sh", "-c", "echo $PATH; exit 7"], check=False)
        assert result.returncode == 7
        assert result.stdout.split(":")[0] == "/dev/shm/fusermount3-proxy-1000"
        told = result.stderr.splitlines()
        for name in ("fusermount3", "fusermount"):
            assert (
                f"{OPT}: /usr/bin/{name} is another program, which programs with libfuse will use: Permission denied"
                in told
            )
        assert len(told) == 3


def test_a_genuine_helper_stays_where_it_may_mount_by_itself(broker: Broker) -> None:
    with untouched(broker, image_tag(SSHFS), extra=["--cap-add=SYS_ADMIN"]) as container:
        result = container.exec([OPT, "run", "readlink", "-f", "/usr/bin/fusermount3"])
        assert result.stdout == "/usr/bin/fusermount3\n"
        assert len(result.stderr.splitlines()) == 2
        assert "the container has CAP_SYS_ADMIN, so it may mount by itself" in result.stderr


@pytest.mark.parametrize("suite", ["trixie", "sid"])
def test_libfuse_from_3_18_on_opens_another_device(broker: Broker, suite: str) -> None:
    """`run` sets FUSE_KERN_DEVICE for a user who can't have a /dev/fuse; libfuse 3.17 of trixie ignores it."""
    recipe = {"trixie": callers_images.TRIXIE, "sid": callers_images.SID}[suite]
    with or_not_run():
        tag, programs = build.image_tag(recipe), build.libfuse_programs(recipe, ("fuse3",))
    with untouched(broker, tag, USER, [Volume(programs, "/callers")]) as container:
        serve = ["/callers/whoamifs-fuse3", "-f", MOUNTPOINT]
        if suite == "trixie":
            result = container.exec([OPT, "run", *serve], check=False)
            assert result.returncode != 0
            assert "fuse: device not found" in result.stderr
            return
        program = mounted(container, serve)
        assert "uid=1000" in container.exec(["cat", f"{MOUNTPOINT}/whoami"]).stdout
        container.exec([OPT, "run", "fusermount3", "-u", MOUNTPOINT])
        assert program.wait(timeout=20) == 0


def test_the_command_takes_the_place_of_run(broker: Broker) -> None:
    with untouched(broker, image_tag(BUSYBOX)) as container:
        script = f"echo $$; exec {OPT} run sh -c 'echo $$; cat; exit 3'"
        result = container.exec(["sh", "-c", script], input="of stdin\n", check=False)
        first, second, read = result.stdout.splitlines()
        assert (first, read, result.stderr, result.returncode) == (second, "of stdin", "", 3)
        assert container.exec(["ls", "-l", "/dev/fuse"]).stdout.rstrip().endswith("/dev/fuse -> /dev/null")


# --wait-mounted ------------------------------------------------------------------------------------------------


def probe(container: Container, *words: str, user: str | None = None) -> CompletedProcess[str]:
    return container.exec([OPT, "--wait-mounted", *words], user=user, check=False)


def check_not_ready(result: CompletedProcess[str], what: str) -> None:
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"{OPT}: {what}\n"


@pytest.fixture
def container(start: Start) -> Container:
    """A container with the programs that this module runs."""
    volumes = (Volume(PROXY, OPT), Volume(PROXY, STARTER), Volume(stopfs(), "/usr/bin/stopfs"))
    return start(image_tag(BUSYBOX), volumes=volumes)


def first_line_of(waiting: Popen[str]) -> str:
    """Return the first line on stderr of a probe that waits; it says what for, because it may be killed."""
    assert waiting.stderr is not None
    return waiting.stderr.readline()


def serve(container: Container, *argv: str, user: str | None = None) -> Popen[str]:
    program = container.start([*argv, MOUNTPOINT], user=user)
    wait_until(lambda: container.fuse_mounts(MOUNTPOINT))
    return program


def kill(container: Container, name: str) -> None:
    container.exec(["sh", "-c", f"kill -KILL $(pidof {name})"])


def test_the_probe_of_an_absent_a_live_and_a_dead_mount(container: Container) -> None:
    check_not_ready(probe(container, MOUNTPOINT), f"{MOUNTPOINT}: not a mountpoint of a FUSE filesystem")
    check_not_ready(probe(container, "/dev/shm"), "/dev/shm: not a mountpoint of a FUSE filesystem")
    check_not_ready(probe(container, "/no/such"), "/no/such: No such file or directory")
    serve(container, "whoamifs", "-f")
    container.exec(["ln", "-s", MOUNTPOINT, "/tmp/link"])
    for path in (MOUNTPOINT, f"{MOUNTPOINT}/", "/tmp/link"):
        result = probe(container, path)
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    below = f"{MOUNTPOINT}/files"
    check_not_ready(probe(container, below), f"{below}: not a mountpoint of a FUSE filesystem")
    kill(container, "whoamifs")
    wait_until(lambda: probe(container, MOUNTPOINT).returncode)
    check_not_ready(probe(container, MOUNTPOINT), f"{MOUNTPOINT}: its FUSE program is gone")
    container.exec(["fusermount3", "-u", MOUNTPOINT])


def test_the_probe_waits_for_a_mount(container: Container) -> None:
    waiting = container.start([OPT, "--wait-mounted", MOUNTPOINT, "--timeout", "60"])
    begun = time.monotonic()
    assert first_line_of(waiting) == f"{OPT}: {MOUNTPOINT}: not a mountpoint of a FUSE filesystem\n"
    assert waiting.poll() is None
    serve(container, "whoamifs", "-f")
    assert waiting.wait(timeout=60) == 0
    assert time.monotonic() - begun < 50
    container.exec(["fusermount3", "-u", MOUNTPOINT])


def test_the_probe_of_what_another_user_has_mounted_for_himself(container: Container) -> None:
    serve(container, "whoamifs", "-f", user=USER)
    check_not_ready(probe(container, MOUNTPOINT), f"{MOUNTPOINT}: Permission denied")
    assert probe(container, MOUNTPOINT, user=USER).returncode == 0
    container.exec(["fusermount3", "-u", MOUNTPOINT])


def probes(container: Container) -> list[psutil.Process]:
    """Return the running processes of the probe in the container."""
    found = []
    for pid in container.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.name() == "fusermount3-pro" and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.mark.parametrize("hang", ["stop_at=init", "silent_at=init", "stop_at=getattr", "silent_at=getattr"])
def test_a_filesystem_that_hangs_delays_no_probe_and_holds_one_process_at_most(hang: str, container: Container) -> None:
    serve(container, "stopfs", "-f", "-o", hang)
    for _ in range(4):
        begun = time.monotonic()
        result = probe(container, MOUNTPOINT)
        assert time.monotonic() - begun < 20  # includes the time to enter a container on a busy machine
        check_not_ready(result, f"{MOUNTPOINT}: the filesystem does not answer")
    wait_until(lambda: len(probes(container)) <= 1)
    kill(container, "stopfs")
    wait_until(lambda: not probes(container))
    container.exec(["fusermount3", "-u", MOUNTPOINT])


def test_a_stopped_program_that_goes_on_is_waited_for(container: Container) -> None:
    serve(container, "whoamifs", "-f")
    container.exec(["sh", "-c", "kill -STOP $(pidof whoamifs)"])
    check_not_ready(probe(container, MOUNTPOINT), f"{MOUNTPOINT}: the filesystem does not answer")
    waiting = container.start([OPT, "--wait-mounted", MOUNTPOINT, "--timeout", "60"])
    assert first_line_of(waiting) == f"{OPT}: {MOUNTPOINT}: the filesystem does not answer\n"
    assert waiting.poll() is None
    container.exec(["sh", "-c", "kill -CONT $(pidof whoamifs)"])
    assert waiting.wait(timeout=60) == 0
    container.exec(["fusermount3", "-u", MOUNTPOINT])


# fuse-starter --------------------------------------------------------------------------------------------------


class FakeVolumeBroker:
    """A broker's part in a volume, as root and without checks: it mounts on `target` and hands out the descriptor."""

    def __init__(self, path: Path, target: Path) -> None:
        self._target = target
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(bytes(path))
        path.chmod(0o666)
        self._listener.listen()
        self._listener.settimeout(30)
        self.request: VolumeRequest

    def serve(self) -> bool:
        """Serve one caller; return whether it committed."""
        connection, _ = self._listener.accept()
        connection.settimeout(30)
        with connection:
            data, descriptors, _, _ = socket.recv_fds(connection, wire.MAX_MESSAGE, 1)
            request = wire.decode_request(data)
            assert isinstance(request, VolumeRequest)
            assert descriptors == []
            self.request = request
            device = os.open("/dev/fuse", os.O_RDWR)
            options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
            syscalls.mount(b"fake", bytes(self._target), b"fuse.fake", syscalls.MS_NOSUID, options.encode())
            socket.send_fds(connection, [wire.encode_reply(Reply(b"fake"))], [device])
            os.close(device)
            committed = connection.recv(wire.MAX_MESSAGE)
        return bool(committed) and isinstance(wire.decode_request(committed), CommitRequest)


@contextlib.contextmanager
def starter_in(image: str, volume: Path, user: str | None, volumes: Sequence[Volume] = ()) -> Iterator[Container]:
    """A container of an untouched image, with fuse-starter and the directory of the volume's socket: no /dev/fuse."""
    brought = [Volume(PROXY, STARTER), Volume(volume / "sockets", "/volume"), *volumes]
    environment = {"FUSERMOUNT3PROXY_FDPASSING_SOCKPATH": "/volume/volume.sock"}
    with Container(image, options=Options(user=user, volumes=brought, env=environment)) as container:
        yield container


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """The directory of a volume: `sockets`, for the container, and `target`, on which the fake broker mounts."""
    for name in ("sockets", "target"):
        (tmp_path / name).mkdir()
    return tmp_path


def with_fake_broker(volume: Path, body: Callable[[FakeVolumeBroker, bool], object]) -> None:
    """Serve one caller, then run `body` where the target is mounted; its argument says whether the caller committed."""

    def in_namespace() -> None:
        fake_broker = FakeVolumeBroker(volume / "sockets/volume.sock", volume / "target")
        body(fake_broker, fake_broker.serve())
        run(["umount", volume / "target"])

    in_private_namespace(in_namespace)


@pytest.mark.parametrize("user", [None, "1000:1000", "54321:54321"])
@pytest.mark.parametrize("words", [["{}"], ["/dev/fd/3"]], ids=["placeholder", "number 3"])
def test_a_program_serves_a_volume_of_a_fake_broker(user: str | None, words: list[str], volume: Path) -> None:
    with starter_in(image_tag(BUSYBOX), volume, user, [Volume(whoamifs(), "/usr/bin/whoamifs")]) as container:
        program = container.start([STARTER, "-o", "ro", "--", "whoamifs", "-f", *words])

        def body(fake_broker: FakeVolumeBroker, committed: bool) -> None:
            assert committed
            assert fake_broker.request.options == b"ro"
            assert (volume / "target/whoami").read_text().startswith("uid=0 gid=0 pid=")

        with_fake_broker(volume, body)
        assert program.wait(timeout=20) == 0
        assert container.fuse_mounts() == []
        wait_until(lambda: has_ended_all(container))


@pytest.mark.parametrize("library", ["gofuse", "jacobsa"])
def test_a_program_in_go_serves_a_volume_of_a_fake_broker(library: str, volume: Path) -> None:
    with or_not_run():
        programs = build.go_programs()
    with starter_in(image_tag(BUSYBOX), volume, USER, [Volume(programs, "/callers")]) as container:
        program = container.start([STARTER, f"/callers/{library}", "{}"])

        def body(_fake_broker: FakeVolumeBroker, committed: bool) -> None:
            assert committed
            assert (volume / "target/hello").read_text() == "hello\n"

        with_fake_broker(volume, body)
        program.wait(timeout=20)
        wait_until(lambda: has_ended_all(container))


def test_a_program_in_python_serves_a_volume_of_a_fake_broker(volume: Path) -> None:
    source = Volume(SOURCES / "whoami_pyfuse3.py", "/opt/whoami.py")
    with starter_in(image_tag(DEBIAN), volume, USER, [source]) as container:
        program = container.start([STARTER, "python3", "/opt/whoami.py", "{}"])

        def body(_fake_broker: FakeVolumeBroker, committed: bool) -> None:
            assert committed
            assert (volume / "target/whoami").read_text().startswith("uid=0 gid=0 pid=")

        with_fake_broker(volume, body)
        program.wait(timeout=20)
        wait_until(lambda: has_ended_all(container))


def test_sshfs_of_an_untouched_debian_serves_a_volume_of_a_fake_broker(volume: Path) -> None:
    """The command line is that of meta-fuse-csi-plugin's example."""
    with starter_in(image_tag(SSHFS), volume, USER) as container, sshd_for(container) as sshd:
        sshd.authorize(container)
        (sshd.export / "file").write_text("of the server\n")
        named = ["--fd-passing-socket-path", "/volume/volume.sock"]
        program = container.start([STARTER, *named, "--", "/usr/bin/sshfs", *sshd.sshfs_arguments(), "/dev/fd/3", "-f"])

        def body(_fake_broker: FakeVolumeBroker, committed: bool) -> None:
            assert committed
            assert (volume / "target/file").read_text() == "of the server\n"
            (volume / "target/new").write_text("of the client\n")

        with_fake_broker(volume, body)
        assert (sshd.export / "new").read_text() == "of the client\n"
        assert program.wait(timeout=20) == 0
        assert container.fuse_mounts() == []


def test_a_program_that_cannot_be_executed_leaves_nothing_mounted_by_a_fake_broker(volume: Path) -> None:
    with starter_in(image_tag(BUSYBOX), volume, USER) as container:
        for program, status in (("no-such-program", 127), ("/etc/passwd", 126)):
            result = container.exec([STARTER, "--", program, "{}"], check=False)
            assert (result.returncode, result.stdout) == (status, "")
            assert result.stderr.startswith(f"{STARTER}: failed to execute {program}: ")
        # Neither program sent a request: there is no socket that it could have waited for.
        result = container.exec([STARTER, "--timeout", "0.2", "--", "true", "{}"], check=False)
        assert result.returncode == 125
        assert result.stderr == (
            f"{STARTER}: no broker at /volume/volume.sock: No such file or directory, waited 0.2 seconds for it\n"
        )


def test_the_broker_of_containers_mounts_no_volume(container: Container) -> None:
    result = container.exec([STARTER, "whoamifs", "-f", "{}"], check=False)
    assert (result.returncode, result.stdout) == (125, "")
    assert f"{STARTER}: broker request " in result.stderr
