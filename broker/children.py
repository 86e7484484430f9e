"""What can only be done in a child: in the pid namespace that this process has joined, or as somebody else."""

import errno
import os
import signal
from collections.abc import Callable, Collection

from broker import syscalls

_LARGEST_DESCRIPTOR = 2**31 - 1


def in_child(act: Callable[[], object], keep: Collection[int], capabilities: Collection[int]) -> None:
    """Do `act` in a child that has no other descriptors and capabilities. Raises the OSError that it raises.

    A container may see the child, and with CAP_SYS_PTRACE get hold of it; so there is nothing in it to be had.
    """
    child = syscalls.fork()
    if child == 0:
        status = errno.EIO
        try:
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)  # the alarm is its parent's
            _close_all_but(keep)
            syscalls.capset(*capabilities)
            act()
            status = 0
        except OSError as error:
            status = error.errno or errno.EIO
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    if ended:
        status = os.waitstatus_to_exitcode(ended)
        raise OSError(status if status > 0 else errno.EINTR, "in a child")


def _close_all_but(keep: Collection[int]) -> None:
    first = 0
    for descriptor in sorted(keep):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, _LARGEST_DESCRIPTOR)
