"""Containers as a user of Podman starts them: default capabilities, no /dev/fuse, no network.

A `Container` runs detached while its `with` block runs, and is gone afterwards, however the block ends. A test
observes it from outside where it can: `pid`, `mountinfo()` are the host's view, which the FUSE daemon inside can
neither fake nor block.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab.commands import Argument, CommandFailed, run

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

PREFIX = "fusermount3-proxy-lab-"
"""Begins the name of each container, so that one left behind by a killed run is known for what it is."""

PODMAN: tuple[Argument, ...] = ("podman",)
RUNTIME = () if Path("/sys/fs/cgroup/cgroup.controllers").exists() else ("--runtime", "runc")
"""Podman's default, crun, refuses a host with hybrid cgroups."""

LIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1000:1000")
"""Podman's own defaults are above what a host without CAP_SYS_RESOURCE may set."""

USER_NAMESPACE = ("--uidmap", "0:100000:65536", "--gidmap", "0:100000:65536")
"""Options for a container in a user namespace: its root is uid 100000 of the host."""


@dataclass(frozen=True)
class Volume:
    """A file or directory of the host at a path in the container; `options` as in podman's -v."""

    source: Path
    target: str
    options: str = "ro"

    def argument(self) -> str:
        return f"{self.source.absolute()}:{self.target}:{self.options}"


FUSE_STAND_IN = Volume(Path("/dev/null"), "/dev/fuse")
"""libfuse calls its helper only if it can open /dev/fuse; any file there will do."""


@dataclass(frozen=True)
class Options:
    """How a container is started. The defaults are podman's, except for the network: none."""

    user: str | None = None
    user_namespace: bool = False
    read_only: bool = False
    privileged: bool = False
    network: str = "none"
    volumes: Sequence[Volume] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    extra: Sequence[str] = ()
    """More arguments of `podman run`, as they are."""

    def arguments(self) -> list[str]:
        """Return the arguments of `podman run` before the image."""
        arguments = [*RUNTIME, f"--network={self.network}", *LIMITS]
        if self.user is not None:
            # Without --passwd=false podman adds a uid that has no passwd entry to /etc/passwd; Kubernetes
            # and Docker do not.
            arguments += ["--user", self.user, "--passwd=false"]
        if self.user_namespace:
            arguments += USER_NAMESPACE
        if self.read_only:
            arguments.append("--read-only")
        if self.privileged:
            arguments.append("--privileged")
        if self.workdir is not None:
            arguments += ["--workdir", self.workdir]
        for volume in self.volumes:
            arguments += ["--volume", volume.argument()]
        for name, value in self.env.items():
            arguments += ["--env", f"{name}={value}"]
        return [*arguments, *self.extra]


@dataclass(frozen=True)
class Mount:
    """A line of /proc/PID/mountinfo, see proc_pid_mountinfo(5)."""

    id: int
    parent: int
    device: str
    root: str
    mountpoint: str
    options: frozenset[str]
    fstype: str
    source: str
    super_options: frozenset[str]

    @classmethod
    def parse(cls, line: str) -> Mount:
        before, _, after = line.partition(" - ")
        mount_id, parent, device, root, mountpoint, options = before.split(" ")[:6]
        fstype, source, super_options = after.rstrip("\n").split(" ")
        return cls(
            id=int(mount_id),
            parent=int(parent),
            device=device,
            root=unescape(root),
            mountpoint=unescape(mountpoint),
            options=frozenset(options.split(",")),
            fstype=unescape(fstype),
            source=unescape(source),
            super_options=frozenset(super_options.split(",")),
        )

    @property
    def is_fuse(self) -> bool:
        return self.fstype in ("fuse", "fuseblk") or self.fstype.startswith(("fuse.", "fuseblk."))


def unescape(text: str) -> str:
    """Decode the octal escapes by which the kernel keeps blanks out of a field."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def mountinfo(pid: int | str = "self") -> list[Mount]:
    """Return the mounts that this process of the host sees. FileNotFoundError or OSError (EINVAL) if it is gone."""
    table = os.fsdecode(Path(f"/proc/{pid}/mountinfo").read_bytes())
    return [Mount.parse(line) for line in table.split("\n")[:-1]]  # a carriage return may be part of a name


class Container:
    """A running container.

    with Container("sshfs image", options=Options(user="1000:1000")) as container:
        container.exec(["id", "-u"]).stdout == "1000\\n"

    The command must run until it is killed and is process 1 in the container: `sleep` is there in all
    images but `scratch`, for which see tests/programs/whoamifs.c, --pause.
    """

    DEFAULT_COMMAND = ("sleep", "infinity")

    def __init__(
        self,
        image: str,
        command: Sequence[str] = DEFAULT_COMMAND,
        options: Options | None = None,
        podman: Sequence[Argument] = PODMAN,
    ) -> None:
        """Use `podman` as the command for all that concerns this container."""
        self._podman = podman
        self.image = image
        self.command = command
        self.options = options or Options()
        self.name = PREFIX + secrets.token_hex(4)
        self._pid: int | None = None
        self._background: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Container:
        with tempfile.TemporaryDirectory(prefix=PREFIX) as directory:
            pidfile = Path(directory) / "pid"
            identity = ["--name", self.name, "--pidfile", str(pidfile)]
            try:
                run(
                    [
                        *self._podman,
                        "run",
                        "--detach",
                        *identity,
                        *self.options.arguments(),
                        self.image,
                        *self.command,
                    ]
                )
                self._pid = int(pidfile.read_text())
            except BaseException:
                self.remove()
                raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Kill and delete the container; it may be gone already."""
        remove(self.name, podman=self._podman)
        for process in self._background:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.communicate()

    def stop(self, seconds: int) -> int:
        """End the first process by SIGTERM, or by SIGKILL if it takes longer; return its exit status, 137 if killed."""
        run([*self._podman, "stop", "--time", str(seconds), self.name], timeout=seconds + 60)
        return int(run([*self._podman, "inspect", "--format", "{{.State.ExitCode}}", self.name]).stdout)

    @property
    def pid(self) -> int:
        """Return the pid of the container's first process on the host."""
        assert self._pid is not None, "the container has not been started"
        return self._pid

    def root(self) -> Path:
        """Return the container's root directory, for the host to look into (but not into its FUSE mounts)."""
        return Path(f"/proc/{self.pid}/root")

    def mountinfo(self) -> list[Mount]:
        """Return the mounts in the container."""
        return mountinfo(self.pid)

    def fuse_mounts(self, mountpoint: str | None = None) -> list[Mount]:
        """Return the FUSE mounts in the container, at this mountpoint or anywhere."""
        return [mount for mount in self.mountinfo() if mount.is_fuse and mountpoint in (None, mount.mountpoint)]

    def processes(self) -> list[int]:
        """Return the pids on the host of the processes in the container's pid namespace."""
        namespace = namespace_of(self.pid)
        assert namespace is not None, "the container has ended"
        return [pid for pid in all_pids() if namespace_of(pid) == namespace]

    def exec(
        self,
        argv: Sequence[str],
        *,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        input: str = "",  # noqa: A002  # subprocess.run's name for it
        check: bool = True,
        timeout: float = 300.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the container to its end; see commands.run for `check` and `timeout`."""
        return run(self._exec_command(argv, user, env, workdir), input=input, check=check, timeout=timeout)

    def start(
        self,
        argv: Sequence[str],
        *,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command in the container, with pipes for its stdin, stdout and stderr.

        It ends with the container at the latest.
        """
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            self._exec_command(argv, user, env, workdir),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="surrogateescape",
        )
        self._background.append(process)
        return process

    def _exec_command(
        self, argv: Sequence[str], user: str | None, env: Mapping[str, str] | None, workdir: str | None
    ) -> list[Argument]:
        options = [] if user is None else ["--user", user]
        options += [] if workdir is None else ["--workdir", workdir]
        for name, value in (env or {}).items():
            options += ["--env", f"{name}={value}"]
        return [*self._podman, *RUNTIME, "exec", "--interactive", *options, self.name, *argv]

    def logs(self) -> str:
        """Return what the container's first process wrote to stdout and stderr."""
        result = run([*self._podman, "logs", self.name], check=False)
        return result.stdout + result.stderr


def remove(name: str, attempts: int = 10, podman: Sequence[Argument] = PODMAN) -> None:
    """Kill and delete this container; it may be gone already. CommandFailed if it does not go."""
    # --volumes also deletes anonymous volumes; with --ignore a container that never existed is no error.
    argv = [*podman, "rm", "--force", "--ignore", "--volumes", "--time", "0", name]
    for _ in range(attempts - 1):
        if run(argv, check=False).returncode == 0:
            return
        # When its first process ends, podman cleans up a container of its own accord, and now and then (4.3)
        # this gets in the way of `podman rm`: "userdata/shm: device or resource busy".
        time.sleep(0.1)
    run(argv)


def run_once(
    image: str,
    command: Sequence[str],
    options: Options | None = None,
    *,
    check: bool = True,
    timeout: float = 300.0,
) -> subprocess.CompletedProcess[str]:
    """Run a container with this command to its end, and return its output and its exit status."""
    container = Container(image, command, options)
    argv = ["podman", "run", "--name", container.name, *container.options.arguments(), image, *command]
    try:
        return run(argv, check=check, timeout=timeout)
    finally:
        container.remove()


def remove_abandoned() -> None:
    """Remove the lab's containers that a killed run left behind; also those of a run still under way."""
    names = run(["podman", "ps", "--all", "--noheading", "--filter", f"name=^{PREFIX}", "--format", "{{.Names}}"])
    for name in names.stdout.split():
        remove(name)


def all_pids() -> Iterator[int]:
    """Yield the pids of the processes of this pid namespace."""
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())


def namespace_of(pid: int) -> Path | None:
    """Return the kernel's name for the pid namespace of a process; None if the process is gone."""
    try:
        return Path(f"/proc/{pid}/ns/pid").readlink()
    except OSError:
        return None


__all__ = [
    "FUSE_STAND_IN",
    "CommandFailed",
    "Container",
    "Mount",
    "Options",
    "Volume",
    "mountinfo",
    "remove_abandoned",
    "run_once",
]
