"""Containers neither see nor touch each other's mounts, the broker can run in a container itself, and mounts stay when
any part of the broker is killed or restarted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.e2e.conftest import Footprint, containers, fuse_mounts_of_host, let_users_in, settle, settled, wait_until
from tests.lab.broker import PROXY
from tests.lab.commands import run
from tests.lab.images import BUSYBOX, SYSTEMD, image_tag
from tests.lab.podman import FUSE_STAND_IN, Container, Options, Volume
from tests.lab.programs import whoamifs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from subprocess import Popen

    from tests.e2e.conftest import RunBroker, Start
    from tests.lab.broker import Broker

pytestmark = pytest.mark.e2e

USER = "1000:1000"
MOUNTPOINT = "/home/user/mnt"
REPOSITORY = Path(__file__).parents[2]


def serve(container: Container) -> Popen[str]:
    program = container.start(["whoamifs", "-f", MOUNTPOINT])
    wait_until(lambda: container.fuse_mounts(MOUNTPOINT) or program.poll() is not None)
    assert program.poll() is None, program.communicate()
    return program


def check_use(container: Container) -> None:
    assert container.exec(["head", "-n1", f"{MOUNTPOINT}/whoami"]).stdout.startswith("uid=1000 gid=1000 ")


def unmount(container: Container, program: Popen[str]) -> None:
    container.exec(["fusermount3", "-u", MOUNTPOINT])
    assert program.wait(timeout=20) == 0
    assert container.fuse_mounts() == []


def check_probe(container: Container) -> None:
    """Check a complete cycle of mount, use and unmount."""
    result = container.exec(["whoamifs", "--probe", MOUNTPOINT], check=False)
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "ok=yes"), result.stdout + result.stderr


# Two containers ------------------------------------------------------------------------------------------------


def test_two_containers_mount_at_the_same_path_and_each_sees_its_own(start: Start, broker: Broker) -> None:
    host_before = fuse_mounts_of_host()
    first, second = (start(image_tag(BUSYBOX), user=USER) for _ in range(2))
    programs = [serve(container) for container in (first, second)]
    assert first.fuse_mounts()[0].device != second.fuse_mounts()[0].device
    assert [len(container.fuse_mounts()) for container in (first, second)] == [1, 1]
    assert fuse_mounts_of_host() == host_before
    assert [mount["mountpoint"] for mount in broker.mounts()] == [MOUNTPOINT, MOUNTPOINT]

    for container, name in ((first, "first"), (second, "second")):
        container.exec(["sh", "-c", f"cat > {MOUNTPOINT}/files/name"], input=name)
    for container, name in ((first, "first"), (second, "second")):
        assert container.exec(["cat", f"{MOUNTPOINT}/files/name"]).stdout == name

    unmount(first, programs[0])
    assert second.exec(["cat", f"{MOUNTPOINT}/files/name"]).stdout == "second"
    unmount(second, programs[1])


@pytest.mark.parametrize("user", ["1000:1000", "0:0"])
def test_a_container_cannot_unmount_what_another_has_mounted(user: str, start: Start) -> None:
    first, second = (start(image_tag(BUSYBOX), user=USER) for _ in range(2))
    program = serve(first)
    result = second.exec(["fusermount3", "-u", "-z", MOUNTPOINT], user=user, check=False)
    assert result.returncode == 1
    assert len(first.fuse_mounts()) == 1
    check_use(first)
    unmount(first, program)


def test_a_mount_ends_with_its_container(start: Start, broker: Broker) -> None:
    options = Options(user=USER, volumes=[FUSE_STAND_IN, *broker.volumes(), Volume(whoamifs(), "/usr/bin/whoamifs")])
    with Container(image_tag(BUSYBOX), options=options) as container:
        serve(container)
        assert len(broker.mounts()) == 1
    wait_until(lambda: broker.mounts() == [])
    check_probe(start(image_tag(BUSYBOX), user=USER))


# A program of the host -----------------------------------------------------------------------------------------

HOST_SCRIPT = """\
mount --bind "$PROXY" /usr/bin/fusermount3
mount --bind /dev/null /dev/fuse
mount -t tmpfs -o uid=1000,gid=1000 tmpfs "$PLACE"
exec setpriv --reuid 1000 --regid 1000 --clear-groups "$WHOAMIFS" --probe "$PLACE"
"""


def test_a_program_of_the_host_mounts_and_unmounts(broker: Broker, tmp_path: Path) -> None:
    let_users_in(tmp_path)
    program = tmp_path / "whoamifs"
    program.write_bytes(whoamifs().read_bytes())  # only root may read the cache
    program.chmod(0o755)
    place = tmp_path / "mountpoint"
    place.mkdir()
    variables = [f"PROXY={PROXY}", f"PLACE={place}", f"WHOAMIFS={program}"]
    variables.append(f"FUSERMOUNT3PROXY_FDPASSING_SOCKPATH={broker.socket}")
    # Its own mount namespace keeps the stand-ins, and the remains of a failure, from the host.
    unshare = ["unshare", "--mount", "--propagation", "private"]
    result = run(["env", *variables, *unshare, "sh", "-ec", HOST_SCRIPT], check=False)
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "ok=yes"), result.stdout + result.stderr
    assert "whoami uid=1000 gid=1000 pid=" in result.stdout


# A broker in a container ---------------------------------------------------------------------------------------

PACKAGES = ("broker/fusermount3_broker", "fusermount3_proxy")
BROKER_SCRIPT = "from fusermount3_broker.cli.main import main; main()"
CONFIGURATION = """\
state_directory = "/tmp/state"
control_socket = "/tmp/control.sock"
[[socket]]
path = "/run/fusermount3-proxy/broker.sock"
"""


@pytest.fixture
def contained_broker(tmp_path: Path) -> Iterator[Container]:
    """A broker in its own container, privileged, but with its own PID namespace."""
    (tmp_path / "sockets").mkdir()
    (tmp_path / "broker.toml").write_text(CONFIGURATION)
    modules = "/usr/lib/python3/dist-packages"
    volumes = [
        Volume(tmp_path / "sockets", "/run/fusermount3-proxy", "rw"),
        Volume(tmp_path / "broker.toml", "/etc/fusermount3-broker.toml"),
        *(Volume(REPOSITORY / name, f"{modules}/{Path(name).name}") for name in PACKAGES),
    ]
    options = Options(privileged=True, volumes=volumes)
    with Container(image_tag(SYSTEMD), ["python3", "-c", BROKER_SCRIPT, "serve"], options) as container:
        wait_until(lambda: "serving on" in container.logs())
        yield container
        assert "internal error" not in container.logs()


def test_a_broker_without_host_pids_mounts_and_says_once_what_is_missing(
    contained_broker: Container, tmp_path: Path
) -> None:
    volumes = [
        FUSE_STAND_IN,
        Volume(tmp_path / "sockets", "/run/fusermount3-proxy"),
        Volume(PROXY, "/usr/bin/fusermount3"),
        Volume(whoamifs(), "/usr/bin/whoamifs"),
    ]

    def ask(*arguments: str) -> str:
        return contained_broker.exec(["python3", "-c", BROKER_SCRIPT, *arguments]).stdout

    def held() -> list[tuple[int, int]]:
        supervisor = psutil.Process(contained_broker.pid)
        return [(process.num_fds(), len(process.children())) for process in (supervisor, *supervisor.children())]

    before = settled(held)  # it has just begun, and may still be forking the processes that it keeps ready
    for user_namespace in (False, True):
        options = Options(user=USER, user_namespace=user_namespace, volumes=volumes)
        with Container(image_tag(BUSYBOX), options=options) as container:
            program = serve(container)
            seen = container.exec(["head", "-n1", f"{MOUNTPOINT}/whoami"]).stdout
            assert seen == "uid=1000 gid=1000 pid=0\n"
            assert f'"mountpoint": "{MOUNTPOINT}"' in ask("mounts", "--json")
            unmount(container, program)
    assert ask("mounts", "--json") == "[]\n"
    wait_until(lambda: held() == before)

    warnings = [line for line in contained_broker.logs().splitlines() if "see pid 0" in line]
    assert len(warnings) == 1
    assert '"priority": 4' in warnings[0]
    assert "hostPID" in warnings[0]


def test_who_may_trace_processes_sees_no_pids_and_the_log_says_why(run_broker: RunBroker) -> None:
    broker = run_broker()
    with containers(broker) as start:
        for _ in range(2):
            container = start(image_tag(BUSYBOX), extra=("--cap-add", "SYS_PTRACE"))
            program = container.start(["whoamifs", "-f", "/mnt"])
            wait_until(lambda: container.fuse_mounts("/mnt"))  # noqa: B023 - called at once
            assert container.exec(["head", "-n1", "/mnt/whoami"]).stdout == "uid=0 gid=0 pid=0\n"
            container.exec(["fusermount3", "-u", "/mnt"])
            assert program.wait(timeout=20) == 0
    (record,) = broker.records("FUSE programs see pid 0 in requests")
    assert "CAP_SYS_PTRACE" in record["message"]
    assert "hostPID" not in record["message"]


# A broker that is restarted or killed --------------------------------------------------------------------------


def test_a_restart_of_the_broker_loses_no_mount(run_broker: RunBroker) -> None:
    broker = run_broker()
    with containers(broker) as start:
        container = start(image_tag(BUSYBOX), user=USER)
        program = serve(container)
        wait_until(lambda: broker.mounts()[0]["program_pid"])
        listed = broker.mounts()
        assert [mount["mountpoint"] for mount in listed] == [MOUNTPOINT]

        broker.stop()
        check_use(container)
        broker.start()
        check_use(container)
        wait_until(lambda: broker.mounts() == listed)

        stranger = container.exec(["fusermount3", "-u", MOUNTPOINT], user="12345:12345", check=False)
        assert "not found in /etc/mtab" in stranger.stderr
        unmount(container, program)
        assert broker.mounts() == []
        check_probe(container)


def test_what_is_unmounted_while_the_broker_is_away_is_not_listed_afterwards(run_broker: RunBroker) -> None:
    broker = run_broker()
    with containers(broker) as start:
        container = start(image_tag(BUSYBOX), user=USER)
        serve(container)
        broker.stop()
        run(["nsenter", f"--mount=/proc/{container.pid}/ns/mnt", "umount", MOUNTPOINT])
        broker.start()
        assert broker.mounts() == []
        check_probe(container)


def test_a_killed_supervisor_loses_no_mount_and_takes_front_and_mounter_along(run_broker: RunBroker) -> None:
    broker = run_broker()
    with containers(broker) as start:
        container = start(image_tag(BUSYBOX), user=USER)
        program = serve(container)
        family = psutil.Process(broker.process.pid).children(recursive=True)
        broker.process.kill()
        broker.process.wait()
        wait_until(lambda: not any(process.is_running() for process in family))
        check_use(container)

        broker.start()
        assert [mount["mountpoint"] for mount in broker.mounts()] == [MOUNTPOINT]
        unmount(container, program)
        check_probe(container)


def test_a_killed_front_is_replaced_and_loses_no_mount(run_broker: RunBroker) -> None:
    broker = run_broker()
    settle(broker)
    before = Footprint.of(broker)
    with containers(broker) as start:
        container = start(image_tag(BUSYBOX), user=USER)
        program = serve(container)
        broker.front.kill()
        check_use(container)
        unmount(container, program)
        check_probe(container)
    settle(broker)
    assert Footprint.of(broker) == before


def test_a_killed_mounter_is_replaced_and_loses_no_mount(run_broker: RunBroker) -> None:
    broker = run_broker()
    settle(broker)
    before = Footprint.of(broker)
    with containers(broker) as start:
        container = start(image_tag(BUSYBOX), user=USER)
        program = serve(container)
        for restarts in (1, 2):
            broker.mounter.kill()
            check_use(container)
            unmount(container, program)
            wait_until(lambda restarts=restarts: broker.status()["mounter"]["restarts"] == restarts)  # type: ignore[misc]
            program = serve(container)
        unmount(container, program)
        check_probe(container)
    settle(broker)
    assert Footprint.of(broker) == before


def test_every_operation_of_a_killed_mounter_can_be_tried_again(run_broker: RunBroker) -> None:
    broker = run_broker()
    with containers(broker) as start:
        container = start(image_tag(BUSYBOX), user=USER)
        settle(broker)
        for process in broker.mounter.children():
            process.kill()  # the children that wait for an operation
        check_probe(container)
