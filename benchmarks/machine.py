"""The machine on which a run of the benchmarks was made, which the meaning of its numbers depends on."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import psutil

from benchmarks.latency import GENUINE_PROGRAM
from benchmarks.results import Machine
from tests.lab.checkout import commit
from tests.lab.commands import run


def describe(busy: list[float]) -> Machine:
    """Return the description; `busy` has the results of `others_use` in the course of the run."""
    return Machine(
        date=datetime.now(UTC).date().isoformat(),
        kernel=f"{os.uname().sysname} {os.uname().release}",
        processor=f"{processor()}, {platform.machine()}",
        processors=os.cpu_count() or 1,
        memory=psutil.virtual_memory().total,
        versions={
            "fusermount3-proxy": commit(),
            "fusermount3": last_word([GENUINE_PROGRAM, "-V"]),
            "bindfs": last_word(["bindfs", "--version"]),
            "fio": last_word(["fio", "--version"]),
            "Python": platform.python_version(),
        },
        busy=busy,
    )


def others_use(seconds: float) -> float:
    """Return the percentage of the processors in use while this process waits for so many seconds."""
    return float(psutil.cpu_percent(interval=seconds))


def processor() -> str:
    """Return the processors' own name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return "unknown processor"


def last_word(command: list[str | Path]) -> str:
    """Return the version that a program prints at the end of a line, or of its name."""
    return run(command).stdout.split()[-1].removeprefix("fio-")
