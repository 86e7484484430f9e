"""hello_mfusepy.py MOUNTPOINT [OPTION...]: one readable and writable file, hello, served by mfusepy (on ctypes).

Serves in the foreground until it is unmounted or gets SIGTERM. OPTIONs are those of libfuse, for example auto_unmount.
"""

import errno
import os
import stat
import sys
from typing import Any

import mfusepy  # type: ignore[import-not-found]  # from PyPI, in the container


class Hello(mfusepy.Operations):  # type: ignore[misc]  # an untyped class here
    """One file, in memory."""

    def __init__(self) -> None:
        self.content = b"hello\n"

    def getattr(self, path: str, _handle: Any = None) -> dict[str, Any]:
        owner = {"st_uid": os.getuid(), "st_gid": os.getgid(), "st_nlink": 1}
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o755, **owner}
        if path == "/hello":
            return {"st_mode": stat.S_IFREG | 0o644, "st_size": len(self.content), **owner}
        raise mfusepy.FuseOSError(errno.ENOENT)

    def readdir(self, _path: str, _handle: int) -> list[str]:
        return [".", "..", "hello"]

    def truncate(self, _path: str, length: int, _handle: Any = None) -> int:
        self.content = self.content[:length].ljust(length, b"\0")
        return 0

    def read(self, _path: str, size: int, offset: int, _handle: int) -> bytes:
        return self.content[offset : offset + size]

    def write(self, _path: str, data: bytes, offset: int, _handle: int) -> int:
        self.content = self.content[:offset].ljust(offset, b"\0") + data + self.content[offset + len(data) :]
        return len(data)


def main() -> None:
    mountpoint, *options = sys.argv[1:]
    mfusepy.FUSE(Hello(), mountpoint, foreground=True, fsname="hello_mfusepy", **dict.fromkeys(options, True))


if __name__ == "__main__":
    main()
