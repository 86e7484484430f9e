"""hello_alone.py MOUNTPOINT: one readable file, `file`, by a program without libfuse, as docs/fuse-programs.md says.

Returns when the filesystem is mounted, prints the pid of the process that serves it until it is unmounted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys

from tests.lab import tinyfuse


def helper() -> str:
    """Return the path of fusermount3, or else of fusermount. StopIteration if there is neither."""
    path = f"/usr/bin:{os.environ['PATH']}"
    return next(found for name in ("fusermount3", "fusermount") if (found := shutil.which(name, path=path)))


def mount(mountpoint: str, options: str) -> int:
    """Return the descriptor of a new FUSE filesystem there. SystemExit after the helper has printed why there is none.

    The numbers are those of the list in the page.
    """
    ours, theirs = socket.socketpair()  # 1
    with ours:
        with theirs:
            number = theirs.fileno()  # 2
            environment = {**os.environ, "_FUSE_COMMFD": str(number)}
            called = subprocess.Popen([helper(), "-o", options, "--", mountpoint], env=environment, pass_fds=[number])
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)  # 3
        if status := called.wait():
            sys.exit(status)
    return descriptors[0]


def main() -> None:
    device = mount(sys.argv[1], "fsname=hello,subtype=alone")
    if child := os.fork():
        print(child)
        return
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        os.dup2(null, stream.fileno())
    with contextlib.suppress(OSError):  # it has been unmounted
        tinyfuse.serve(device)  # 4


if __name__ == "__main__":
    main()
