"""The programs that the mounter executes, written in C: superblock_creator.c and plain_call.c.

Copies of them are executed that nobody can write and that are in no directory: a container that takes over a process of
theirs finds no file of the host there.
"""

import os
from typing import NamedTuple

from fusermount3_broker.kernel import syscalls

#: The executables, built by packaging/mounter_programs.py, beside this module.
SUPERBLOCK_CREATOR, PLAIN_CALL = "superblock_creator", "plain_call"


class Programs(NamedTuple):
    """Descriptors of the programs, and of the directory in which there is nothing else."""

    directory: int
    superblock_creator: int
    plain_call: int


def load(directory: int) -> Programs:
    """Copy the programs to `directory`, the root of a filesystem that is attached nowhere, and return them.

    The mount is read-only then. Raises OSError.
    """
    for name in (SUPERBLOCK_CREATOR, PLAIN_CALL):
        with open(file_of(name), "rb") as file:
            program = file.read()
        copy = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, dir_fd=directory)
        os.fchmod(copy, 0o555)
        with open(copy, "wb") as file:
            file.write(program)
    syscalls.mount_setattr(directory, b"", syscalls.AT_EMPTY_PATH, syscalls.MOUNT_ATTR_RDONLY)
    flags = os.O_PATH | os.O_CLOEXEC
    opened = (os.open(name, flags, dir_fd=directory) for name in (SUPERBLOCK_CREATOR, PLAIN_CALL))
    return Programs(directory, *opened)


def file_of(name: str) -> str:
    """Return the path of a program's executable."""
    return __file__.removesuffix("programs.py") + name
