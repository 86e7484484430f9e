"""``python -m tests.fuzz``: fuzz the targets one after another, each for a number of seconds or of inputs."""

from __future__ import annotations

import os
import sys
import time

import click

from tests.fuzz.engine import end_with_parent
from tests.fuzz.runner import FOUND, LEAST, fuzz
from tests.fuzz.targets import TARGETS


@click.command()
@click.option("--seconds", default=60, show_default=True, help="For each target.")
@click.option("--inputs", type=int, help="For each target, instead.")
@click.option("--idle", is_flag=True, help="Take only what others leave of the processor, and end with the parent.")
@click.argument("targets", nargs=-1, type=click.Choice(sorted(TARGETS)))
def main(seconds: int, inputs: int | None, idle: bool, targets: tuple[str, ...]) -> None:
    if idle:
        end_with_parent()
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    limit = f"-max_total_time={seconds}" if inputs is None else f"-runs={inputs}"
    failed = False
    for name in targets or TARGETS:
        begun = time.monotonic()
        module = f"tests.fuzz.targets.{name}"
        result = fuzz(module, limit, FOUND / name)
        if idle and inputs is None and not result.failure and result.inputs <= LEAST:
            # Others have left too little of the processor in these seconds.
            result = fuzz(module, f"-runs={2 * LEAST}", FOUND / name)
        took = time.monotonic() - begun
        print(f"{name:12} {result.inputs:10} inputs in {took:5.0f} s, {result.reached:4} places reached", flush=True)
        if result.failure:
            failed = True
            print(result.failure, flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
