"""The broker as a systemd service, installed as by a package on a machine of its own: a container that boots."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.conftest import wait_until
from tests.lab.broker import PROXY
from tests.lab.callers import Seen, moments, start_callers
from tests.lab.images import SYSTEMD, image_tag
from tests.lab.podman import Container, Mount, Options
from tests.lab.programs import whoamifs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from subprocess import CompletedProcess

pytestmark = pytest.mark.e2e

SOURCES = Path(__file__).parents[2]
SERVICE = "fusermount3-broker.service"
SOCKET = "fusermount3-broker.socket"
METRICS = "fusermount3-broker-metrics.socket"
SYSUSERS = "fusermount3-broker.sysusers"
CONFIGURATION = "etc/fusermount3-broker.toml"
MOUNTPOINT = "/home/user/mnt"
#: Root as in a container: libfuse can't mount by itself then, and calls fusermount3.
CONTAINER_ROOT = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
#: A mount that its caller never confirms, until its stdin is closed.
UNCONFIRMED = f"""
import os, sys
from fusermount3_proxy import approach, client, wire
request = wire.MountRequest(mountpoint={MOUNTPOINT.encode()!r}, options=b"subtype=unconfirmed")
answer = client.ask(approach.DEFAULT_PATH, request, os.open({MOUNTPOINT!r}, os.O_PATH))
print("mounted", flush=True)
sys.stdin.read()
"""


class Machine:
    """A machine with the broker installed. `user` is an unprivileged user of it."""

    def __init__(self, container: Container) -> None:
        self.container = container

    def run(self, *argv: str, user: str | None = None, check: bool = True) -> CompletedProcess[str]:
        return self.container.exec(argv, user=user, check=check)

    def systemctl(self, *arguments: str, check: bool = True) -> str:
        """Return what systemctl prints."""
        return self.run("systemctl", *arguments, check=check).stdout.strip()

    def property(self, name: str, unit: str = SERVICE) -> str:
        return self.systemctl("show", "--value", f"--property={name}", unit)

    def mount(self, mountpoint: str = MOUNTPOINT, *options: str) -> None:
        """Mount whoamifs as `user`, in the background, and leave it mounted."""
        self.run("mkdir", "-p", mountpoint, user="user")
        self.run("whoamifs", *options, mountpoint, user="user")

    def unmount(self, mountpoint: str = MOUNTPOINT) -> None:
        """Unmount as `user`; the program then ends, unless its filesystem is still in use."""
        programs = self.programs()
        self.run("fusermount3", "-u", mountpoint, user="user")
        wait_until(lambda: len(self.programs()) < len(programs))

    def programs(self) -> list[str]:
        """Return the pids of the running FUSE programs."""
        return self.run("pgrep", "whoamifs", check=False).stdout.split()

    def check_usable(self, mountpoint: str = MOUNTPOINT) -> None:
        """Check that files can be written and read through the mount."""
        self.run("sh", "-c", 'echo works > "$1"/files/f && cat "$1"/files/f', "sh", mountpoint, user="user")
        assert self.run("cat", f"{mountpoint}/whoami", user="user").stdout.startswith("uid=1000 gid=1000 pid=")

    def fuse_mounts(self) -> list[Mount]:
        return self.container.fuse_mounts()

    def listed(self) -> list[str]:
        """Return the mountpoints that the broker lists."""
        mounts: list[dict[str, Any]] = json.loads(self.run("fusermount3-broker", "mounts", "--json").stdout)
        return [mount["mountpoint"] for mount in mounts]

    def journal(self, *matches: str) -> list[dict[str, str]]:
        """Return the service's records in the journal, for example those with "REQUEST_ID=…"."""
        self.run("journalctl", "--sync")
        lines = self.run("journalctl", "--output=json", f"--unit={SERVICE}", *matches).stdout.splitlines()
        return [json.loads(line) for line in lines]

    def messages(self) -> list[str]:
        return [record["MESSAGE"] for record in self.journal()]

    def process_status(self, pid: int) -> dict[str, str]:
        """Return /proc/PID/status of a process."""
        lines = self.run("cat", f"/proc/{pid}/status").stdout.splitlines()
        return dict(line.split(":\t", 1) for line in lines if ":\t" in line)

    def reload(self, configuration: str) -> None:
        """Install this configuration, and return when the service has read it."""
        (self.container.root() / CONFIGURATION).write_text(configuration)
        before = self.count_reloads()
        self.systemctl("reload", SERVICE)
        wait_until(lambda: self.count_reloads() > before)

    def count_reloads(self) -> int:
        return sum(message.startswith("configuration") for message in self.messages())


@pytest.fixture(scope="module")
def installed() -> Iterator[Machine]:
    """A machine that has booted, with all files where a package installs them."""
    options = Options(privileged=True, extra=["--systemd=always"])
    with Container(image_tag(SYSTEMD), ["/sbin/init"], options) as container:
        machine = Machine(container)
        wait_until(lambda: machine.systemctl("is-system-running", check=False) == "running", 60)
        # systemd and udev do this on a machine, but not in a container.
        machine.run("mount", "--make-rshared", "/")
        machine.run("chmod", "0666", "/dev/fuse")
        install(container.root())
        machine.run("systemd-sysusers")
        machine.systemctl("daemon-reload")
        machine.systemctl("enable", "--now", SOCKET)
        yield machine
        assert machine.systemctl("is-system-running") == "running"


def install(root: Path) -> None:
    for package in (SOURCES / "broker/fusermount3_broker", SOURCES / "fusermount3_proxy"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(package, root / "usr/lib/python3/dist-packages" / package.name, ignore=ignore)
    script = root / "usr/bin/fusermount3-broker"
    script.write_text("#!/usr/bin/python3 -I\nfrom fusermount3_broker.cli.main import main\n\nmain()\n")
    script.chmod(0o755)
    for unit in (SERVICE, SOCKET, METRICS):
        shutil.copy(SOURCES / "packaging/systemd" / unit, root / "usr/lib/systemd/system")
    shutil.copy(SOURCES / "packaging/systemd" / SYSUSERS, root / "usr/lib/sysusers.d/fusermount3-broker.conf")
    (root / "usr/bin/fusermount3").rename(root / "usr/bin/fusermount3.genuine")
    shutil.copy(PROXY, root / "usr/bin/fusermount3")
    shutil.copy(whoamifs(), root / "usr/bin/whoamifs")


@pytest.fixture
def machine(installed: Machine) -> Iterator[Machine]:
    """The machine with the service stopped, as after a boot, and the default configuration. A test leaves no mount."""
    installed.systemctl("stop", SERVICE)
    yield installed
    (installed.container.root() / CONFIGURATION).unlink(missing_ok=True)
    left = installed.fuse_mounts(), installed.programs()
    for mount in left[0]:
        installed.run("umount", "--lazy", mount.mountpoint)
    assert left == ([], [])


def test_the_units_have_no_mistake(machine: Machine) -> None:
    result = machine.run("systemd-analyze", "verify", SERVICE, SOCKET, METRICS)
    assert result.stdout + result.stderr == ""


def test_the_service_is_hardened(machine: Machine) -> None:
    text = machine.run("systemd-analyze", "security", "--no-pager", SERVICE).stdout
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", text)
    assert found, text
    print(found[0])
    assert float(found[1]) <= 2.6


def test_its_system_call_filter_lets_the_mounter_copy_a_descriptor(machine: Machine) -> None:
    """systemd counts pidfd_getfd(2) among the calls of debuggers."""
    unit = machine.run("systemctl", "cat", SERVICE).stdout
    filters = [f"--property={line}" for line in unit.splitlines() if line.startswith("SystemCallFilter=")]
    copy = (
        f"import ctypes, os; os._exit(ctypes.CDLL(None).syscall({_PIDFD_GETFD}, os.pidfd_open(os.getpid()), 1, 0) < 0)"
    )
    machine.run("systemd-run", "--pipe", "--wait", "--quiet", *filters, "python3", "-c", copy)


def test_no_process_of_the_service_is_root_and_the_front_has_no_privilege(machine: Machine) -> None:
    machine.systemctl("start", SERVICE)
    status = json.loads(machine.run("fusermount3-broker", "status", "--json").stdout)
    found = {name: machine.process_status(status[name]["pid"]) for name in ("supervisor", "front", "mounter")}
    uid = machine.run("id", "--user", "fusermount3-broker").stdout.strip()
    assert {each["Uid"].split()[0] for each in found.values()} == {uid}
    front = found["front"]
    assert {int(front[name], 16) for name in ("CapPrm", "CapEff", "CapInh", "CapAmb")} == {0}
    assert (front["NoNewPrivs"], front["Seccomp"]) == ("1", "2")
    assert not [message for message in machine.messages() if "is incomplete; missing" in message]


def test_the_first_call_starts_the_service(machine: Machine) -> None:
    assert machine.property("ActiveState") == "inactive"
    machine.mount()
    assert machine.property("ActiveState") == "active"
    assert machine.property("Type") == "notify"
    assert [mount.mountpoint for mount in machine.fuse_mounts()] == machine.listed() == [MOUNTPOINT]
    machine.check_usable()
    machine.unmount()
    assert machine.listed() == []


def test_a_mount_that_hangs_is_called_so_and_can_be_ended(machine: Machine) -> None:
    """The service is not root, and lacks some capabilities."""
    (machine.container.root() / CONFIGURATION).write_text("hung_seconds = 1\n")
    machine.mount()
    (program,) = machine.programs()
    machine.run("kill", "-STOP", program)
    try:
        user = machine.container.start(["stat", f"{MOUNTPOINT}/files/none"], user="user")
        wait_until(lambda: " hung " in machine.run("fusermount3-broker", "mounts").stdout)
        (mount,) = json.loads(machine.run("fusermount3-broker", "mounts", "--json").stdout)
        machine.run("fusermount3-broker", "abort", mount["request_id"])
        assert user.communicate(timeout=20)[1]
        wait_until(lambda: not machine.fuse_mounts())
    finally:
        machine.run("kill", "-KILL", program)


#: Its number on every architecture.
_PIDFD_GETFD = 438
#: As container engines do: a FUSE program sees no pids where processes may trace others.
WITHOUT_PTRACE = ("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-all", "--ambient-caps=-all")


@pytest.mark.parametrize(
    "caller",
    [
        pytest.param([], id="user"),
        pytest.param(["unshare", "--user", "--map-root-user", "--mount", *CONTAINER_ROOT], id="root-of-user-namespace"),
        pytest.param(
            [
                *("unshare", "--user", "--map-user=1000", "--map-group=1000", "--keep-caps"),
                *("--mount", "--pid", "--fork", "--mount-proc", *WITHOUT_PTRACE),
            ],
            id="user-of-user-and-pid-namespace",
        ),
    ],
)
def test_a_user_mounts_and_unmounts(machine: Machine, caller: list[str]) -> None:
    result = machine.run(*caller, "whoamifs", "--probe", MOUNTPOINT, user="user", check=False)
    assert "ok=yes" in result.stdout.splitlines(), result.stdout


def test_root_mounts_and_unmounts_in_a_directory_that_is_private_to_a_user(machine: Machine) -> None:
    machine.run("install", "--directory", "--mode=0700", "/home/user/private", "/home/user/private/mnt", user="user")
    result = machine.run(*CONTAINER_ROOT, "whoamifs", "--probe", "/home/user/private/mnt", check=False)
    assert "ok=yes" in result.stdout.splitlines(), result.stdout


def test_a_source_too_long_for_fsconfig_is_mounted(machine: Machine) -> None:
    machine.mount(MOUNTPOINT, "-o", "fsname=" + 300 * "s")
    machine.check_usable()
    assert [mount.source for mount in machine.fuse_mounts()] == [300 * "s"]
    machine.unmount()
    assert not machine.fuse_mounts()


def test_another_hardened_service_mounts_and_unmounts(machine: Machine) -> None:
    hardening = ["--property=ProtectSystem=strict", "--property=PrivateTmp=yes", "--property=NoNewPrivileges=yes"]
    command = ["sh", "-c", "mkdir /tmp/mnt && exec whoamifs --probe /tmp/mnt"]
    start = ["systemd-run", "--wait", "--pipe", "--quiet", "--collect", "--uid=user"]
    result = machine.run(*start, *hardening, *command, check=False)
    assert "ok=yes" in result.stdout.splitlines(), result.stdout + result.stderr


@pytest.mark.parametrize("mountpoint", [MOUNTPOINT, "/tmp/mnt", "/var/tmp/mnt", "/dev/shm/mnt"])
def test_a_restart_leaves_a_mount_alive_and_to_its_user(machine: Machine, mountpoint: str) -> None:
    machine.mount(mountpoint)
    machine.systemctl("restart", SERVICE)
    machine.check_usable(mountpoint)
    assert machine.listed() == [mountpoint]
    machine.unmount(mountpoint)
    assert machine.listed() == []


def test_systemd_keeps_fusectl_over_a_restart(machine: Machine) -> None:
    machine.systemctl("start", SERVICE)
    for _ in range(2):
        wait_until(lambda: machine.property("NFileDescriptorStore") == "1")
        machine.systemctl("restart", SERVICE)
    assert not [message for message in machine.messages() if "internal error" in message]


def test_a_restart_does_not_wait_for_a_program_that_hangs(machine: Machine) -> None:
    machine.mount()
    machine.run("pkill", "--signal", "STOP", "whoamifs")
    begun = time.monotonic()
    machine.systemctl("restart", SERVICE)
    assert time.monotonic() - begun < 30, "systemd's limit is 90"
    machine.run("pkill", "--signal", "CONT", "whoamifs")
    machine.unmount()


def test_a_stop_leaves_a_mount_alive(machine: Machine) -> None:
    machine.mount()
    machine.systemctl("stop", SERVICE)
    machine.check_usable()
    assert machine.property("ActiveState") == "inactive"
    machine.unmount()
    assert machine.property("ActiveState") == "active", "the call to unmount starts it again"


def test_a_program_still_sees_its_descriptor_as_dev_fuse_after_a_restart(machine: Machine) -> None:
    machine.mount()
    machine.systemctl("restart", SERVICE)
    (program,) = machine.programs()
    opened = machine.run("sh", "-c", f"readlink /proc/{program}/fd/*").stdout.split()
    assert "/dev/fuse" in opened
    machine.unmount()


def test_a_request_that_comes_while_the_service_restarts_is_served(machine: Machine) -> None:
    machine.systemctl("start", SERVICE)
    machine.systemctl("restart", "--no-block", SERVICE)
    machine.mount()
    machine.check_usable()
    machine.unmount()


def test_a_request_that_comes_before_the_socket_is_served(machine: Machine) -> None:
    machine.systemctl("stop", SOCKET)
    program = machine.container.start(["whoamifs", MOUNTPOINT], user="user")
    time.sleep(0.5)
    assert (program.poll(), machine.fuse_mounts()) == (None, [])
    machine.systemctl("start", SOCKET)
    assert program.wait(timeout=30) == 0
    machine.check_usable()
    machine.unmount()


def test_a_killed_supervisor_is_started_again_and_knows_its_mounts(machine: Machine) -> None:
    machine.mount()
    killed, restarts = machine.property("MainPID"), int(machine.property("NRestarts"))
    machine.systemctl("kill", "--kill-who=main", "--signal=KILL", SERVICE)
    wait_until(lambda: machine.property("ActiveState") == "active" and machine.property("MainPID") != killed)
    assert int(machine.property("NRestarts")) == restarts + 1
    machine.check_usable()
    assert machine.listed() == [MOUNTPOINT]
    machine.unmount()


def test_a_killed_supervisor_is_started_again_when_what_was_begun_is_over(machine: Machine) -> None:
    client = machine.container.start(["python3", "-c", UNCONFIRMED], user="user")
    assert client.stdout and client.stdout.readline() == "mounted\n"
    killed, begun = machine.property("MainPID"), time.monotonic()
    machine.systemctl("kill", "--kill-who=main", "--signal=KILL", SERVICE)
    wait_until(lambda: machine.property("ActiveState") == "active" and machine.property("MainPID") != killed, 60)
    assert time.monotonic() - begun > 9, "deadlines.commit is over"
    client.communicate(timeout=10)
    wait_until(lambda: not machine.fuse_mounts())
    assert machine.listed() == []


def test_a_mount_that_was_not_finished_when_the_front_was_killed_is_rolled_back(machine: Machine) -> None:
    client = machine.container.start(["python3", "-c", UNCONFIRMED], user="user")
    assert client.stdout and client.stdout.readline() == "mounted\n"
    assert [mount.fstype for mount in machine.fuse_mounts()] == ["fuse.unconfirmed"]
    # A mere kill of the mounter would be quicker than the mounter, which is stopped now. What systemd terminates, it
    # also continues.
    machine.run("pkill", "--signal", "STOP", "--full", "fusermount3_broker.mounter.daemon")
    machine.systemctl("kill", "--kill-who=main", "--signal=KILL", SERVICE)
    wait_until(lambda: not machine.fuse_mounts())
    client.communicate(timeout=10)
    wait_until(lambda: machine.property("ActiveState") == "active")
    assert machine.listed() == []


@pytest.mark.parametrize("command", ["restart", "kill --kill-who=main --signal=KILL"])
def test_callers_notice_nothing_of_restarts_under_load(machine: Machine, command: str) -> None:
    machine.systemctl("start", SERVICE)
    place = Path("/run/fusermount3-proxy/broker.sock"), Path("/tmp/load")
    pid = machine.container.pid
    callers = start_callers(4, 9, *place, program=Path("/usr/bin/fusermount3"), namespace_of=pid)
    for left in moments(8, 0.5, 2, seed=1):
        if left > 0:
            wait_until(lambda: machine.property("ActiveState") == "active")
            machine.systemctl(*command.split(), SERVICE)
    seen = Seen.together(caller.result() for caller in callers)
    assert len(seen.mounts) > len(callers), "there was no load"
    assert seen.problems() == []
    wait_until(lambda: machine.property("ActiveState") == "active")
    assert machine.listed() == []


def test_a_reload_puts_the_configuration_into_force(machine: Machine) -> None:
    machine.systemctl("start", SERVICE)
    refused = machine.run("whoamifs", "-o", "allow_other", MOUNTPOINT, user="user", check=False)
    assert "option allow_other only allowed if 'user_allow_other' is set" in refused.stderr
    machine.reload("user_allow_other = true\n")
    machine.mount(MOUNTPOINT, "-o", "allow_other")
    assert machine.run("cat", f"{MOUNTPOINT}/whoami").stdout.startswith("uid=0 ")
    machine.unmount()


def test_a_reload_of_a_broken_configuration_leaves_the_old_one_and_says_so(machine: Machine) -> None:
    machine.systemctl("start", SERVICE)
    machine.reload("user_allow_other = true\n")
    (machine.container.root() / CONFIGURATION).write_text("user_alow_other = false\n")
    failed = machine.run("systemctl", "reload", SERVICE, check=False)
    assert failed.returncode == 1
    mistake = f"Error: /{CONFIGURATION}:1: unknown key 'user_alow_other', did you mean 'user_allow_other'?"
    wait_until(lambda: mistake in machine.messages())
    assert machine.property("ActiveState") == "active"
    before = machine.count_reloads()
    machine.systemctl("kill", "--kill-who=main", "--signal=HUP", SERVICE)  # which does not check first
    wait_until(lambda: machine.count_reloads() > before)
    record = machine.journal("PRIORITY=3")[-1]
    assert "unknown key 'user_alow_other', did you mean 'user_allow_other'?" in record["MESSAGE"]
    assert "the old one stays in force" in record["MESSAGE"]
    machine.mount(MOUNTPOINT, "-o", "allow_other")
    machine.unmount()


def test_a_service_that_cannot_start_is_tried_until_it_can(machine: Machine) -> None:
    (machine.container.root() / CONFIGURATION).write_text("user_alow_other = false\n")
    client = machine.container.start(["whoamifs", MOUNTPOINT], user="user")
    wait_until(lambda: int(machine.property("NRestarts")) >= 1)
    (machine.container.root() / CONFIGURATION).unlink()
    assert client.wait(timeout=30) == 0
    machine.unmount()


def ask(machine: Machine, path: str) -> str:
    """Return the answer of the machine's metrics port, from status line to body."""
    request = f"GET {path} HTTP/1.1\r\nHost: broker\r\n\r\n"
    code = f"""
import socket
with socket.create_connection(("127.0.0.1", 9467), 20) as connection:
    connection.sendall({request!r}.encode())
    print(connection.makefile().read())
"""
    return machine.run("python3", "-c", code, user="user").stdout


@pytest.fixture
def watched(machine: Machine) -> Iterator[Machine]:
    """The machine with the metrics socket, enabled as docs/operations.md says."""
    assert machine.property("UnitFileState", METRICS) == "disabled", "off unless somebody wants it"
    machine.systemctl("start", SERVICE)
    machine.systemctl("enable", METRICS)
    machine.systemctl("stop", SOCKET, SERVICE)
    machine.systemctl("start", METRICS, SOCKET)
    yield machine
    machine.systemctl("disable", METRICS)
    machine.systemctl("stop", METRICS, SERVICE)
    machine.systemctl("start", SOCKET)


def test_metrics_are_told_on_the_port_that_systemd_listens_on(watched: Machine) -> None:
    assert watched.property("ActiveState") == "inactive"
    assert ask(watched, "/healthz").startswith("HTTP/1.1 200 OK\n"), "the first question starts the service"
    assert watched.property("ActiveState") == "active"
    watched.mount()
    wait_until(lambda: 'fusermount3_broker_mounts{state="live"} 1.0' in ask(watched, "/metrics"))
    assert 'fusermount3_broker_requests_total{operation="mount",result="mounted"} 1.0' in ask(watched, "/metrics")
    watched.systemctl("restart", SERVICE)
    watched.check_usable()
    watched.unmount()
    assert ask(watched, "/healthz").endswith("\n\nok\n\n")


def test_a_mounter_that_is_stopped_is_not_healthy(watched: Machine) -> None:
    ask(watched, "/healthz")
    watched.run("pkill", "--signal", "STOP", "--full", "fusermount3_broker.mounter.daemon")
    wait_until(lambda: "503 Service Unavailable" in ask(watched, "/healthz"))
    watched.run("pkill", "--signal", "CONT", "--full", "fusermount3_broker.mounter.daemon")
    wait_until(lambda: "200 OK" in ask(watched, "/healthz"))


def test_a_unix_socket_for_metrics_needs_no_unit(machine: Machine) -> None:
    (machine.container.root() / CONFIGURATION).write_text('metrics = "/run/fusermount3-broker/metrics.sock"\n')
    machine.systemctl("start", SERVICE)
    code = """
import socket
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect("/run/fusermount3-broker/metrics.sock")
    connection.sendall(b"GET /healthz HTTP/1.1\\r\\nHost: broker\\r\\n\\r\\n")
    print(connection.makefile().read())
"""
    assert machine.run("python3", "-c", code).stdout.endswith("\n\nok\n\n")
    assert machine.run("python3", "-c", code, user="user", check=False).returncode != 0


def test_a_port_that_the_service_cannot_open_names_the_unit_that_can(machine: Machine) -> None:
    (machine.container.root() / CONFIGURATION).write_text('metrics = "127.0.0.1:9467"\n')
    machine.systemctl("start", "--no-block", SERVICE)
    wait_until(lambda: any("see fusermount3-broker-metrics.socket" in message for message in machine.messages()))
    (machine.container.root() / CONFIGURATION).unlink()
    wait_until(lambda: machine.property("ActiveState") == "active")


def test_the_journal_has_the_record_of_what_a_user_was_told(machine: Machine) -> None:
    refused = machine.run("whoamifs", "-o", "allow_other", MOUNTPOINT, user="user", check=False)
    told = re.search(r"broker request ([0-9a-f]+)", refused.stderr)
    assert told, refused.stderr
    (record,) = machine.journal(f"REQUEST_ID={told[1]}")
    who = "uid 1000( in [^:]+)?"
    said = rf"refused to mount on {MOUNTPOINT} for {who}: {re.escape(record['TEXT'])} \(request {told[1]}\)"
    assert re.fullmatch(said, record["MESSAGE"])
    assert record["EVENT"] == "mount refused"
    assert record["CALLER_UID"] == record["CALLER_GID"] == "1000"
    assert record["CALLER_COMMAND"] == "fusermount3"
    assert record["MOUNTPOINT"] == MOUNTPOINT
    assert record["TEXT"] in refused.stderr


def test_a_mountpoint_makes_no_line_of_its_own_in_the_journal(machine: Machine) -> None:
    forged = "/home/user/a\nfusermount3-broker: all is well\x1b[2J"
    machine.run("mkdir", "-p", forged, user="user")
    refused = machine.run("whoamifs", "-o", "allow_other", forged, user="user", check=False)
    told = re.search(r"broker request ([0-9a-f]+)", refused.stderr)
    assert told, refused.stderr
    machine.run("journalctl", "--sync")
    shown = machine.run("journalctl", f"--unit={SERVICE}", "--output=cat", f"REQUEST_ID={told[1]}").stdout
    assert shown.count("\n") == 1
    assert shown.startswith(r"refused to mount on '/home/user/a\nfusermount3-broker: all is well\x1b[2J' for uid 1000")
    (record,) = machine.journal(f"REQUEST_ID={told[1]}")
    assert record["MOUNTPOINT"] in (forged, [*forged.encode()]), "journalctl gives unprintable values as bytes"


def test_the_journal_has_the_record_of_a_mount(machine: Machine) -> None:
    machine.mount()
    (mounted,) = json.loads(machine.run("fusermount3-broker", "mounts", "--json").stdout)
    (record,) = machine.journal(f"REQUEST_ID={mounted['request_id']}")
    assert record["MESSAGE"].startswith(f"mounted fuse.whoamifs on {MOUNTPOINT} for uid 1000 in ")
    assert (record["EVENT"], record["TYPE"], record["CALLER_UID"]) == ("mount mounted", "fuse.whoamifs", "1000")
    machine.unmount()
