"""Children of the mounter that serve plain calls, without the interpreter: plain_call.c.

Such a child costs a fraction of a forked one, which copies the mounter's memory. Nearly all calls are plain; what such
a child leaves alone, and whatever else there is to do, the forked children do.
"""

import os
import socket

from fusermount3_broker.kernel import features, syscalls
from fusermount3_broker.mounter import child_processes
from fusermount3_broker.mounter.kept_descriptors import Descriptors
from fusermount3_broker.mounter.programs import PLAIN_CALL

#: Those of the mounter, without one that its own start needs.
CAPABILITIES = (
    syscalls.CAP_DAC_READ_SEARCH,
    syscalls.CAP_SETGID,
    syscalls.CAP_SETUID,
    syscalls.CAP_SYS_CHROOT,
    syscalls.CAP_SYS_PTRACE,
    syscalls.CAP_SYS_ADMIN,
)
#: In place of the cell: the host forbids cells; there is none just now.
NO_CELLS, NO_CELL = -1, -2


def start(opened: Descriptors, control: int, line: int) -> int:
    """Start a child, and return its pid.

    It takes an operation from `control`, and tells the parent so over `line`. Raises OSError.
    """
    forbidden = NO_CELLS if opened.cell.forbidden else NO_CELL
    cell = forbidden if opened.cell.namespace is None else opened.cell.namespace
    directory = opened.programs.directory
    descriptors = control, line, opened.proc, opened.fusectl, opened.devices, directory, opened.locks, cell
    arguments = [PLAIN_CALL.encode(), *(b"%d" % each for each in (*descriptors, opened.supervisor))]
    keep = [each for each in descriptors if each >= 0]
    return child_processes.execute(opened.programs.plain_call, arguments, keep, *CAPABILITIES)


def works(opened: Descriptors) -> bool:
    """Return whether there can be such children: the kernel can describe single mounts, and the program runs."""
    if not features.tells_of_one_mount():
        return False
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        ours.close()  # so that the child finds no operation, and exits
        try:
            child = start(opened, theirs.fileno(), theirs.fileno())
        except OSError:
            return False
    return os.waitpid(child, 0)[1] == 0
