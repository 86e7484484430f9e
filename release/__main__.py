"""`make release VERSION=1.2.3`: the commit and its tag, unless this is it already, then all files in build/release."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from release.build import build, check_machine
from release.statements import CHECKSUMS
from release.version import CannotRelease, prepare
from tests.lab.commands import CommandFailed


def main() -> None:
    """Make the release of this clone, and print where it is."""
    os.umask(0o022)
    root, version = Path.cwd(), sys.argv[1]
    output = root / "build/release"
    try:
        check_machine()
        build(root, version, prepare(root, version), output)
    except (CannotRelease, CommandFailed, subprocess.CalledProcessError) as failed:
        sys.exit(f"release: {failed}")
    print(f"release: {len(list(output.iterdir()))} files in {output.relative_to(root)}, listed in {CHECKSUMS}")


if __name__ == "__main__":
    main()
