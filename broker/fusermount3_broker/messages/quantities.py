"""Types of numbers in records, each with its range; one without a range is any that system calls and SQLite take."""

from typing import Annotated

Seconds = Annotated[int, range(1_000_001)]
Errno = Annotated[int, range(4096)]  # include/linux/err.h, MAX_ERRNO
UserId = Annotated[int, range(2**32)]
GroupId = Annotated[int, range(2**32)]
FileMode = Annotated[int, range(2**16)]
FilesystemMagic = Annotated[int, range(2**64)]
DeviceNumber = Annotated[int, range(2**32)]
NamespaceInode = Annotated[int, range(2**32)]
#: No group, as in chown(2).
NO_GROUP = 2**32 - 1
