"""whoami_pyfuse3.py MOUNTPOINT: a FUSE filesystem in Python, on pyfuse3 (libfuse 3's low-level interface).

It has one file, /whoami, whose content names its opener, as in whoamifs.c: "uid=U gid=G pid=P". Serves in the
foreground until it is unmounted.
"""

import errno
import os
import stat
import sys

import pyfuse3  # type: ignore[import-not-found]  # Debian's, in the image
import trio  # type: ignore[import-not-found]  # likewise

WHOAMI_INODE = pyfuse3.ROOT_INODE + 1
NAME = b"whoami"


def attributes(inode: int) -> pyfuse3.EntryAttributes:
    """Return attributes with the uid and gid of this process as owner; the size has no effect, see direct_io below."""
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = inode
    entry.st_mode = stat.S_IFDIR | 0o755 if inode == pyfuse3.ROOT_INODE else stat.S_IFREG | 0o444
    entry.st_uid, entry.st_gid = os.getuid(), os.getgid()
    return entry


class Whoami(pyfuse3.Operations):  # type: ignore[misc]  # an untyped class
    """A filesystem in which each open file has its own content, which depends on its opener."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: dict[int, bytes] = {}

    async def getattr(self, inode: int, _ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        return attributes(inode)

    async def lookup(self, parent: int, name: bytes, _ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        if (parent, name) != (pyfuse3.ROOT_INODE, NAME):
            raise pyfuse3.FUSEError(errno.ENOENT)
        return attributes(WHOAMI_INODE)

    async def opendir(self, inode: int, _ctx: pyfuse3.RequestContext) -> int:
        return inode

    async def readdir(self, _handle: int, start: int, token: pyfuse3.ReaddirToken) -> None:
        if start == 0:
            pyfuse3.readdir_reply(token, NAME, attributes(WHOAMI_INODE), 1)

    async def open(self, _inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise pyfuse3.FUSEError(errno.EACCES)
        handle = max(self.opened, default=0) + 1
        self.opened[handle] = b"uid=%d gid=%d pid=%d\n" % (ctx.uid, ctx.gid, ctx.pid)
        return pyfuse3.FileInfo(fh=handle, direct_io=True)

    async def read(self, handle: int, offset: int, size: int) -> bytes:
        return self.opened[handle][offset : offset + size]

    async def release(self, handle: int) -> None:
        del self.opened[handle]


def main() -> None:
    options = set(pyfuse3.default_options) | {"fsname=whoami_pyfuse3"}
    pyfuse3.init(Whoami(), sys.argv[1], options)
    trio.run(pyfuse3.main)
    pyfuse3.close(unmount=False)


if __name__ == "__main__":
    main()
