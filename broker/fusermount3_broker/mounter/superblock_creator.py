"""The program that creates a superblock where a container may see the process that does: superblock_creator.c.

A copy of it is executed that nobody can write and that is in no directory: a container that takes over its process
finds no file of the host there.
"""

import os
from collections.abc import Collection
from typing import NamedTuple

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.mounter import child_processes
from fusermount3_broker.mounter.child_processes import Rescue

#: The executable, built by packaging/superblock_creator.py.
FILE = __file__.removesuffix(".py")
_NAME = "superblock_creator"


class Program(NamedTuple):
    """The program: descriptors of the executable, and of the directory in which it is alone."""

    executable: int
    directory: int


def load(directory: int) -> Program:
    """Copy the program to `directory`, the root of a filesystem that is attached nowhere, and return it.

    The mount is read-only then. Raises OSError.
    """
    with open(FILE, "rb") as file:
        program = file.read()
    copy = os.open(_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, dir_fd=directory)
    os.write(copy, program)
    os.fchmod(copy, 0o555)
    os.close(copy)
    syscalls.mount_setattr(directory, b"", syscalls.AT_EMPTY_PATH, syscalls.MOUNT_ATTR_RDONLY)
    return Program(os.open(_NAME, os.O_PATH | os.O_CLOEXEC, dir_fd=directory), directory)


def create(
    program: Program,
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
    descriptors = program.directory, pids, device, context
    arguments = [_NAME.encode(), *(b"%d" % each for each in (*descriptors, *commands))]
    keep = [each for each in descriptors if each >= 0]
    with child_processes.waiting_for_grandchildren():
        child = child_processes.execute(program.executable, arguments, keep, syscalls.CAP_SYS_ADMIN)
        child_processes.wait(child, rescue)
