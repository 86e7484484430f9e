"""The scene of a soak: the broker on a disk of its own, its load, and the report on both."""

import random
import subprocess
import time
import traceback
from contextlib import ExitStack
from pathlib import Path

from benchmarks.soak.census import Census
from benchmarks.soak.load import Load, probe
from benchmarks.soak.report import ANYTHING, KILLED_ALONG, Ordeal, Report
from tests.lab.broker import PROGRAM, Broker
from tests.lab.callers import Trouble
from tests.lab.disk import SmallDisk
from tests.lab.faults import kill_all
from tests.lab.load import Call

CONFIGURATION = "dead_mounts_seconds = 1"
#: Characters of an error that the report shows from its beginning and from its end: it may contain a log.
SHOWN = 400


class Scene:
    """The broker, its load and the report. Closing `stack` removes everything in it."""

    def __init__(self, report: Report, stack: ExitStack, directory: Path) -> None:
        self.report = report
        self.chance = random.Random(report.seed)
        self.directory = directory
        self.disk = stack.enter_context(SmallDisk(directory / "state"))
        command = self.disk.command(PROGRAM)
        self.broker = Broker(CONFIGURATION, command, state=directory / "state")
        stack.callback(self._end_broker)
        self.broker.__enter__()
        self.load = Load(self.broker, stack, directory)
        self.census = Census(self.broker, self.load.mounts)

    def error(self, text: str, begun: float) -> None:
        self.report.seen.errors.append(Trouble(text, begun, time.monotonic()))

    def leaked(self, text: str, begun: float) -> None:
        self.report.seen.leaked.append(Trouble(text, begun, time.monotonic()))

    def error_of(self, what: str, error: Exception, begun: float) -> None:
        """Note an unexpected failure."""
        said = f"{type(error).__name__}: {error}"
        if len(said) > 2 * SHOWN:
            said = f"{said[:SHOWN]} … {said[-SHOWN:]}"
        place = traceback.extract_tb(error.__traceback__)[-1]
        self.error(f"{what}: {said} ({Path(place.filename).name}, line {place.lineno})", begun)

    def probe(self, what: str) -> tuple[Call, Call | None]:
        """Have a well-behaved caller mount and unmount; note failures, return both calls."""
        begun = time.monotonic()
        mounted, unmounted = probe(self.broker.socket, self.directory / "probe")
        for call in (mounted, unmounted):
            if call and call.status and "not found" not in call.said:  # the dead mount was removed before
                self.error(f"{what}: {call.said}", begun)
        return mounted, unmounted

    def look_for_unknown(self, what: str) -> None:
        begun = time.monotonic()
        found = self.census.unknown()
        ended = time.monotonic()
        self.report.unknown += [
            Trouble(f"{what}: device {each.device} at {each.mountpoint} of {each.whose}", begun, ended)
            for each in found
        ]

    def kill_all(self) -> None:
        """Kill all of the broker's processes. Calls under way then may fail, but not leave anything."""
        ordeal = Ordeal(KILLED_ALONG, ANYTHING, time.monotonic())
        self.report.ordeals.append(ordeal)
        kill_all(self.broker)
        ordeal.ended = time.monotonic()

    def start_again(self, seconds: float = 15) -> None:
        """Start the broker until it serves, as systemd does. AssertionError if it doesn't within so many seconds."""
        give_up = time.monotonic() + seconds
        while True:
            try:
                return self.broker.start()
            except AssertionError:
                if self.broker.process.poll() is None or time.monotonic() > give_up:
                    raise
            time.sleep(0.5)

    def ensure_running(self, what: str) -> None:
        """Start the broker again if it has ended, which it must not do by itself."""
        status = self.broker.process.poll()
        if status is not None:
            begun = time.monotonic()
            last = " ".join(self.broker.log.read_text().splitlines()[-3:])
            self.error(f"{what}: the broker has ended with status {status}: {last[-SHOWN:]}", begun)
            self.start_again()

    def _end_broker(self) -> None:
        """End the broker as systemd does, if it runs, and note if it doesn't end well."""
        begun = time.monotonic()
        self.disk.free()
        try:
            if self.broker.is_running:
                self.broker.stop()
        except (AssertionError, subprocess.TimeoutExpired) as error:
            self.error_of("the end of the broker", error, begun)
        finally:
            self.broker.remove()
