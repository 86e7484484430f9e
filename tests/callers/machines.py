"""The containers of the callers: unprivileged, with the proxy in place of fusermount3, one for each kit.

Many tests use one `Machine`, one after the other, and `check_nothing_left` checks that each test leaves it as it was. A
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
from tests.lab.broker import PROXY
from tests.lab.podman import Container, Options, Volume
from tests.lab.sshd import sshd_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from subprocess import CompletedProcess, Popen

    from tests.callers.callers import Caller, Kit
    from tests.lab.broker import Broker

ROOT = "0:0"
USER = "1000:1000"


class Machine:
    """A running container with a kit, and the servers that its callers have needed so far."""

    def __init__(self, broker: Broker, kit: Kit, devices: Sequence[str]) -> None:
        """`devices` are the arguments of `podman run` that provide a /dev/fuse; empty for none."""
        self._stack = contextlib.ExitStack()
        self._services: dict[str, dict[str, str]] = {}
        self.broker = broker
        of_mergerfs = Volume(PROXY, "/usr/bin/mergerfs-fusermount")
        options = Options(volumes=[*broker.volumes(), of_mergerfs, *kit.volumes()], extra=devices)
        self.container = self._stack.enter_context(Container(kit.tag(), options=options))

    def close(self) -> None:
        self._stack.close()

    def service(self, name: str) -> dict[str, str]:
        """Return the template values for this server; start the server unless it runs."""
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
        """Return the processes in the container, except its first process and helpers."""
        return [pid for pid in self.processes() if "fusermount" not in command_of(pid)]

    def helpers(self) -> list[int]:
        """Return the processes in the container that were started as fusermount3."""
        return [pid for pid in self.processes() if "fusermount" in command_of(pid)]

    def processes(self) -> list[int]:
        """Return the live processes in the container, except its first process, which doesn't reap zombies."""
        return [pid for pid in self.container.processes() if pid != self.container.pid and command_of(pid)]


def command_of(pid: int) -> str:
    """Return the first word of a process's command line; empty for a zombie, and if there is no command line."""
    with contextlib.suppress(psutil.NoSuchProcess, IndexError):
        return str(psutil.Process(pid).cmdline()[0])
    return ""


def check_nothing_left(machine: Machine, seconds: float = 15) -> None:
    """Wait until the container has no FUSE mount and no process. Raises AssertionError on timeout."""
    wait_until(lambda: not machine.container.fuse_mounts(), seconds)
    wait_until(lambda: not machine.processes(), seconds)


def wait_until(true: Callable[[], object], seconds: float = 15) -> None:
    """Wait until `true()` is true. Raises AssertionError after this many seconds."""
    give_up = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.02)


@dataclass(frozen=True)
class Place:
    """The directory of one test, with a mountpoint; it belongs to the user that the caller runs as."""

    machine: Machine
    caller: Caller
    user: str
    directory: str

    @classmethod
    def make(cls, machine: Machine, caller: Caller, user: str, name: str) -> Place:
        """Make the directory, and the files that the caller mounts."""
        place = cls(machine, caller, user, f"/tmp/{name}")
        script = "mkdir -p {dir} && cd {dir} && mkdir mnt src && echo hello > src/hello"
        place.shell(f"{script} && {caller.prepare}" if caller.prepare else script)
        return place

    @property
    def mountpoint(self) -> str:
        return f"{self.directory}/mnt"

    @property
    def was_refused_allow_other(self) -> bool:
        """Whether the broker has refused a mount here for lack of `user_allow_other`, according to its log."""
        refused = self.machine.broker.records("mount refused")
        here = [record["text"] for record in refused if record["mountpoint"] == self.mountpoint]
        return any(text.startswith("option allow_other only allowed if") for text in here)

    def filled(self, template: str) -> str:
        """Return a command's template with its placeholders filled in."""
        places = {"mnt": self.mountpoint, "dir": self.directory, "src": f"{self.directory}/src"}
        return template.format_map(places | self.machine.service(self.caller.service))

    def shell(self, script: str) -> CompletedProcess[str]:
        """Run a script to completion as the user."""
        return self.machine.container.exec(["sh", "-c", self.filled(script)], user=self.user)

    def run(self, command: str, *, check: bool = True) -> CompletedProcess[str]:
        """Run a command to completion as the user."""
        argv = shlex.split(self.filled(command))
        return self.machine.container.exec(argv, user=self.user, env={"HOME": self.directory}, check=check)

    def start(self, command: str) -> Popen[str]:
        """Start a command that serves in the foreground, and wait until it has mounted."""
        argv = shlex.split(self.filled(command))
        program = self.machine.container.start(argv, user=self.user, env={"HOME": self.directory})
        wait_until(lambda: self.is_mounted() or program.poll() is not None, 30)
        assert program.poll() is None, program.communicate()
        return program

    def is_mounted(self) -> bool:
        return self.machine.container.fuse_mounts(self.mountpoint) != []

    def read(self, file: str) -> str:
        """Return the content of a file in the mount."""
        return self.shell(f"cat {{mnt}}/{file}").stdout

    def unmount(self) -> None:
        """Unmount with the caller's usual command, and check that it prints nothing and succeeds."""
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
