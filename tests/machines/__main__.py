"""Test the promises on other kernels: ``python -m tests.machines [--smoke | --promise …] [MACHINE …]``.

What a machine prints goes to build/machines/MACHINE.log as it comes, its results to build/machines/MACHINE, from which
`tests.machines.report` writes the tables. The exit status is 1 if a test failed on a machine, or a machine did not run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab import checkout
from tests.lab.commands import CommandFailed
from tests.lab.foreign import can_emulate
from tests.lab.machine import MachineFailed, results
from tests.machines import payload, report
from tests.machines.promises import MACHINES, PROMISES, selection, selectors_of, shown
from tests.machines.report import OUTPUT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

    from tests.lab.machine import Machine

#: Seconds for all tests on one machine, while another runs beside it, and for those of a smoke run.
_SECONDS, _SMOKE_SECONDS = 3 * 3600, 900
#: Units that no test of a smoke run needs, and whose start takes long.
_NOT_FOR_SMOKE = ("docker.service", "docker.socket", "containerd.service")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.machines")
    parser.add_argument("--smoke", action="store_true", help="run what takes minutes, not all")
    parser.add_argument("--promise", action="append", choices=PROMISES, help="run the tests of this promise, not all")
    parser.add_argument("--select", action="append", help="run these tests of pytest instead of all promises'")
    parser.add_argument("--at-once", type=int, default=2, help="number of machines that run at once")
    parser.add_argument("machine", nargs="*", choices=[[], *MACHINES], help="all, if none is named")
    arguments = parser.parse_args()
    OUTPUT.mkdir(parents=True, exist_ok=True)
    chosen = {
        name: tests
        for name, machine in MACHINES.items()
        if (name in arguments.machine or not arguments.machine) and (tests := chosen_tests(machine, arguments))
    }
    for name in [name for name in chosen if MACHINES[name].is_foreign and not can_emulate()]:
        if os.environ.get("CI") == "true":
            parser.error(f"{name} needs Linux 6.7 or newer here")
        print(f"{name}: not run: its root filesystem can only be made on Linux 6.7 or newer")
        del chosen[name]
    with ThreadPoolExecutor(arguments.at_once) as threads:
        running = {
            name: threads.submit(run_one, MACHINES[name], tests, smoke=arguments.smoke)
            for name, tests in chosen.items()
        }
        return int(have_failed(running))


def chosen_tests(machine: Machine, arguments: argparse.Namespace) -> list[str]:
    """Return what a machine is to run; nothing, if it shows none of the promises that were named."""
    if arguments.promise:
        return selectors_of(promise for promise in shown(machine) if promise in arguments.promise)
    return arguments.select or selection(machine, smoke=arguments.smoke)


def have_failed(running: Mapping[str, Future[float]]) -> bool:
    """Print the results of each machine when it has run. Return whether anything failed."""
    failed = False
    for name, result in running.items():
        try:
            took = result.result()
        except (MachineFailed, CommandFailed) as error:  # the latter if its packages could not be built
            print(error, file=sys.stderr, flush=True)
            failed = True
            continue
        kernel, cases = report.kernel(name), report.cases(name)
        bad = [f"{case.file}::{case.name}: {case.reason}" for case in cases if case.result == "failed"]
        counts = f"{len(cases) - len(bad)} passed, {len(bad)} failed, {took:.0f} s"
        print(f"{name}: Linux {kernel}: {counts}", *bad, sep="\n  ", flush=True)
        failed = failed or bool(bad) or not cases
    return failed


def run_one(machine: Machine, tests: list[str], *, smoke: bool) -> float:
    """Run a machine with these tests, and keep its results. Return the seconds it took. Raises MachineFailed.

    A smoke run has minutes, and does not record which sides of branches are executed.
    """
    began, commit = time.monotonic(), checkout.commit()
    with tempfile.TemporaryDirectory() as temporary:
        payload.make(Path(temporary), machine, tests, lines=not smoke)
        log, seconds = OUTPUT / f"{machine.name}.log", _SMOKE_SECONDS if smoke else _SECONDS
        without = _NOT_FOR_SMOKE if smoke else ()
        with results(machine, Path(temporary), log, seconds, without=without) as written:
            shutil.rmtree(OUTPUT / machine.name, ignore_errors=True)
            shutil.copytree(written, OUTPUT / machine.name)
            report.note(machine.name, tests, commit)
    return time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())
