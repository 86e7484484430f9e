"""The sandboxes of the broker's processes: front and plugin are denied all that they don't need; the mounter is not."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import pwd
import signal
import socket
import sqlite3
import subprocess
import sys
import termios
import threading
from errno import EACCES, ENOSYS, EPERM
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.mounter import daemon, filesystem
from fusermount3_broker.service import sandbox
from tests.e2e.conftest import let_users_in, settle
from tests.e2e.hostile import O_PATH, Client, in_private_namespace, in_process, mount_request, wait_for_mounts
from tests.lab.kernel import kernel_has

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.lab.broker import Broker

pytestmark = pytest.mark.e2e

#: A uid and gid that no account has.
NOBODYS = 64321
_libc = ctypes.CDLL(None, use_errno=True)


def bits(*capabilities: int) -> int:
    return sum(1 << each for each in capabilities)


def status_of(pid: int | str) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


# The front -----------------------------------------------------------------------------------------------------


def called(name: str, *arguments: object) -> Callable[[], object]:
    """Return a function that calls a function of libc; it raises OSError if that returns -1."""

    def call() -> None:
        ctypes.set_errno(0)
        if getattr(_libc, name)(*arguments) == -1:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    return call


def system_call(number: int, *arguments: int) -> Callable[[], object]:
    return called("syscall", number, *arguments)


def owned_by_a_signal() -> None:
    """Have the parent killed through the signal of a descriptor, without kill(2)."""
    ours, _ = socket.socketpair()
    fcntl.fcntl(ours, fcntl.F_SETOWN, os.getppid())


def signal_of_choice() -> None:
    ours, _ = socket.socketpair()
    fcntl.fcntl(ours, fcntl.F_SETSIG, signal.SIGKILL)


def connect_to_another_service() -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(b"\0nobody listens here")


def executable_memory() -> None:
    mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)


def type_into_the_terminal() -> None:
    ours, _ = socket.socketpair()
    fcntl.ioctl(ours, termios.TIOCSTI, b"x")


#: By attempt: a function that makes it, and the errno with which it fails. System calls given by number are those with
#: the same number on every machine.
FORBIDDEN: dict[str, tuple[Callable[[], object], int]] = {
    "read a file": (lambda: Path("/etc/passwd").read_bytes(), EACCES),
    "list a directory": (lambda: list(Path("/etc").iterdir()), EACCES),
    "write where all may": (lambda: Path("/tmp/written").write_bytes(b""), EACCES),
    "write in /proc": (lambda: Path("/proc/self/comm").write_bytes(b"x"), EACCES),
    "make a directory": (lambda: Path("directory").mkdir(), EPERM),
    "make a link": (lambda: Path("b").symlink_to("a"), EPERM),
    "make a device": (lambda: os.mknod("node"), EPERM),
    "change a mode": (lambda: Path("/tmp").chmod(0o1777), EPERM),
    "change an owner": (lambda: os.chown("/tmp", 0, 0), EPERM),
    "change directory": (lambda: os.chdir("/"), EPERM),
    "fork": (os.fork, EPERM),
    "execute": (lambda: os.execv("/bin/true", ["true"]), EPERM),
    "spawn": (lambda: os.posix_spawn("/bin/true", ["true"], {}), EPERM),
    "send a signal": (lambda: os.kill(os.getppid(), 0), EPERM),
    "send a signal by a pidfd": (lambda: signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 0), EPERM),
    "send a signal by a descriptor": (owned_by_a_signal, EPERM),
    "send any signal by a descriptor": (signal_of_choice, EPERM),
    "trace": (called("ptrace", 16, os.getppid(), 0, 0), EPERM),
    "read memory of another": (called("process_vm_readv", os.getppid(), 0, 0, 0, 0, 0), EPERM),
    "take descriptors of another": (lambda: system_call(438, os.pidfd_open(os.getppid()), 0, 0)(), EPERM),
    "connect to another service": (connect_to_another_service, EPERM),
    "open a TCP socket": (lambda: socket.socket(socket.AF_INET), EPERM),
    "open a netlink socket": (lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW), EPERM),
    "bind a socket": (lambda: socket.socket(socket.AF_UNIX).bind(b"\0name"), EPERM),
    "become somebody": (lambda: os.setuid(0), EPERM),
    "be in a group": (lambda: os.setgroups([0]), EPERM),
    "have capabilities": (lambda: syscalls.capset(syscalls.CAP_SYS_ADMIN), EPERM),
    "be dumpable": (lambda: syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1), EPERM),
    "unshare": (lambda: syscalls.unshare(syscalls.CLONE_NEWUSER), EPERM),
    "join a namespace": (lambda: syscalls.setns(os.pidfd_open(os.getppid()), syscalls.CLONE_NEWNS), EPERM),
    "mount": (lambda: syscalls.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None), EPERM),
    "unmount": (lambda: syscalls.umount2(b"/tmp", syscalls.MNT_DETACH), EPERM),
    "open a filesystem": (lambda: syscalls.fsopen(b"fuse", 0), EPERM),
    "move a mount": (lambda: syscalls.move_mount(0, b"", 0, b"", 0), EPERM),
    "change a root": (lambda: os.chroot("/"), EPERM),
    "have executable memory": (executable_memory, EPERM),
    "type into the terminal": (type_into_the_terminal, EPERM),
    "begin io_uring": (system_call(425, 1, 0), EPERM),
    "clone with flags in memory": (system_call(435, 0, 0), ENOSYS),
    "lock in memory": (called("mlockall", 1), EPERM),
    "log to the kernel": (called("klogctl", 10, 0, 0), EPERM),
    "change the host's name": (called("sethostname", b"x", 1), EPERM),
    "set a priority": (lambda: os.setpriority(os.PRIO_PROCESS, 0, -20), EPERM),
}


def confined(directory: Path, body: Callable[[], object]) -> None:
    """Run `body` in a process that has entered the front's sandbox; `directory` is its state directory."""

    def enter() -> None:
        os.chdir(directory)
        proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
        missing = sandbox.enter(directory, proc)
        assert "Landlock" not in missing
        assert "libseccomp" not in missing
        body()

    in_process(enter)


@pytest.mark.parametrize("attempt, errno", FORBIDDEN.values(), ids=FORBIDDEN.keys())
def test_the_front_cannot(attempt: Callable[[], object], errno: int, tmp_path: Path) -> None:
    def body() -> None:
        try:
            attempt()
        except OSError as error:
            assert error.errno == errno, error
        else:
            raise AssertionError("it can")

    confined(tmp_path, body)


#: Attempts that change nothing where they succeed, used to show that the sandbox is what makes them fail.
HARMLESS = [
    "read a file",
    "list a directory",
    "fork",
    "send a signal",
    "send a signal by a descriptor",
    "send any signal by a descriptor",
    "connect to another service",
    "open a TCP socket",
    "be dumpable",
    "have executable memory",
    "make a directory",
    "begin io_uring",
]


@pytest.mark.parametrize("name", HARMLESS)
def test_without_the_sandbox_that_is_no_matter_of_permission(name: str, tmp_path: Path) -> None:
    def body() -> None:
        os.chdir(tmp_path)
        parent = os.getpid()
        try:
            FORBIDDEN[name][0]()
        except OSError as error:
            assert error.errno not in (EPERM, EACCES), error
        finally:
            if os.getpid() != parent:
                os._exit(0)  # of the fork

    in_process(body)


def test_the_front_can_do_its_work(tmp_path: Path) -> None:
    """What the front needs later, after a caller's first message."""
    with contextlib.suppress(KeyError):  # the machine has no such account: then the front stays root
        account = pwd.getpwnam("fusermount3-broker")
        let_users_in(tmp_path)
        os.chown(tmp_path, account.pw_uid, account.pw_gid)

    def body() -> None:
        with sqlite3.connect(tmp_path / "mounts.sqlite") as database:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("CREATE TABLE t (c)")
        (tmp_path / "mounts.sqlite").rename(tmp_path / "damaged")
        assert Path(f"/proc/{os.getppid()}/cgroup").read_text()
        thread = threading.Thread(target=os.getpid)
        thread.start()
        thread.join()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        socket.send_fds(ours, [b"x"], [theirs.fileno()])
        assert theirs.recv(1) == b"x"
        os.close(os.pidfd_open(os.getppid()))

    confined(tmp_path, body)


def test_the_front_has_no_capability_and_can_never_have_one(tmp_path: Path) -> None:
    def body() -> None:
        status = status_of("self")
        assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")

    confined(tmp_path, body)


@pytest.mark.parametrize("there", [True, False], ids=["with the account", "without it"])
def test_the_front_is_its_own_user_where_there_is_one(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`getpwnam` is replaced, since the test machine may have no such account."""

    def getpwnam(name: str) -> pwd.struct_passwd:
        assert name == "fusermount3-broker"
        if not there:
            raise KeyError(name)
        return pwd.struct_passwd((name, "x", NOBODYS, NOBODYS, "", "/", "/bin/false"))

    monkeypatch.setattr("fusermount3_broker.service.sandbox.pwd.getpwnam", getpwnam)
    uid = NOBODYS if there else 0

    def body() -> None:
        status = status_of("self")  # real, effective, saved, and filesystem uid
        assert status["Uid"].split() == status["Gid"].split() == 4 * [str(uid)]
        assert os.getgroups() == ([] if there else before)

    before = os.getgroups()
    if there:
        let_users_in(tmp_path)
        os.chown(tmp_path, NOBODYS, NOBODYS)
    confined(tmp_path, body)


# The CSI plugin ------------------------------------------------------------------------------------------------


def confined_as_plugin(directory: Path, body: Callable[[], object]) -> None:
    """Run `body` in a process that has entered the plugin's sandbox; `directory` is the directory of its socket."""

    def enter() -> None:
        os.chdir(directory)
        assert sandbox.enter_as_plugin(directory) == ""
        body()

    in_process(enter)


def bind(path: str) -> None:
    socket.socket(socket.AF_UNIX).bind(path)


#: As for the front, except that the plugin may make a socket: in one directory, where it may make nothing else.
FORBIDDEN_TO_THE_PLUGIN = {
    **{name: attempt for name, attempt in FORBIDDEN.items() if name != "bind a socket"},
    "make a socket elsewhere": (lambda: bind("/tmp/no.sock"), EACCES),
    "make a file beside its socket": (lambda: Path("file").write_bytes(b""), EACCES),
    "read a file beside its socket": (lambda: Path("secret").read_bytes(), EACCES),
}


@pytest.mark.parametrize("attempt, errno", FORBIDDEN_TO_THE_PLUGIN.values(), ids=FORBIDDEN_TO_THE_PLUGIN.keys())
def test_the_plugin_cannot(attempt: Callable[[], object], errno: int, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("")

    def body() -> None:
        try:
            attempt()
        except OSError as error:
            assert error.errno == errno, error
        else:
            raise AssertionError("it can")

    confined_as_plugin(tmp_path, body)


def test_the_plugin_makes_and_removes_its_socket(tmp_path: Path) -> None:
    def body() -> None:
        bind("csi.sock")
        Path("csi.sock").unlink()

    confined_as_plugin(tmp_path, body)


# The mounter ---------------------------------------------------------------------------------------------------


def test_the_mounter_has_its_capabilities_and_no_others(broker: Broker) -> None:
    status = status_of(broker.mounter.pid)
    wanted = bits(*daemon.CAPABILITIES)
    assert {int(status[name], 16) for name in ("CapPrm", "CapEff", "CapBnd")} == {wanted}
    assert {int(status[name], 16) for name in ("CapInh", "CapAmb")} == {0}
    assert status["NoNewPrivs"] == "1"


def test_the_front_of_a_broker_that_runs_has_entered_its_sandbox(broker: Broker) -> None:
    status = status_of(broker.front.pid)
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


def mount_namespace_of(pid: int) -> int:
    """Return the inode of the process's mount namespace; 0 if it has ended, as a spare child may that is replaced."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/ns/mnt").stat().st_ino
    return 0


@pytest.mark.parametrize("uid", [0, 1000])
@pytest.mark.parametrize("is_plain", [True, False])
def test_a_child_that_is_among_a_callers_files_has_given_up_what_it_needs_no_more(
    is_plain: bool, uid: int, broker: Broker, tmp_path: Path
) -> None:
    let_users_in(tmp_path)
    os.chown(tmp_path, uid, uid)
    is_plain &= kernel_has("statmount(2)")
    wanted = [syscalls.CAP_SYS_ADMIN, *([] if is_plain else [syscalls.CAP_SETUID, syscalls.CAP_SETGID])]
    wanted += [] if uid else [syscalls.CAP_DAC_READ_SEARCH]
    options = b"" if is_plain else b"fsname=" + b"x" * (filesystem.LONGEST_STRING + 1)

    def body() -> None:
        own = Path("/proc/self/ns/mnt").stat().st_ino
        with Client(broker, uid) as client:
            client.send(mount_request(tmp_path, options), os.open(tmp_path, O_PATH))
            assert (reply := client.reply()) is not None
            assert reply.errno == 0, reply.text
            (child,) = [each.pid for each in broker.mounter.children() if mount_namespace_of(each.pid) == own]
            status = status_of(child)
            assert {int(status[name], 16) for name in ("CapPrm", "CapEff")} == {bits(*wanted)}
            assert {int(status[name], 16) for name in ("CapInh", "CapAmb")} == {0}
            assert Path(f"/proc/{child}/exe").readlink().name.startswith("plain_call" if is_plain else "python")
            assert status["Uid"].split()[3] == str(uid)
        wait_for_mounts([])

    in_private_namespace(body)


LOOK_INTO = """
import os, sys
pid = int(sys.argv[1])
os.setgroups([]); os.setresgid(0, 0, 0)
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(38, 1, 0, 0, 0)
header, none = (ctypes.c_uint * 2)(0x20080522, 0), (ctypes.c_uint * 6)()
assert libc.capset(header, none) == 0
links = ["cwd", "ns/user", "ns/mnt", *(f"fd/{number}" for number in range(64))]
for name in ("mem", "environ", "maps", *links):
    try:
        os.readlink(f"/proc/{pid}/{name}") if name in links else open(f"/proc/{pid}/{name}", "rb").read(1)
    except (PermissionError, FileNotFoundError):
        continue
    sys.exit(f"{name} of {pid} is open")
"""


def test_the_same_uid_does_not_look_into_the_mounter_without_its_capabilities(broker: Broker) -> None:
    """Where the front has no account of its own, it has the mounter's uid."""
    settle(broker)
    for process in (broker.mounter, *broker.mounter.children()):
        if psutil.pid_exists(process.pid):
            subprocess.run([sys.executable, "-c", LOOK_INTO, str(process.pid)], check=True)
