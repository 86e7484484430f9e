"""The soak as a command.

    .venv/bin/python -m benchmarks.soak [--minutes 20] [--seed N] [--write] [--log FILE] [--fault NAME]

Containers run real FUSE programs, and other callers mount and unmount without pause; meanwhile parts of the broker or
the whole broker are killed, its disk is full, programs are killed and stopped, clients die, files are damaged, a
container attacks. A user that was not hit must see nothing of it but a slower answer. With ``--write`` the report goes
into docs/reliability.md. Ends with status 1 if anything was lost, leaked, unknown to the broker or failed; nothing is
left behind, also after SIGINT and SIGTERM.
"""

import argparse
import secrets
import signal
import sys
from pathlib import Path
from types import FrameType

from benchmarks.section import Section
from benchmarks.soak.run import soak
from tests.lab.broker import PROXY

REPORT = Section(Path(__file__).parents[2] / "docs/reliability.md", "make soak")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=20, help="%(default)s")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000), help="of what is done when; random")
    parser.add_argument("--write", action="store_true", help="put the report into docs/reliability.md")
    parser.add_argument("--log", type=Path, help="where to leave the broker's log")
    parser.add_argument("--fault", action="append", default=[], help="nothing but this one; may be repeated")
    arguments = parser.parse_args()
    if not PROXY.exists():
        sys.exit(f"{PROXY} is missing: make static")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    print(f"seed {arguments.seed}", flush=True)
    report = soak(60 * arguments.minutes, arguments.seed, arguments.log, only=arguments.fault)
    print(report.markdown())
    if arguments.write:
        REPORT.write(report.markdown())
    sys.exit(0 if report.good() else 1)


def end(number: int, _frame: FrameType | None) -> None:
    """End, and leave nothing: another signal does not interrupt the cleanup."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
