"""Listening and exiting for the gRPC servers that kubelet calls: the CSI plugin and the device plugin."""

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import grpc

Identity = tuple[int, int, int]


@contextmanager
def listening(server: grpc.aio.Server, path: Path) -> Iterator[None]:
    """Have the server listen at `path`, where only its owner may connect; remove its socket at the end. Raises OSError.

    gRPC itself replaces any socket at that path, and reports little about errors.
    """
    before = os.umask(0o177)
    try:
        listening = server.add_insecure_port(f"unix:{path}")
    except RuntimeError:
        listening = 0
    finally:
        os.umask(before)
    if not listening:
        raise OSError(f"no socket can be made at {path}")
    own = identity(path)
    try:
        yield
    finally:
        if identity(path) == own:  # a later broker may have its socket there already
            path.unlink(missing_ok=True)


def identity(path: Path) -> Identity | None:
    """Return an identity that a file made at `path` later does not share; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns


def run(main: Callable[[], int]) -> NoReturn:
    """Run `main`, and exit immediately with the status that it returns.

    At interpreter shutdown, gRPC 1.51 of Debian 12 sometimes waits for ever for a thread of its own.
    """
    try:
        status = main()
    except BaseException:
        traceback.print_exc()
        status = 1
    os._exit(status)
