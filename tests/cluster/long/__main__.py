"""The tests of this directory as a command, which puts the report into docs/reliability.md.

    .venv/bin/python -m tests.cluster.long [arguments of pytest]

With arguments that select tests, the report is printed only. The exit status is that of pytest.
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
