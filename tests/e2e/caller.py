"""A stand-in for libfuse: it starts fusermount3 with a comm socket and receives the /dev/fuse descriptor there.

Such a mount has no FUSE program: tests look at its mountpoint from outside, in mountinfo, and a process that enters
the mountpoint waits until the descriptor is closed.
"""

from __future__ import annotations

import os
import socket
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.lab.podman import RUNTIME, Container

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

COMM_FD = 3


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call of fusermount3; `descriptor` is None if none was received."""

    status: int
    stdout: str
    stderr: str
    descriptor: int | None

    def close(self) -> None:
        """Close the descriptor, which ends the filesystem as the death of a FUSE program does."""
        if self.descriptor is not None:
            os.close(self.descriptor)


def call(argv: Sequence[str | Path], env: Mapping[str, str] | None = None, timeout: float = 60) -> Outcome:
    """Run `argv`, which is or starts fusermount3, with the comm socket as descriptor 3."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            # pass_fds keeps the number of a descriptor; the shell moves it to COMM_FD.
            shell = ["bash", "-c", f'exec "$@" {COMM_FD}<&"$0"', str(theirs.fileno())]
            result = subprocess.run(
                [*shell, *argv],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env={**os.environ, "_FUSE_COMMFD": str(COMM_FD), **(env or {})},
                timeout=timeout,
            )
        data, descriptors, _, _ = socket.recv_fds(ours, 16, 4)
    # The message is one byte with one descriptor; a failed call sends no message.
    assert (data, len(descriptors)) in ((b"", 0), (b"\0", 1))
    return Outcome(result.returncode, result.stdout, result.stderr, descriptors[0] if descriptors else None)


def call_in(container: Container, argv: Sequence[str], user: str | None = None) -> Outcome:
    """Run `argv` like `call`, in a container."""
    options = ["--preserve-fds", "1", "--env", f"_FUSE_COMMFD={COMM_FD}"]
    options += [] if user is None else ["--user", user]
    return call(["podman", *RUNTIME, "exec", *options, container.name, *argv])
