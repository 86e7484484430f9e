"""Work that only a child can do: in the pid namespace that this process has joined, or as another user."""

import errno
import os
import select
import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from fusermount3_broker.kernel import syscalls

_LARGEST_DESCRIPTOR = 2**31 - 1


class User(NamedTuple):
    uid: int
    gid: int


class Rescue(NamedTuple):
    """When and how to give up a child: when `conversation` hangs up; by `unblock`, in case it can't be killed."""

    conversation: int
    unblock: Callable[[], None]


def in_child(
    act: Callable[[], object],
    keep: Collection[int],
    capabilities: Collection[int],
    user: User | None = None,
    rescue: Rescue | None = None,
) -> None:
    """Run `act` in a child that has only the descriptors `keep` and these capabilities, as `user` if given.

    Waits as `wait` does. Raises the OSError that `act` raises; TimeoutError if the child was given up.
    """
    wait(begin(act, keep, capabilities, user), rescue, user)


def wait(child: int, rescue: Rescue | None, user: User | None = None) -> None:
    """Wait for the end of a child that runs as `user`, if given; its exit status is 0 or an errno.

    The child has the time that remains until the alarm of this process; then it is killed. A process that waits for a
    FUSE program's answer can't always be killed. This process ends after its child in any case, so its end shows that
    no child is left. Raises OSError with that errno; TimeoutError if the child was given up.
    """
    seconds = signal.alarm(0)
    in_time = _ends(child, seconds, rescue)
    if not in_time:
        kill(child, user)
        if rescue:
            rescue.unblock()
    _, status = os.waitpid(child, 0)
    if not in_time:
        raise TimeoutError(errno.ETIMEDOUT, "in a child")
    signal.alarm(seconds)
    _raise_error_of(status)


def begin(
    act: Callable[[], object], keep: Collection[int], capabilities: Collection[int], user: User | None = None
) -> int:
    """Do as `in_child`, but return the child's pid at once. The calling function has to wait for the child."""

    def act_confined() -> None:
        close_all_but(keep)
        syscalls.capset(*capabilities)
        if user:
            os.setresgid(user.gid, user.gid, user.gid)
            os.setresuid(user.uid, user.uid, user.uid)
            syscalls.capset()  # setresuid(2) clears the capabilities of root only
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)  # after the IDs: changing them resets it
        act()

    return _fork(act_confined)


def execute(program: int, arguments: list[bytes], keep: Collection[int], *capabilities: int) -> int:
    """Execute a program in a child; return its pid.

    The child has the descriptors `keep`, and those of these capabilities that this process has. `program` is a
    descriptor of the executable. The working directory must be the mounter's /proc, and all descriptors but `keep` and
    those of standard input, output and error close on exec. The kernel copies no memory for the child. The calling
    function has to wait for it. Raises OSError.
    """
    permitted = syscalls.capget()
    for each in keep:
        os.set_inheritable(each, True)
    kept = [each for each in capabilities if permitted >> each & 1]
    syscalls.capset_bits(permitted, inheritable=sum(1 << each for each in kept))
    try:
        for each in kept:
            syscalls.prctl(syscalls.PR_CAP_AMBIENT, syscalls.PR_CAP_AMBIENT_RAISE, each)
        return os.posix_spawn(b"self/fd/%d" % program, arguments, {})
    finally:
        syscalls.capset_bits(permitted)
        for each in keep:
            os.set_inheritable(each, False)


def _fork(act: Callable[[], object]) -> int:
    """Run `act` in a child and return its pid. Its exit status is the errno that `act` raises, or 0."""
    child = syscalls.fork()
    if child:
        return child
    status = errno.EIO
    try:
        act()
        status = 0
    except OSError as error:
        status = error.errno or errno.EIO
    finally:
        os._exit(status)


def _raise_error_of(status: int) -> None:
    """Raise the OSError that `act` raised in the child, if any, according to the child's status of wait(2)."""
    code = os.waitstatus_to_exitcode(status)
    if code:
        raise OSError(code if code > 0 else errno.EINTR, "in a child")


@contextmanager
def waiting_for_grandchildren() -> Iterator[None]:
    """Adopt grandchildren whose parents have ended, and after the block wait for them, too."""
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)


def _ends(child: int, seconds: int, rescue: Rescue | None) -> bool:
    """Wait for the child; return whether it ends within `seconds` (0: no limit) and before it is given up."""
    ended = os.pidfd_open(child)
    waiting = select.poll()
    waiting.register(ended, select.POLLIN)
    if rescue:
        waiting.register(rescue.conversation, select.POLLRDHUP)
    try:
        return any(descriptor == ended for descriptor, _ in waiting.poll(1000 * seconds or None))
    finally:
        os.close(ended)


def kill(child: int, user: User | None) -> None:
    """Kill a child that runs as `user`; this process has that effective uid from then on."""
    if user:
        os.seteuid(user.uid)  # without CAP_KILL, a process may kill only those of its own uid
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


def close_all_but(keep: Collection[int]) -> None:
    """Close all descriptors of this process except `keep`."""
    first = 0
    for descriptor in sorted(keep):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, _LARGEST_DESCRIPTOR)
