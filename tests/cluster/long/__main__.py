"""The tests of this directory as a command, which puts the report into docs/reliability.md.

    .venv/bin/python -m tests.cluster.long [arguments of pytest]
    .venv/bin/python -m tests.cluster.long JUNIT_FILE...

With arguments that select tests, the report is printed only. The exit status is that of pytest. Who has no hour for all
tests at once runs them in parts, with --junitxml=JUNIT_FILE, and names the files of all parts afterwards.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks.section import Section
from tests.cluster.long import report

DIRECTORY = Path(__file__).parent
REPORT = Section(DIRECTORY.parents[2] / "docs/reliability.md", "make test-cluster-long")


def main(arguments: list[str]) -> int:
    if arguments and all(each.endswith(".xml") for each in arguments):
        return _put_together([Path(each) for each in arguments])
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "junit.xml"
        status = int(pytest.main([*(arguments or [str(DIRECTORY)]), "-o", "junit_family=xunit1", f"--junitxml={file}"]))
        if status == pytest.ExitCode.INTERRUPTED or not file.exists() or "Kubernetes" not in report.about(file):
            return status or 1
        text = report.markdown(report.about(file), report.cases(file))
    print(text)
    if not arguments:
        REPORT.write(text)
    return status


def _put_together(files: list[Path]) -> int:
    """Write the report of a run in parts. The exit status is 1 if a file of tests is in none of them."""
    found = [case for file in files for case in report.cases(file)]
    if missing := {path.stem for path in DIRECTORY.glob("test_*.py")} - {each.module for each in found}:
        print(f"no results of {', '.join(sorted(missing))}", file=sys.stderr)
        return 1
    REPORT.write(report.markdown(report.about(*files), sorted(found, key=lambda each: each.module)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
