"""How long a FUSE program waits for its helper: from exec to the /dev/fuse descriptor, the proxy against the genuine.

    .venv/bin/python benchmarks/latency.py [--calls 200]

Both are called in turn, in one run, in a private mount namespace, against a broker that this starts; so the ratio
means something on a machine on which the milliseconds do not. The start alone is measured with ``-V``, and a static
C program that does nothing shows what exec and exit cost by themselves.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from broker import syscalls
from tests.lab.broker import PROXY, Broker

GENUINE = Path("/usr/bin/fusermount3")
NOTHING = "int main(void) { return 0; }"


def exec_to_descriptor(helper: Path, mountpoint: Path, environment: Mapping[str, str]) -> float:
    """Return the seconds from exec to the descriptor, and leave nothing mounted."""
    ours, theirs = socket.socketpair()
    os.set_inheritable(theirs.fileno(), True)
    arguments = [str(helper), "-o", "rw,nosuid,nodev,subtype=bench", "--", str(mountpoint)]
    with ours:
        begun = time.perf_counter()
        pid = os.posix_spawn(helper, arguments, {**environment, "_FUSE_COMMFD": str(theirs.fileno())})
        theirs.close()
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        took = time.perf_counter() - begun
    _, status = os.waitpid(pid, 0)
    if status or not descriptors:
        sys.exit(f"{helper} failed with status {status}")
    syscalls.umount2(bytes(mountpoint), syscalls.MNT_DETACH)
    os.close(descriptors[0])
    return took


def start_to_exit(program: Path, *arguments: str) -> float:
    """Return the seconds that a program takes from exec to exit."""
    begun = time.perf_counter()
    silent = [(os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0)]
    pid = os.posix_spawn(program, [str(program), *arguments], {}, file_actions=silent)
    os.waitpid(pid, 0)
    return time.perf_counter() - begun


def in_turn(calls: int, measures: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Return the milliseconds of each measure, `calls` times, taken in turn so that all see the same machine."""
    taken: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(calls):
        for name, measure in measures.items():
            taken[name].append(1000 * measure())
    return taken


def percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]


def report(title: str, taken: dict[str, list[float]], reference: str) -> dict[str, dict[str, float]]:
    """Print a table of the p50 and p99, and their ratio to those of `reference`."""
    print(f"\n{title:42} {'p50 ms':>8} {'p99 ms':>8} {'p50 ratio':>10} {'p99 ratio':>10}")
    numbers = {name: {"p50": percentile(all_, 50), "p99": percentile(all_, 99)} for name, all_ in taken.items()}
    base = numbers[reference]
    for name, each in numbers.items():
        each["ratio_p50"], each["ratio_p99"] = each["p50"] / base["p50"], each["p99"] / base["p99"]
        row = f"{each['p50']:8.3f} {each['p99']:8.3f} {each['ratio_p50']:9.2f}x {each['ratio_p99']:9.2f}x"
        print(f"  {name:40} {row}")
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=200, help="of each kind (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the numbers there, too")
    arguments = parser.parse_args()
    for needed in (GENUINE, PROXY):
        if not needed.exists():
            sys.exit(f"{needed} is missing: apt-get install fuse3, make static")
    syscalls.unshare(syscalls.CLONE_NEWNS)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    with tempfile.TemporaryDirectory() as temporary, Broker() as broker:
        numbers = measure(Path(temporary), broker, arguments.calls)
    if arguments.json:
        arguments.json.write_text(json.dumps(numbers, indent=2) + "\n")


def measure(directory: Path, broker: Broker, calls: int) -> dict[str, dict[str, dict[str, float]]]:
    mountpoint = directory / "mountpoint"
    mountpoint.mkdir()
    nothing = directory / "nothing"
    compile_nothing: list[str | Path] = ["cc", "-O2", "-static", "-x", "c", "-", "-o", nothing]
    subprocess.run(compile_nothing, input=NOTHING, text=True, check=True)
    proxied = {"FUSERMOUNT3PROXY_FDPASSING_SOCKPATH": str(broker.socket)}
    mounting = in_turn(
        calls,
        {
            "genuine fusermount3": lambda: exec_to_descriptor(GENUINE, mountpoint, {}),
            "proxy and broker": lambda: exec_to_descriptor(PROXY, mountpoint, proxied),
        },
    )
    starting = in_turn(
        calls,
        {
            "static C program that does nothing": lambda: start_to_exit(nothing),
            "genuine fusermount3 -V": lambda: start_to_exit(GENUINE, "-V"),
            "proxy -V": lambda: start_to_exit(PROXY, "-V"),
        },
    )
    print(f"{calls} calls of each; the proxy is {PROXY.stat().st_size / 1e6:.2f} MB")
    return {
        "exec_to_descriptor": report("exec to descriptor", mounting, "genuine fusermount3"),
        "start_to_exit": report("start to exit", starting, "static C program that does nothing"),
    }


if __name__ == "__main__":
    main()
