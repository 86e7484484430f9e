"""Walk all journeys, and write the table in docs/where-it-runs.md: ``python -m tests.journeys``, as root."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.journeys.journey import ROOT, ROUTES, TABLE, WRITE, table


def main() -> None:
    with tempfile.TemporaryDirectory() as results:
        tests = dict.fromkeys(route.test for route in ROUTES.values())
        command = [sys.executable, "-m", "pytest", *tests]
        status = subprocess.run(command, cwd=ROOT, env={**os.environ, WRITE: results}).returncode
        if status:
            sys.exit(status)
        TABLE.write(table(Path(results)))


if __name__ == "__main__":
    main()
