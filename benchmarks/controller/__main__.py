"""The controller at scale, as a command: 1,000 simulated nodes and 10,000 pods on a real API server.

    .venv/bin/python -m benchmarks.controller [--nodes 1000] [--workloads 10000] [--rate 15] [--quick] [--write]

With ``--write`` the report goes into docs/performance.md. Ends with status 1 if a bound is missed.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.controller import report
from benchmarks.controller.measurement import measure
from benchmarks.controller.simulation import Extent
from benchmarks.section import Section

REPORT = Section(Path(__file__).parents[2] / "docs/performance.md", "make bench-controller")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.controller")
    parser.add_argument("--nodes", type=int, default=1000, help="%(default)s")
    parser.add_argument("--workloads", type=int, default=10000, help="%(default)s")
    parser.add_argument("--rate", type=float, default=15, help="pods that come in a second; %(default)s")
    parser.add_argument("--write", action="store_true", help="put the report into docs/performance.md")
    parser.add_argument("--quick", action="store_true", help="in short, to see that it runs; numbers mean nothing then")
    arguments = parser.parse_args()
    extent = Extent(arguments.nodes, arguments.workloads, arguments.rate)
    if arguments.quick:
        extent = Extent(nodes=20, workloads=100, rate=20, volumes=10, idle=1, asking=2)
    with tempfile.TemporaryDirectory() as temporary:
        measured = measure(extent, Path(temporary))
    text = report.markdown(measured)
    print(text)
    if arguments.write:
        REPORT.write(text)
    missed = report.missed(measured)
    for each in missed:
        print(f"MISSED {each}")
    sys.exit(1 if missed and not arguments.quick else 0)


if __name__ == "__main__":
    main()
