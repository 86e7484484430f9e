"""The part of a FUSE library that a test plays itself: it starts fusermount3 with a comm socket and takes the
/dev/fuse descriptor from there. Such a mount has no daemon: its mountpoint is looked at from outside, in
mountinfo, and whoever goes in waits until the descriptor is closed."""

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
    """How a call of fusermount3 went; `descriptor` is None if none came."""

    status: int
    stdout: str
    stderr: str
    descriptor: int | None

    def close(self) -> None:
        """Let go of the descriptor, which ends the filesystem, as the death of a daemon does."""
        if self.descriptor is not None:
            os.close(self.descriptor)


def call(argv: Sequence[str | Path], env: Mapping[str, str] | None = None, timeout: float = 60) -> Outcome:
    """Start `argv`, which is or leads to fusermount3, with the comm socket as its descriptor 3."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            # The shell puts the descriptor at its number: pass_fds keeps the one it has.
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
    # A message is one byte with one descriptor; when the call fails, there is none.
    assert (data, len(descriptors)) in ((b"", 0), (b"\0", 1))
    return Outcome(result.returncode, result.stdout, result.stderr, descriptors[0] if descriptors else None)


def call_in(container: Container, argv: Sequence[str], user: str | None = None) -> Outcome:
    """As `call`, in a container."""
    options = ["--preserve-fds", "1", "--env", f"_FUSE_COMMFD={COMM_FD}"]
    options += [] if user is None else ["--user", user]
    return call(["podman", *RUNTIME, "exec", *options, container.name, *argv])
