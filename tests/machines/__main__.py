"""Test the promises on the kernels of other releases: ``python -m tests.machines [--write] [SUITE …]``.

What a machine prints goes to build/machines/SUITE.log as it comes, its results to build/machines/SUITE. With --write,
the tables go into docs/compatibility.md. The exit status is 1 if a test failed on a machine, or a machine did not run.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.lab.machine import MachineFailed, Release, results
from tests.machines import branches, lines, payload, report
from tests.machines.promises import PROMISES

SUITES = ("bookworm", "trixie", "sid")
OUTPUT = payload.ROOT / "build/machines"
#: Seconds for all tests on one machine, while others run beside it.
_SECONDS = 3 * 3600


def run(suite: str, selection: list[str]) -> tuple[str, list[report.Case]]:
    """Return the release of the machine's kernel, and the results of the tests. Raises MachineFailed."""
    release, log = Release(suite), OUTPUT / f"{suite}.log"
    with tempfile.TemporaryDirectory() as temporary:
        given = Path(temporary)
        payload.make(given, suite, selection)
        with results(release, given, log, _SECONDS) as found:
            shutil.rmtree(OUTPUT / suite, ignore_errors=True)
            shutil.copytree(found, OUTPUT / suite)
    kernel = (OUTPUT / suite / "kernel").read_text().strip()
    return kernel, report.cases(OUTPUT / suite / "junit.xml")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.machines")
    parser.add_argument("--write", action="store_true", help="write the table into docs/compatibility.md")
    parser.add_argument("--select", action="append", help="run these tests of pytest instead of all promises'")
    parser.add_argument("--at-once", type=int, default=1, help="number of machines that run at once")
    parser.add_argument("suite", nargs="*", default=SUITES)
    arguments = parser.parse_args()
    OUTPUT.mkdir(parents=True, exist_ok=True)
    selection = arguments.select or [selector for selectors in PROMISES.values() for selector in selectors]
    status, found, recorded = 0, {}, {}
    with ThreadPoolExecutor(arguments.at_once) as machines:
        for suite, result in [(suite, machines.submit(run, suite, selection)) for suite in arguments.suite]:
            try:
                kernel, cases = result.result()
            except MachineFailed as error:
                print(error, file=sys.stderr)
                status = 1
                continue
            found[kernel] = cases
            recorded[kernel] = lines.recorded(OUTPUT / suite / "lines")
            failed = [f"{case.file}::{case.name}" for case in cases if case.result == "failed"]
            print(
                f"{suite}: Linux {kernel}: {len(cases) - len(failed)} passed, {len(failed)} failed", *failed, sep="\n  "
            )
            status = status or int(bool(failed) or not cases)
    print(report.table(found), branches.table(recorded), sep="\n")
    if arguments.write and not arguments.select:
        report.write(found, recorded)
    return status


if __name__ == "__main__":
    sys.exit(main())
