"""How the processes that kubelet asks by gRPC listen and end: the CSI plugin and the device plugin."""

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import grpc


@contextmanager
def listening(server: grpc.aio.Server, path: Path) -> Iterator[None]:
    """Have the server listen at `path`, where only its owner may connect; remove the socket at the end. Raises OSError.

    gRPC itself replaces whatever socket is there, and says little of what goes wrong.
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
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def run(main: Callable[[], int]) -> NoReturn:
    """Run `main`, and end with the status that it returns, at once.

    As the interpreter ends, gRPC 1.51 of Debian 12 at times waits for ever for a thread of its own.
    """
    try:
        status = main()
    except BaseException:
        traceback.print_exc()
        status = 1
    os._exit(status)
