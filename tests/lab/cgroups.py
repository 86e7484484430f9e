"""The cgroups of the tests' pods: below a root with a name of its own, as those of a kubelet with `--cgroup-root`.

A kubelet that runs on this machine considers /kubepods its own: it removes pods there that it does not know.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")

PATIENCE = 10.0
"""Seconds in which the last process of a cgroup must have ended."""


class CgroupRoot:
    """A name below which a test has its pods. It is created with the first pod; `remove` removes all of it."""

    def __init__(self, path: str = "") -> None:
        """Take a new name, or that of a `path` in use."""
        # Without a dash: in the name of a slice, a dash separates it from the slice above (systemd.slice(5)).
        self._name = path.lstrip("/") or f"fusermount3_proxy_tests_{secrets.token_hex(4)}"
        self.path = f"/{self._name}"

    def pod(self, uid: str) -> str:
        """Return the cgroup of a pod, as kubelet names it with its cgroup driver cgroupfs."""
        return f"{self.path}/kubepods/besteffort/pod{uid}"

    def pod_by_systemd(self, uid: str) -> str:
        """Return the same with the cgroup driver systemd; of a pod with guaranteed resources."""
        name = f"{self._name}-kubepods"
        return f"{self.path}.slice/{name}.slice/{name}-pod{uid.replace('-', '_')}.slice"

    def remove(self, seconds: float = PATIENCE) -> None:
        """Remove all cgroups that were made. Raises OSError if processes are left in them after so many seconds."""
        for path in (self.path, f"{self.path}.slice"):
            remove(path, seconds)


def hierarchy() -> Path:
    """Return the top of a hierarchy in which a process can be put into any cgroup, with version 1 and 2."""
    return next(path for path in (CGROUPS / "pids", CGROUPS) if (path / "cgroup.procs").exists())


def hierarchies() -> list[Path]:
    """Return the tops of all hierarchies, with version 1 and 2."""
    return [path for path in (*CGROUPS.iterdir(), CGROUPS) if (path / "cgroup.procs").exists()]


def named(beginning: str) -> list[str]:
    """Return the cgroups of all hierarchies whose names begin so; others' may end meanwhile."""
    return [
        f"{directory}/{name}"
        for directory, names, _ in os.walk(CGROUPS)  # unlike rglob, it passes over a directory that has vanished
        for name in names
        if name.startswith(beginning)
    ]


def make(cgroup: str) -> Path:
    """Make a cgroup, if it does not exist yet, in one hierarchy; return its directory."""
    directory = Path(f"{hierarchy()}{cgroup}")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def remove(cgroup: str, seconds: float = PATIENCE) -> None:
    """Remove a cgroup and those below it, in all hierarchies. Raises OSError as above, and leaves none nevertheless."""
    give_up = time.monotonic() + seconds
    left: OSError | None = None
    for path in [*CGROUPS.glob(f"*{cgroup}"), *CGROUPS.glob(cgroup.lstrip("/"))]:
        while path.exists():
            try:
                for each in sorted(path.rglob("*/"), reverse=True):
                    each.rmdir()
                path.rmdir()
            except OSError as error:  # EBUSY, while its last process is about to end
                if time.monotonic() > give_up:
                    if left:
                        raise
                    left = error
                    kill(path)
                    give_up = time.monotonic() + seconds
                time.sleep(0.02)
    if left:
        raise left


def kill(path: Path) -> None:
    """Kill the processes in a cgroup that a test has made, and in those below it."""
    for each in [path, *path.rglob("*/")]:
        with contextlib.suppress(OSError):
            for pid in {*map(int, (each / "cgroup.procs").read_text().split())} - {0, os.getpid()}:
                os.kill(pid, signal.SIGKILL)
