"""Where the callers run: unprivileged containers with the proxy in the place of fusermount3, one for each kit.

A `Machine` is used by many tests, one after the other, and `check_nothing_left` sees that each leaves it as it was. A
`Place` is a test's own directory in it, with a mountpoint.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from tests.callers.s3 import s3_for
from tests.lab.podman import Container, Options
from tests.lab.sshd import sshd_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from subprocess import CompletedProcess, Popen

    from tests.callers.callers import Caller, Kit
    from tests.lab.broker import Broker

ROOT = "0:0"
USER = "1000:1000"


class Machine:
    """A running container with a kit, and the servers that callers in it have asked for."""

    def __init__(self, broker: Broker, kit: Kit, devices: Sequence[str]) -> None:
        """`devices` are the arguments of `podman run` that put something at /dev/fuse; or none do."""
        self._stack = contextlib.ExitStack()
        self._services: dict[str, dict[str, str]] = {}
        options = Options(volumes=[*broker.volumes(), *kit.volumes()], extra=devices)
        self.container = self._stack.enter_context(Container(kit.tag(), options=options))

    def close(self) -> None:
        self._stack.close()

    def service(self, name: str) -> dict[str, str]:
        """Return what a command's template needs to know of this server, started now unless it runs."""
        if name and name not in self._services:
            self._services[name] = {"s3": self._start_s3, "ssh": self._start_ssh}[name]()
        return self._services.get(name, {})

    def _start_s3(self) -> dict[str, str]:
        return {"url": self._stack.enter_context(s3_for(self.container))}

    def _start_ssh(self) -> dict[str, str]:
        sshd = self._stack.enter_context(sshd_for(self.container))
        sshd.authorize(self.container, user=USER)
        (sshd.export / "hello").write_text("hello\n")
        return {"ssh": shlex.join(sshd.sshfs_arguments())}

    def daemons(self) -> list[int]:
        """Return the processes in the container that are neither its first one nor a helper."""
        return [pid for pid in self.processes() if "fusermount" not in command_of(pid)]

    def helpers(self) -> list[int]:
        """Return the processes in the container that were started as fusermount3."""
        return [pid for pid in self.processes() if "fusermount" in command_of(pid)]

    def processes(self) -> list[int]:
        """Return the live processes in the container but its first one, which doesn't reap zombies."""
        return [pid for pid in self.container.processes() if pid != self.container.pid and command_of(pid)]


def command_of(pid: int) -> str:
    """Return the first word of a process's command line; empty for a zombie, or if there is none."""
    with contextlib.suppress(psutil.NoSuchProcess, IndexError):
        return str(psutil.Process(pid).cmdline()[0])
    return ""


def check_nothing_left(machine: Machine, seconds: float = 15) -> None:
    """Check that soon there is no FUSE mount and no process in the container. Raises AssertionError."""
    wait_until(lambda: not machine.container.fuse_mounts(), seconds)
    wait_until(lambda: not machine.processes(), seconds)


def wait_until(true: Callable[[], object], seconds: float = 15) -> None:
    """Return when `true()` is. AssertionError after so many seconds."""
    give_up = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.02)


@dataclass(frozen=True)
class Place:
    """The directory of one test, with a mountpoint; it belongs to the user who the caller runs as."""

    machine: Machine
    caller: Caller
    user: str
    directory: str

    @classmethod
    def make(cls, machine: Machine, caller: Caller, user: str, name: str) -> Place:
        """Make the directory, and what the caller is to mount."""
        place = cls(machine, caller, user, f"/tmp/{name}")
        script = "mkdir -p {dir} && cd {dir} && mkdir mnt src && echo hello > src/hello"
        place.shell(f"{script} && {caller.prepare}" if caller.prepare else script)
        return place

    @property
    def mountpoint(self) -> str:
        return f"{self.directory}/mnt"

    def filled(self, template: str) -> str:
        """Return the template of a command with its blanks filled."""
        places = {"mnt": self.mountpoint, "dir": self.directory, "src": f"{self.directory}/src"}
        return template.format_map(places | self.machine.service(self.caller.service))

    def shell(self, script: str) -> CompletedProcess[str]:
        """Run a script to its end, as the user."""
        return self.machine.container.exec(["sh", "-c", self.filled(script)], user=self.user)

    def run(self, command: str, *, check: bool = True) -> CompletedProcess[str]:
        """Run a command to its end, as the user."""
        argv = shlex.split(self.filled(command))
        return self.machine.container.exec(argv, user=self.user, env={"HOME": self.directory}, check=check)

    def start(self, command: str) -> Popen[str]:
        """Start a command that serves in the foreground, and return when it has mounted."""
        argv = shlex.split(self.filled(command))
        program = self.machine.container.start(argv, user=self.user, env={"HOME": self.directory})
        wait_until(lambda: self.is_mounted() or program.poll() is not None, 30)
        assert program.poll() is None, program.communicate()
        return program

    def is_mounted(self) -> bool:
        return self.machine.container.fuse_mounts(self.mountpoint) != []

    def read(self, file: str) -> str:
        """Return what is read from a file in the mount."""
        return self.shell(f"cat {{mnt}}/{file}").stdout

    def unmount(self) -> None:
        """Unmount as the caller's users do, and see that it is quiet and done."""
        result = self.run(self.caller.unmount)
        assert (result.stdout, result.stderr) == ("", "")
        assert not self.is_mounted()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the caller."""
        for pid in self.machine.daemons():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


STAND_IN = ("--volume", "/dev/null:/dev/fuse:ro")
"""The remedy for callers that give up unless they can open /dev/fuse."""

DEVICE = ("--device", "/dev/fuse")
NO_DEVICE: tuple[str, ...] = ()
