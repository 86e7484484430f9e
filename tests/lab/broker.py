"""The broker as an administrator runs it: the installed program, with a configuration file of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from fusermount3_broker.cli import control_client
from tests.lab.commands import run
from tests.lab.pace import SLOWNESS
from tests.lab.podman import Volume

PROGRAM = Path(sys.executable).with_name("fusermount3-broker")
PROXY = Path(__file__).parents[2] / "build/static/fusermount3-proxy"
"""The static executable that `make static` builds."""


class Broker:
    """A running broker with its sockets and state in a directory of its own; gone when the `with` block ends.

    with Broker("user_allow_other = true") as broker:
        Container(image, options=Options(volumes=broker.volumes()))
    """

    def __init__(
        self,
        configuration: str = "",
        command: tuple[str | Path, ...] = (PROGRAM,),
        service: tuple[str | Path, ...] = ("serve",),
        state: Path | None = None,
    ) -> None:
        """Take `configuration` as TOML; `command` starts the broker.

        `configuration` is added to the settings that keep the broker in its directory. `service` is the subcommand
        with its options; `state` is the directory of the tables, if they are elsewhere.
        """
        self._configuration = configuration
        self._command = command
        self._service = service
        self._directory = tempfile.TemporaryDirectory(prefix="fusermount3-broker-")
        self.directory = Path(self._directory.name)
        self.socket = self.directory / "sockets" / "broker.sock"
        self.config = self.directory / "broker.toml"
        self.log = self.directory / "log"
        self.state = state or self.directory / "state"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Broker:
        try:
            self.directory.chmod(0o755)
            self.configure(self._configuration)
            self.start()
        except BaseException:  # an interrupt, too: a broker that still runs would write into a directory that goes
            self._end()
            self.remove()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.stop()
        finally:
            self.remove()

    def remove(self) -> None:
        """Remove the contents of the broker's directory."""
        self._directory.cleanup()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def configure(self, configuration: str) -> None:
        """Write the configuration file; `reload` or a start puts it into force.

        Unless it says otherwise, dead mounts stay: tests make some, and examine them. And any number of requests per
        second is accepted: many tests share one user.
        """
        if "dead_mounts_seconds" not in configuration:
            configuration = f"dead_mounts_seconds = 0\n{configuration}"
        if "[limits]" not in configuration:
            configuration += "\n[limits]\nrequests_per_second = 0"
        self.config.write_text(
            f'control_socket = "{self.directory}/control/control.sock"\n'
            f'state_directory = "{self.state}"\n'
            f"{configuration}\n"
            f'[[socket]]\npath = "{self.socket}"\n'
        )

    def start(self) -> None:
        """Start the broker, and return when it serves."""
        written = self.log.stat().st_size if self.log.exists() else 0
        self.launch()
        self.wait_for("serving", since=written)

    def launch(self) -> None:
        """Start the broker without waiting for it."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command, *self._service, "--config", self.config],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def stop(self) -> None:
        """End the broker as systemd does, and check that it ends well."""
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(timeout=30 * SLOWNESS)
        except BaseException:
            self._end()
            raise
        assert status == 0, self.log.read_text()

    def _end(self) -> None:
        """Kill the broker, if it runs, and wait until its other processes have noticed."""
        if self._process is None:
            return
        with suppress(psutil.NoSuchProcess):
            others = psutil.Process(self._process.pid).children()
            self._process.kill()
            self._process.wait()
            psutil.wait_procs(others, timeout=30 * SLOWNESS)

    def reload(self) -> None:
        """Have the broker reload its configuration, and return when it has."""
        seen = len(self.records("configuration"))
        self.process.send_signal(signal.SIGHUP)
        self.wait_for("configuration", seen + 1)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the broker has not been started"
        return self._process

    @property
    def front(self) -> psutil.Process:
        return self._started("front")

    @property
    def mounter(self) -> psutil.Process:
        return self._started("mounter")

    def _started(self, name: str) -> psutil.Process:
        """Return the process that the supervisor, `process`, has started under that name."""
        return psutil.Process(control_client.ask(self.directory / "control/control.sock", "status")[name]["pid"])

    def records(self, message: str = "", since: int = 0) -> list[dict[str, Any]]:
        """Return the log records whose event, or message without one, begins with `message`: those after the first
        `since` bytes of the log."""
        text = ""
        if self.log.exists():
            with self.log.open("rb") as log:
                log.seek(since)
                text = log.read().decode(errors="replace")
        lines = text[: text.rfind("\n") + 1].splitlines()  # the last record may still be incomplete
        records = [json.loads(line) for line in lines if line.startswith("{")]
        return [record for record in records if record.get("event", record["message"]).startswith(message)]

    def wait_for(self, message: str, count: int = 1, seconds: float = 15, since: int = 0) -> list[dict[str, Any]]:
        """Return the records that `records` finds, once there are `count` of them."""
        give_up = time.monotonic() + SLOWNESS * seconds
        while len(found := self.records(message, since)) < count:
            assert self.process.poll() is None, f"the broker has ended:\n{self.log.read_text()}"
            assert time.monotonic() < give_up, f"no {message!r} in the log:\n{self.log.read_text()}"
            time.sleep(0.01)
        return found

    def mounts(self) -> list[dict[str, Any]]:
        """Return the output of `fusermount3-broker mounts --json`."""
        mounts: list[dict[str, Any]] = json.loads(self.ask("mounts", "--json"))
        return mounts

    def status(self) -> dict[str, Any]:
        """Return the output of `fusermount3-broker status --json`."""
        status: dict[str, Any] = json.loads(self.ask("status", "--json"))
        return status

    def ask(self, *arguments: str) -> str:
        """Return the output of a command of fusermount3-broker."""
        return run([*self._command, arguments[0], "--config", self.config, *arguments[1:]]).stdout

    def volumes(self, helper: Path = PROXY) -> list[Volume]:
        """Return a container's volumes: the socket's directory, and the proxy under the names that callers look for."""
        return [
            Volume(self.socket.parent, "/run/fusermount3-proxy"),
            Volume(helper, "/usr/bin/fusermount3"),
            Volume(helper, "/usr/bin/fusermount"),
        ]
