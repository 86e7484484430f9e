"""The program that creates a superblock where a container may see the process that does: superblock_creator.c.

It is executed from memory, sealed: a container that takes over its process finds no file of the host there.
"""

import os
from collections.abc import Collection
from contextlib import suppress
from fcntl import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_WRITE, fcntl

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.mounter import child_processes
from fusermount3_broker.mounter.child_processes import Rescue

#: The executable, built by packaging/superblock_creator.py.
FILE = __file__.removesuffix(".py")
_SEALS = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE


def load() -> int:
    """Return a descriptor of the program in memory. Raises OSError."""
    with open(FILE, "rb") as file:
        program = file.read()
    memory = _executable_memory()
    os.write(memory, program)
    fcntl(memory, F_ADD_SEALS, _SEALS)
    return memory


def _executable_memory() -> int:
    """Before Linux 6.3, memory needs no flag to be executed, and the kernel refuses the flag (memfd_create(2))."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    with suppress(OSError):
        return os.memfd_create("superblock_creator", flags | syscalls.MFD_EXEC)
    return os.memfd_create("superblock_creator", flags)


def create(
    program: int,
    context: int,
    device: int,
    pid_namespace: int | None,
    commands: Collection[int],
    rescue: Rescue | None,
) -> None:
    """Create the superblock of a configured `context` that uses `device`, in the pid namespace if one is given.

    `commands` are those of fsconfig(2); each one is only tried if the kernel lacks the one before. Expects the
    mounter's /proc as the working directory. `rescue` is as in `child_processes.in_child`. Raises OSError.
    """
    pids = -1 if pid_namespace is None else pid_namespace
    arguments = [b"superblock_creator", *(b"%d" % each for each in (pids, device, context, *commands))]
    keep = [each for each in (pids, device, context) if each >= 0]
    with child_processes.waiting_for_grandchildren():
        child = child_processes.execute(program, arguments, keep, syscalls.CAP_SYS_ADMIN)
        child_processes.wait(child, rescue)
