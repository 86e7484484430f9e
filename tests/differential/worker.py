"""The process that runs the cases of one side, one after the other, in its own namespaces.

It is process 1 of a PID namespace, and its root is an overlay over a Debian root filesystem: leftovers of the cases
disappear with it. A case takes a few milliseconds: mount a fresh tmpfs, fill it with the tree, fork, make the call,
look at the results, and remove the tree and everything mounted on it. The worker exchanges pickles with its parent
over a socket.

    python -m tests.differential.worker DESCRIPTOR TREE SCRATCH HELPER POLICY=DIRECTORY ...

TREE is the root filesystem, SCRATCH an empty directory. HELPER replaces the fusermount3 of the tree; the empty string
keeps the genuine one. Each DIRECTORY contains the socket of a broker with that policy.
"""

# This module works with descriptors and bytes, one system call at a time.
# ruff: noqa: PTH101, PTH102, PTH103, PTH104, PTH106, PTH108, PTH123, PTH208, PTH211

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import pickle
import re
import select
import shutil
import signal
import socket
import stat
import struct
import sys
import time
import traceback
from typing import TYPE_CHECKING

from tests.differential.model import (
    COMM_FD,
    POLICIES,
    PROGRAM,
    USER,
    WORK,
    Case,
    Comm,
    Message,
    MountLine,
    Observation,
    Policy,
    Step,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS = 0x00020000
CLONE_NEWPID = 0x20000000
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG = 1
PR_CAPBSET_DROP = 24
CAP_SYS_ADMIN = 21

HELPER = b"/usr/bin/fusermount3"
FUSE_DEVICE = os.makedev(10, 229)
SOCKETS = "/run/brokers"

#: Seconds in which a call must end or become a watcher, and in which a watcher must end without its FUSE program.
PATIENCE = 15.0
#: Seconds in which the mount of a genuine helper's failed call is gone, if it goes: the helper has ended by then.
ROLLED_BACK = 0.5


# System calls ----------------------------------------------------------------------------------------------------


def check(result: int, name: str = "") -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


def unshare(flags: int) -> None:
    check(_libc.unshare(flags))


def mount(source: str, target: str, kind: str | None, flags: int = 0, data: str | None = None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, data)]
    check(_libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), target)


def umount(target: bytes) -> None:
    check(_libc.umount2(target, MNT_DETACH), os.fsdecode(target))


def execve(path: bytes, argv: tuple[bytes, ...], environment: list[bytes]) -> None:
    """Like `os.execve`, but allow an empty first argument."""
    strings = ctypes.c_char_p * (len(argv) + 1), ctypes.c_char_p * (len(environment) + 1)
    check(_libc.execve(path, strings[0](*argv, None), strings[1](*environment, None)))


# The namespaces --------------------------------------------------------------------------------------------------


def enter(tree: str, scratch: str, helper: str, sockets: list[str]) -> None:
    """Make an overlay over `tree` the root of this process only."""
    global PROC
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", scratch, "tmpfs")
    for name in ("upper", "work", "root"):
        os.mkdir(f"{scratch}/{name}")
    root = f"{scratch}/root"
    mount("overlay", root, "overlay", 0, f"lowerdir={tree},upperdir={scratch}/upper,workdir={scratch}/work")
    if helper:
        os.unlink(f"{root}{os.fsdecode(HELPER)}")
        shutil.copy(helper, f"{root}{os.fsdecode(HELPER)}")
    mount("proc", f"{root}/proc", "proc")
    mount("tmpfs", f"{root}/dev", "tmpfs", 0, "mode=0755")
    for name, device in (
        ("null", os.makedev(1, 3)),
        ("full", os.makedev(1, 7)),
    ):  # glibc needs both for a setuid program
        os.mknod(f"{root}/dev/{name}", stat.S_IFCHR | 0o666, device)
        os.chmod(f"{root}/dev/{name}", 0o666)
    for each in sockets:
        policy, _, directory = each.partition("=")
        os.makedirs(f"{root}{SOCKETS}/{policy}")
        mount(directory, f"{root}{SOCKETS}/{policy}", None, MS_BIND)
    os.makedirs(f"{root}/etc/fusermount3-proxy")
    os.mkdir(f"{root}{os.fsdecode(WORK)}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{root}/etc/mtab")
    os.chdir(root)
    check(_libc.pivot_root(b".", b"."))
    umount(b".")
    os.chdir("/")
    os.umask(0)
    PROC = os.open("/proc", os.O_PATH | os.O_CLOEXEC)


def read_proc(name: str) -> bytes:
    """Return the content of a file of /proc, even if a case has mounted over /proc."""
    with open(os.open(name, os.O_RDONLY, dir_fd=PROC), "rb") as file:
        return file.read()


def mounts() -> list[MountLine]:
    """Return the mounts of this namespace (proc_pid_mountinfo(5)); no mount of ours has optional fields."""
    lines = [line.split(b" ") for line in read_proc("self/mountinfo").split(b"\n")[:-1]]
    return [MountLine(word[3], word[4], word[5], *word[7:10]) for word in lines]


def unescaped(path: bytes) -> bytes:
    """Return a path of mountinfo unescaped: mountinfo writes blanks, newlines and backslashes in octal."""
    return re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), path)


def processes() -> list[int]:
    """Return the processes of this PID namespace that have not ended, except this one."""
    proc = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=PROC)
    names = os.listdir(proc)
    os.close(proc)
    pids = [int(name) for name in names if name.isdigit() and name != "1"]
    return [pid for pid in pids if status_of(pid) not in ("Z", "")]


def status_of(pid: int) -> str:
    """Return the state letter of proc_pid_stat(5), or an empty string if there is no such process."""
    try:
        return chr(read_proc(f"{pid}/stat").rpartition(b") ")[2][0])
    except (FileNotFoundError, ProcessLookupError):
        return ""


def name_of(pid: int) -> bytes:
    return read_proc(f"{pid}/comm").rstrip(b"\n")


# The tree --------------------------------------------------------------------------------------------------------


def populate() -> None:
    """Make the tree of a case, in the working directory: mountpoints of every kind."""
    for name, mode, owner in (
        ("dir", 0o755, USER),
        ("dir/below", 0o755, USER),  # so that `dir` is not empty
        ("other", 0o755, USER),
        ("foreign", 0o755, 0),
        ("foreign/own", 0o755, USER),
        ("open", 0o777, 0),
        ("sticky", 0o1777, 0),
        ("sticky/own", 0o755, USER),
        ("own-sticky", 0o1777, USER),
        ("read-only", 0o555, USER),
        ("locked", 0o700, 0),
        ("locked/own", 0o777, USER),
        ("unsearchable", 0o600, USER),
    ):
        os.mkdir(name, mode)
        os.chown(name, owner, owner)
    for name, mode, owner in (
        ("file", 0o644, USER),
        ("read-only-file", 0o444, USER),
        ("write-only-file", 0o200, USER),
        ("foreign-file", 0o644, 0),
        ("open-file", 0o666, 0),
    ):
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY, mode))
        os.chown(name, owner, owner)
    for link, target in (("link", "dir"), ("link-to-file", "file"), ("dangling", "nowhere"), ("loop", "loop")):
        os.symlink(target, link)
    os.mkfifo("fifo", 0o666)
    os.mknod("device", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod("socket", stat.S_IFSOCK | 0o666)


class Surroundings:
    """The surroundings of a call, made by the steps before it; `held` are descriptors that stay open as long."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def close(self) -> None:
        while self.held:
            os.close(self.held.pop())


def step_mkdir(_: Surroundings, path: bytes, mode: int = 0o755, owner: int = USER) -> None:
    os.mkdir(path)
    os.chmod(path, mode)
    os.chown(path, owner, owner)


def step_mkdirs(_: Surroundings, path: bytes) -> None:
    """Make nested directories, also along a path that is too long for a system call."""
    for name in path.split(b"/"):
        os.mkdir(name, 0o755)
        os.chown(name, USER, USER)
        os.chdir(name)
    os.chdir(WORK)


def step_mount(surroundings: Surroundings, path: bytes, options: bytes = b"", uid: int = USER) -> None:
    """Mount with the helper of this side; the FUSE program is the worker, which never answers."""
    call = Call(Case((PROGRAM, b"-o", options, b"--", path), uid), surroundings)
    observed = call.finish()
    assert observed.status == 0, observed
    surroundings.held += call.received


def step_kernel_mount(surroundings: Surroundings, path: bytes, uid: int = USER) -> None:
    """Mount FUSE without a helper, like a FUSE program with the necessary privilege."""
    device = os.open("/dev/fuse", os.O_RDWR)
    surroundings.held.append(device)
    data = f"fd={device},rootmode=40000,user_id={uid},group_id={uid}"
    mount("direct", os.fsdecode(path), "fuse", 0, data)


def step_die(surroundings: Surroundings) -> None:
    """End the FUSE programs."""
    surroundings.close()


def step_hold(surroundings: Surroundings, path: bytes) -> None:
    """Keep the mount at this path in use."""
    surroundings.held.append(os.open(path, os.O_PATH))


def step_rename(_: Surroundings, old: bytes, new: bytes) -> None:
    os.rename(old, new)


def step_symlink(_: Surroundings, target: bytes, path: bytes) -> None:
    os.symlink(target, path)


def step_umount(_: Surroundings, path: bytes) -> None:
    umount(path)


def step_bind(_: Surroundings, source: bytes, target: bytes) -> None:
    mount(os.fsdecode(source), os.fsdecode(target), None, MS_BIND)


def step_tmpfs(_: Surroundings, path: bytes) -> None:
    mount("tmpfs", os.fsdecode(path), "tmpfs", 0, "mode=0777")


def step_unlink(_: Surroundings, path: bytes) -> None:
    """Remove a file of the sandbox; every case starts with it restored."""
    os.unlink(path)


def step_fuse_conf(_: Surroundings, content: bytes, mode: int = 0o644) -> None:
    write_fuse_conf(content, mode)


STEPS: dict[str, Callable[..., None]] = {
    name.removeprefix("step_"): function for name, function in list(globals().items()) if name.startswith("step_")
}


def take(step: Step, surroundings: Surroundings) -> None:
    STEPS[step.name](surroundings, *step.arguments)


# A call ----------------------------------------------------------------------------------------------------------


class Call:
    """A started helper and its results."""

    def __init__(self, case: Case, surroundings: Surroundings) -> None:
        self._case = case
        self._mounts_before = mounts()
        self._out, self._err = (os.memfd_create(name) for name in ("out", "err"))
        self._comm, theirs = _comm(case.comm)
        self.received: list[int] = []
        self._messages: list[Message] = []
        self._pid = os.fork()
        if self._pid == 0:
            _become_helper(case, theirs, self._out, self._err)
        if theirs >= 0:
            os.close(theirs)
        self._pidfd = os.pidfd_open(self._pid)
        self._surroundings = surroundings

    def finish(self) -> Observation:
        """Wait for the end of the call and, if the helper has become a watcher, for that of the watcher."""
        status = self._wait(self._is_watcher)
        watched = None if status is not None else name_of(self._pid)
        self._receive()
        if status not in (0, None):
            self._wait_for_roll_back()
        seen = mounts()
        mounts_now = self._new(seen)
        if status is None:
            status = self._outlive_watcher()
            seen = mounts()
        observed = Observation(
            status=status,
            stdout=_content(self._out),
            stderr=_content(self._err),
            messages=tuple(self._messages),
            mounts=mounts_now,
            watched=watched,
            mounts_at_end=self._new(seen),
            processes=tuple(name_of(pid) for pid in processes()),
        )
        if self._comm:
            self._comm.close()
        os.close(self._pidfd)
        return observed

    def _new(self, seen: list[MountLine]) -> tuple[MountLine, ...]:
        """Return the mounts among `seen` that do not belong to the sandbox."""
        return tuple(line for line in seen if line not in SANDBOX)

    def _wait(self, until: Callable[[], bool]) -> int | None:
        """Return the exit status, or None if `until` becomes true first. Raises AssertionError if neither happens."""
        give_up = time.monotonic() + PATIENCE
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        while not poll.poll(2):
            if until():
                return None
            if time.monotonic() > give_up:
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                raise AssertionError(f"it hangs: {self._case}")
        _, status = os.waitpid(self._pid, 0)
        return os.waitstatus_to_exitcode(status)

    def _is_watcher(self) -> bool:
        """Whether the helper has its own session and waits."""
        try:
            return os.getsid(self._pid) == self._pid and status_of(self._pid) == "S"
        except ProcessLookupError:
            return False

    def _outlive_watcher(self) -> int | None:
        """End the FUSE program, and return the watcher's exit status."""
        while self.received:
            os.close(self.received.pop())
        self._surroundings.close()
        assert self._comm
        self._comm.close()
        return self._wait(lambda: False)

    def _wait_for_roll_back(self) -> None:
        # The broker learns of the failure a moment later, and rolls back then.
        give_up = time.monotonic() + (PATIENCE if PROXY else ROLLED_BACK)
        while mounts() != self._mounts_before and time.monotonic() < give_up:
            time.sleep(0.002)

    def _receive(self) -> None:
        """Receive all messages on the comm socket."""
        while self._comm:
            try:
                data, descriptors, flags, _ = socket.recv_fds(self._comm, 4096, 16)
            except OSError:
                return
            if not data and not descriptors:
                return
            assert not flags & socket.MSG_CTRUNC
            self._messages.append(Message(data, tuple(_facts(descriptor) for descriptor in descriptors)))
            self.received += descriptors


def _facts(descriptor: int) -> tuple[bytes, int]:
    return os.readlink(b"self/fd/%d" % descriptor, dir_fd=PROC), fcntl.fcntl(descriptor, fcntl.F_GETFL)


def _content(file: int) -> bytes:
    content = os.pread(file, 1 << 20, 0)
    os.close(file)
    return content


def _comm(kind: Comm) -> tuple[socket.socket | None, int]:
    """Return the caller's end and the helper's descriptor; -1 if there is none."""
    if kind is Comm.CLOSED:
        return None, -1
    if kind is Comm.FILE:
        return None, os.memfd_create("file")
    types = {Comm.SEQPACKET: socket.SOCK_SEQPACKET, Comm.DGRAM: socket.SOCK_DGRAM}
    ours, theirs = socket.socketpair(socket.AF_UNIX, types.get(kind, socket.SOCK_STREAM))
    if kind is Comm.PEERLESS:
        ours.close()
        return None, theirs.detach()
    ours.setblocking(False)
    return ours, theirs.detach()


def _become_helper(case: Case, comm: int, out: int, err: int) -> None:
    """In the child: set up the process as the case describes, and execute the helper."""
    try:
        for number in range(1, signal.NSIG):
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)  # Python ignores SIGPIPE, which the helper would inherit
        null = os.open("/dev/null", os.O_RDWR)
        stdio = {0: null, 1: out, 2: err} | ({COMM_FD: comm} if comm >= 0 else {})
        high = {number: os.dup(descriptor) for number, descriptor in stdio.items()}
        assert min(high.values()) > COMM_FD
        for number, descriptor in high.items():
            os.dup2(descriptor, number)
        for number in case.closed:
            os.close(number)
        os.closerange(COMM_FD + (comm >= 0), 1024)
        if PROXY and not case.uid:
            check(_libc.prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN, 0, 0, 0))  # like root of a container
        os.setgroups([])
        os.setresgid(case.uid, case.uid, case.uid)
        os.setresuid(case.uid, case.uid, case.uid)
        os.umask(0o022)
        os.chdir(case.cwd)
        if case.cwd_deleted:
            os.rmdir(case.cwd)
        execve(HELPER, case.argv, [b"%b=%b" % each for each in case.environment])
    except BaseException:
        os.write(err, traceback.format_exc().encode())
    finally:
        os._exit(99)


# Cases -----------------------------------------------------------------------------------------------------------

PROXY = False
PROC = -1
SANDBOX: frozenset[MountLine] = frozenset()


def write_fuse_conf(content: bytes, mode: int = 0o644) -> None:
    with open("/etc/fuse.conf", "wb") as file:
        file.write(content)
    os.chmod("/etc/fuse.conf", mode)


def prepare(policy: Policy) -> None:
    """Restore everything outside the tree to the state that each case expects."""
    if not os.path.lexists("/dev/fuse"):
        os.mknod("/dev/fuse", stat.S_IFCHR | 0o666, FUSE_DEVICE)
    if not os.path.lexists("/etc/mtab"):
        os.symlink("../proc/self/mounts", "/etc/mtab")
    write_fuse_conf(POLICIES[policy].fuse_conf)
    with open("/etc/fusermount3-proxy/socket", "wb") as file:
        file.write(f"{SOCKETS}/{policy.value}/broker.sock\n".encode())


def run(case: Case) -> Observation:
    """Run one case in its own tree; nothing of it remains afterwards."""
    global SANDBOX
    surroundings = Surroundings()
    prepare(case.policy)
    mount("tmpfs", os.fsdecode(WORK), "tmpfs", 0, "mode=0755")
    if not SANDBOX:
        SANDBOX = frozenset(mounts())
    os.chdir(WORK)
    call = None
    try:
        populate()
        for step in case.setup:
            take(step, surroundings)
        call = Call(case, surroundings)
        return call.finish()
    finally:
        for descriptor in call.received if call else ():
            os.close(descriptor)
        surroundings.close()
        clean_up()


def clean_up() -> None:
    os.chdir("/")
    for pid in processes():
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    for line in reversed(mounts()):
        if line not in SANDBOX:
            with contextlib.suppress(OSError):
                umount(unescaped(line.mountpoint))
    umount(WORK)


# The conversation ------------------------------------------------------------------------------------------------


def serve(channel: socket.socket) -> None:
    while (case := receive(channel)) is not None:
        assert isinstance(case, Case)
        try:
            answer: object = run(case)
        except BaseException:
            answer = traceback.format_exc()
        send(channel, answer)


def send(channel: socket.socket, value: object) -> None:
    data = pickle.dumps(value)
    channel.sendall(struct.pack("I", len(data)) + data)


def receive(channel: socket.socket) -> object:
    """Return the received value, or None at the end of the stream."""
    header = channel.recv(4, socket.MSG_WAITALL)
    if len(header) < 4:
        return None
    data = channel.recv(struct.unpack("I", header)[0], socket.MSG_WAITALL)
    value: object = pickle.loads(data)
    return value


def main() -> None:
    global PROXY
    descriptor, tree, scratch, helper, *sockets = sys.argv[1:]
    channel = socket.socket(fileno=int(descriptor))
    PROXY = bool(helper)
    check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    unshare(CLONE_NEWNS | CLONE_NEWPID)
    child = os.fork()
    if child:
        channel.close()
        os.waitpid(child, 0)
        return
    check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    enter(tree, scratch, helper, sockets)
    serve(channel)


if __name__ == "__main__":
    main()
