"""What can only be done in a child: in the pid namespace that this process has joined, or as somebody else."""

import errno
import os
import select
import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from broker import syscalls

_LARGEST_DESCRIPTOR = 2**31 - 1


class User(NamedTuple):
    uid: int
    gid: int


class Rescue(NamedTuple):
    """When to give a child up, and how: when `conversation` hangs up; by `unblock`, if it can't be killed."""

    conversation: int
    unblock: Callable[[], None]


def in_child(
    act: Callable[[], object],
    keep: Collection[int],
    capabilities: Collection[int],
    user: User | None = None,
    rescue: Rescue | None = None,
) -> None:
    """Do `act` in a child that has no other descriptors and capabilities, as `user` if there is one.

    What is left of the time until the alarm of this process is the child's; then it is killed. Who waits for an answer
    that a FUSE program owes can't always be killed: this process ends after its child in any case, so that whoever sees
    it end knows that nothing is left. Raises the OSError that `act` raises, TimeoutError when it was given up.
    """

    def act_confined() -> None:
        _close_all_but(keep)
        syscalls.capset(*capabilities)
        if user:
            os.setresgid(user.gid, user.gid, user.gid)
            os.setresuid(user.uid, user.uid, user.uid)
            syscalls.capset()  # which only root loses by that
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)  # after the ids, with which it is lost
        act()

    child = _fork(act_confined)
    seconds = signal.alarm(0)
    in_time = _ends(child, seconds, rescue)
    if not in_time:
        _kill(child, user)
        if rescue:
            rescue.unblock()
    _, status = os.waitpid(child, 0)
    if not in_time:
        raise TimeoutError(errno.ETIMEDOUT, "in a child")
    signal.alarm(seconds)
    _raise_error_of(status)


def in_twin(act: Callable[[], object]) -> None:
    """Do `act` in a child that has all that this process has, and no other time. Raises the OSError that it raises."""

    def act_and_die_with_parent() -> None:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        act()

    _, status = os.waitpid(_fork(act_and_die_with_parent), 0)
    _raise_error_of(status)


def _fork(act: Callable[[], object]) -> int:
    """Do `act` in a child, whose exit status is the errno that it raises, or 0; return its pid."""
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
    """Raise the OSError that `act` has raised in the child which ended with this status of wait(2), if it has."""
    code = os.waitstatus_to_exitcode(status)
    if code:
        raise OSError(code if code > 0 else errno.EINTR, "in a child")


@contextmanager
def waiting_for_grandchildren() -> Iterator[None]:
    """Have children of this process's children be its own when those have ended, and wait for them, too."""
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)


def _ends(child: int, seconds: int, rescue: Rescue | None) -> bool:
    """Wait until the child has ended; whether it does within so many seconds, 0: any, and before it is given up."""
    ended = os.pidfd_open(child)
    waiting = select.poll()
    waiting.register(ended, select.POLLIN)
    if rescue:
        waiting.register(rescue.conversation, select.POLLRDHUP)
    try:
        return any(descriptor == ended for descriptor, _ in waiting.poll(1000 * seconds or None))
    finally:
        os.close(ended)


def _kill(child: int, user: User | None) -> None:
    if user:
        os.seteuid(user.uid)  # without CAP_KILL one may kill one's own
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


def _close_all_but(keep: Collection[int]) -> None:
    first = 0
    for descriptor in sorted(keep):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, _LARGEST_DESCRIPTOR)
