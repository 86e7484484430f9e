"""Confinement of the front and the CSI plugin: before they read any input, they give up all that they do not need.

The front keeps no capability and has, where possible, a uid of its own; Landlock leaves it no file but its state and
what it reads, and seccomp no system call but those of a program that communicates over descriptors it was given. Each
layer covers what the others might have missed. The plugin keeps its uid, and may make a socket; everything else it
gives up as well.
"""

import errno
import fcntl
import os
import pwd
import sys
import termios
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from fusermount3_broker.kernel import capabilities, syscalls

try:
    import seccomp  # libseccomp's own binding, which distributions package
except ImportError:
    try:
        import pyseccomp as seccomp  # the same API on PyPI
    except (ImportError, RuntimeError):  # without the library that it wraps
        seccomp = None

#: Of fcntl(2): without those that request signals for events of a descriptor (F_SETOWN, F_SETSIG).
_DESCRIPTOR_COMMANDS = (
    *(fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, fcntl.F_SETFL),
    *(fcntl.F_GETLK, fcntl.F_SETLK, fcntl.F_SETLKW, fcntl.F_ADD_SEALS, fcntl.F_GET_SEALS),
)
#: Of ioctl(2): without those that insert input into a terminal (TIOCSTI).
_DEVICE_COMMANDS = (termios.FIONBIO, termios.FIOCLEX, termios.FIONCLEX, termios.TCGETS, termios.FIONREAD)

#: The front's account, where it exists.
USER = "fusermount3-broker"

#: Everything that Landlock can forbid, by the first version of its ABI that supports it (landlock(7)): files, TCP, and
#: signals and abstract sockets of processes outside.
_FILES = {1: 0x1FFF, 2: 0x2000, 3: 0x4000, 5: 0x8000}
_NETWORK = {4: 0x3}
_SCOPES = {6: 0x3}

_READ = syscalls.LANDLOCK_ACCESS_FS_READ_FILE | syscalls.LANDLOCK_ACCESS_FS_READ_DIR
_KEEP_STATE = (
    _READ
    | syscalls.LANDLOCK_ACCESS_FS_WRITE_FILE
    | syscalls.LANDLOCK_ACCESS_FS_TRUNCATE
    | syscalls.LANDLOCK_ACCESS_FS_MAKE_REG
    | syscalls.LANDLOCK_ACCESS_FS_REMOVE_FILE
)
_MAKE_A_SOCKET = syscalls.LANDLOCK_ACCESS_FS_MAKE_SOCK | syscalls.LANDLOCK_ACCESS_FS_REMOVE_FILE
#: What gRPC reads when it starts its threads.
_READ_BY_GRPC = {Path("/dev/urandom"): syscalls.LANDLOCK_ACCESS_FS_READ_FILE, Path("/sys/devices/system/cpu"): _READ}

#: System calls of a Python program that serves sockets it was given, has a database, and asks the kernel about
#: processes. Any other call fails with EPERM. Names that an architecture lacks are ignored.
_SYSTEM_CALLS = (
    # memory and threads
    "brk futex get_robust_list madvise mremap munmap restart_syscall rseq sched_getaffinity sched_yield "
    "set_robust_list set_tid_address exit exit_group membarrier "
    # time, receiving signals, own IDs
    "clock_getres clock_gettime clock_nanosleep gettimeofday nanosleep time rt_sigaction rt_sigprocmask rt_sigreturn "
    "rt_sigtimedwait sigaltstack getegid geteuid getgid getgroups getpid getppid getresgid getresuid getrlimit "
    "getrusage gettid getuid getrandom sysinfo uname "
    # descriptors
    "close close_range dup dup3 lseek pipe2 pread64 pwrite64 read readv write writev "
    "epoll_create1 epoll_ctl epoll_pwait epoll_wait eventfd2 poll ppoll pselect6 select pidfd_open memfd_create "
    # sockets, see below for which; without connect(2): callers connect to the broker, and the journal takes datagrams
    "accept4 getpeername getsockname getsockopt listen recvfrom recvmsg sendmsg sendto setsockopt shutdown "
    # files, as Landlock allows
    "access faccessat faccessat2 fallocate fchmod fdatasync flock fstat fstatfs fsync ftruncate getcwd getdents64 "
    "newfstatat stat lstat statx statfs open openat readlink readlinkat rename renameat renameat2 unlink unlinkat"
)
#: Additional system calls of a gRPC server, to make a socket and threads.
_SYSTEM_CALLS_OF_GRPC = "bind umask sched_getparam sched_getscheduler"


def user() -> tuple[int, int] | None:
    """Return uid and gid of the front's own account; None if this process may not change to it, or there is none."""
    if os.geteuid() != 0:
        return None
    try:
        account = pwd.getpwnam(USER)
    except KeyError:
        return None
    return account.pw_uid, account.pw_gid


def enter(state_directory: Path, proc: int) -> str:
    """Give up everything that the front does not need; return what this kernel or machine lacks for that, or "".

    All modules must have been imported, and only one thread may run. `proc` is a descriptor of the /proc that the front
    may read. Raises OSError.
    """
    _drop_privilege(user())
    missing = [] if _restrict_files([(proc, _READ), (state_directory, _KEEP_STATE)]) else ["Landlock"]
    missing += [] if _restrict_system_calls(_SYSTEM_CALLS) else ["libseccomp"]
    missing += [] if os.getuid() else [f"the user {USER}"]
    return ", ".join(missing)


def enter_as_plugin(socket_directory: Path) -> str:
    """As `enter`, for the CSI plugin, which makes and removes a socket in that directory. It keeps its uid: another
    might not have the right to. Raises OSError.
    """
    _drop_privilege(None)
    allowed = {socket_directory: _MAKE_A_SOCKET, **_READ_BY_GRPC}
    missing = [] if _restrict_files(allowed.items()) else ["Landlock"]
    missing += [] if _restrict_system_calls(f"{_SYSTEM_CALLS} {_SYSTEM_CALLS_OF_GRPC}") else ["libseccomp"]
    return ", ".join(missing)


def _drop_privilege(own: tuple[int, int] | None) -> None:
    """Drop all capabilities for ever, and change to the user and group `own`, if given. Raises OSError."""
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    capabilities.drop_bounding()
    if own:
        os.setgroups([])
        os.setresgid(own[1], own[1], own[1])
        os.setresuid(own[0], own[0], own[0])
    capabilities.keep()


def _restrict_files(allowed: Iterable[tuple[Path | int, int]]) -> bool:
    """Allow access to no files but those beneath `allowed`, each with its access rights, and those that Python reads;
    return whether the kernel supports that.
    """
    version = syscalls.landlock_abi()
    if not version:
        return False
    handled = [sum(bits for since, bits in each.items() if since <= version) for each in (_FILES, _NETWORK, _SCOPES)]
    ruleset = syscalls.landlock_create_ruleset(*handled)
    for path, access in allowed:
        _allow_beneath(ruleset, path, access & handled[0])
    for path in {Path("/proc"), Path(__file__).parents[1], *map(Path, sys.path)}:  # libraries read their files late
        if path.is_dir():
            _allow_beneath(ruleset, path, _READ)
    syscalls.landlock_restrict_self(ruleset)
    os.close(ruleset)
    return True


def _allow_beneath(ruleset: int, path: Path | int, access: int) -> None:
    if isinstance(path, int):
        syscalls.landlock_add_rule(ruleset, access, path)
        return
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        syscalls.landlock_add_rule(ruleset, access, descriptor)
    finally:
        os.close(descriptor)


def _restrict_system_calls(names: str) -> bool:
    """Allow no system call but these, and no new program, process or executable memory; return whether that worked."""
    if seccomp is None:
        return False
    rules = seccomp.SyscallFilter(seccomp.ERRNO(errno.EPERM))
    for name in names.split():
        with suppress(OSError, ValueError, RuntimeError):
            rules.add_rule(seccomp.ALLOW, name)
    thread = seccomp.Arg(0, seccomp.MASKED_EQ, _CLONE_THREAD, _CLONE_THREAD)
    rules.add_rule(seccomp.ALLOW, "clone", thread)
    rules.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")  # seccomp can't see its flags; libc falls back to clone(2)
    for name, commands in (("fcntl", _DESCRIPTOR_COMMANDS), ("ioctl", _DEVICE_COMMANDS)):
        for command in commands:
            rules.add_rule(seccomp.ALLOW, name, seccomp.Arg(1, seccomp.MASKED_EQ, _UNSIGNED, command))
    for name in ("mmap", "mprotect"):
        rules.add_rule(seccomp.ALLOW, name, seccomp.Arg(2, seccomp.MASKED_EQ, _PROT_EXEC, 0))
    for name in ("socket", "socketpair"):
        rules.add_rule(seccomp.ALLOW, name, seccomp.Arg(0, seccomp.EQ, _AF_UNIX))
    rules.load()
    return True


_AF_UNIX = 1
_UNSIGNED = 0xFFFFFFFF
_PROT_EXEC = 4
_CLONE_THREAD = 0x00010000
