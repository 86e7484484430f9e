"""`make release-check VERSION=1.2.3`: two fresh clones of this commit make the release; both have to be the same bytes.

Each is made with `make release`, from an empty directory, in another zone and with another umask than the other.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from release.statements import CHECKSUMS, digests
from release.version import CannotRelease, git

#: Time zone and umask of each build.
SURROUNDINGS = (("UTC", "022"), ("Asia/Kathmandu", "077"))


def made(clone: Path, version: str, zone: str, umask: str) -> dict[str, str]:
    """Make the release in this clone; return the digests of its files. Raises subprocess.CalledProcessError."""
    command = ["env", f"TZ={zone}", "make", "--directory", str(clone), "release", f"VERSION={version}"]
    subprocess.run(["sh", "-c", f'umask {umask} && exec "$@"', "sh", *command], check=True)
    output = clone / "build/release"
    subprocess.run(["sha256sum", "--check", "--quiet", CHECKSUMS], cwd=output, check=True)
    return digests(output)


def different(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """Return the names of files that aren't in both with the same digest."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def main() -> None:
    """Print the digests that both have, or end with the names of the files that differ."""
    version, *kept = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="fusermount3-proxy-release-") as temporary:
        place = Path(kept[0]) if kept else Path(temporary)
        found = []
        try:
            commit = git(Path.cwd(), "rev-parse", "HEAD")  # which may be another one when the first clone is ready
            for number, surroundings in enumerate(SURROUNDINGS, 1):
                clone = place / f"clone-{number}"
                git(Path.cwd(), "clone", "--quiet", "--no-local", ".", str(clone))
                git(clone, "reset", "--quiet", "--hard", commit)
                found.append(made(clone, version, *surroundings))
        except (CannotRelease, subprocess.CalledProcessError) as failed:
            sys.exit(f"release-check: {failed}")
    one, other = found
    if names := different(one, other):
        sys.exit(f"release-check: these differ: {', '.join(names)}")
    for name, digest in one.items():
        print(f"{digest}  {name}")
    print(f"release-check: both clones made the same {len(one)} files")


if __name__ == "__main__":
    main()
