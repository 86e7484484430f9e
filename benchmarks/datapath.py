"""Throughput of a filesystem mounted through the proxy and by the genuine helper: it must be the same.

Once a filesystem is mounted, neither helper nor broker has a part in it. To show that, fio runs through the same FUSE
program in the same mount namespace, as a user; only the file at /usr/bin/fusermount3 differs. In each round, both mount
a new filesystem, and each job runs on one right after the other, on every second round in reverse order. So what slows
down the machine for longer than a job slows down both. There are rounds until the ratio of each job is known precisely
enough to call it the same, or there were too many of them.
"""

import json
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.latency import GENUINE_PROGRAM
from benchmarks.results import GENUINE, PROXY, DataPath, Job, Transfer
from tests.e2e.conftest import USER, wait_until
from tests.lab.broker import PROXY as PROXY_PROGRAM
from tests.lab.broker import Broker
from tests.lab.callers import mounts_at
from tests.lab.commands import run

MIB = 1024 * 1024
#: Not cached by the kernel, so that each read and write goes through the FUSE program.
FIO = ("--direct=1", "--ioengine=psync", "--thread", "--group_reporting", "--time_based", "--output-format=json")
AT_ONCE = 4


class Kind(NamedTuple):
    """A kind of fio job: its name in the report, fio's name, and the size of one read or write."""

    name: str
    rw: str
    block_size: str


KINDS = (
    Kind("sequential read", "read", "128k"),
    Kind("sequential write", "write", "128k"),
    Kind("random read", "randread", "4k"),
)


def measure(fewest: int, most: int, seconds: float, file_size: int = 32 * MIB) -> DataPath:
    """Run each job for so many seconds on either filesystem in each round, in at least `fewest`, at most `most` rounds.

    After the fewest, a job whose ratio is precise is left out. The precision depends on how the rounds differ and not
    on which side was faster, so it favours no result. Needs a private mount namespace.
    """
    jobs = [Job(kind.name, kind.block_size, number, [], []) for kind in KINDS for number in (1, AT_ONCE)]
    with tempfile.TemporaryDirectory() as temporary, Broker() as broker:
        directory = Path(temporary)
        directory.chmod(0o755)
        run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", directory])  # a disk would be all that is measured
        try:
            make_device_usable(directory)
            source = make_files(directory, file_size)
            at = {helper: own(directory / name) for helper, name in ((GENUINE, "genuine"), (PROXY, "proxy"))}
            for number in range(most):
                if not (left := [job for job in jobs if number < fewest or not job.is_precise()]):
                    break
                with mounted(GENUINE, broker, source, at[GENUINE]), mounted(PROXY, broker, source, at[PROXY]):
                    for job in left:
                        for helper in (GENUINE, PROXY) if number % 2 else (PROXY, GENUINE):
                            job.of(helper).append(fio(job, at[helper], file_size, seconds))
        finally:
            run(["umount", "--lazy", directory])
    return DataPath(run(["bindfs", "--version"]).stdout.strip(), jobs)


def make_device_usable(directory: Path) -> None:
    """Make a /dev/fuse here that the user may open, as udev does; without udev only root may."""
    device = directory / "fuse"
    os.mknod(device, stat.S_IFCHR, Path("/dev/fuse").stat().st_rdev)
    device.chmod(0o666)
    run(["mount", "--bind", device, "/dev/fuse"])


def make_files(directory: Path, size: int) -> Path:
    """Return a directory with a file of so many bytes for each of fio's jobs; the files belong to the user."""
    source = own(directory / "source")
    for number in range(AT_ONCE):
        file = source / f"data.{number}"
        file.write_bytes(os.urandom(size))
        os.chown(file, USER, USER)
    return source


def own(path: Path) -> Path:
    path.mkdir()
    os.chown(path, USER, USER)
    return path


@contextmanager
def mounted(helper: str, broker: Broker, source: Path, mountpoint: Path) -> Iterator[None]:
    """Have a FUSE program show the files of `source` at `mountpoint`, mounted by this helper, for the user."""
    as_user: dict[str, Any] = {"user": USER, "group": USER, "extra_groups": []}
    environment = {**os.environ, "FUSERMOUNT3PROXY_FDPASSING_SOCKPATH": str(broker.socket)}
    with calling(helper):
        command: list[str | Path] = ["bindfs", "-f", "--multithreaded", "--no-allow-other", source, mountpoint]
        program = subprocess.Popen(command, env=environment, **as_user)
        wait_until(lambda: mounts_at(mountpoint) or program.poll() is not None)
        assert program.poll() is None, f"bindfs ended with status {program.returncode}"
        assert len(broker.mounts()) == (helper == PROXY), "it was not this helper that mounted"
    try:
        yield
    finally:
        with calling(helper):
            subprocess.run([GENUINE_PROGRAM, "-u", mountpoint], env=environment, check=True, **as_user)
        program.wait(timeout=30)


@contextmanager
def calling(helper: str) -> Iterator[None]:
    """Have this helper at the path at which libfuse calls it."""
    if helper == PROXY:
        run(["mount", "--bind", PROXY_PROGRAM, GENUINE_PROGRAM])
    try:
        yield
    finally:
        if helper == PROXY:
            run(["umount", GENUINE_PROGRAM])


def fio(job: Job, mountpoint: Path, file_size: int, seconds: float, user: int = USER) -> Transfer:
    """Run a job on the files there, as this user."""
    rw = next(kind.rw for kind in KINDS if kind.name == job.name)
    command = [
        "fio",
        *FIO,
        "--name=data",
        f"--directory={mountpoint}",
        "--filename_format=data.$jobnum",
        f"--rw={rw}",
        f"--bs={job.block_size}",
        f"--size={file_size}",
        f"--numjobs={job.jobs}",
        f"--runtime={round(1000 * seconds)}ms",
    ]
    said = subprocess.run(
        command, user=user, group=user, extra_groups=[], cwd="/", check=True, capture_output=True, text=True
    ).stdout
    done = json.loads(said)["jobs"][0]["write" if rw == "write" else "read"]
    percentiles = done["clat_ns"]["percentile"]
    return Transfer(done["bw_bytes"], percentiles["50.000000"] / 1000, percentiles["99.000000"] / 1000)
