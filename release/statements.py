"""What vouches for the files of a release: checksums, a statement of provenance, and the changes.

All of it follows from the files, the commit and what was built with. There are no times and no names of machines in it,
so the same release has the same statements.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

CHECKSUMS = "SHA256SUMS"
#: Of this project: how the predicate is to be read, and who has built. A forge that builds attests itself, beside it.
BUILD_TYPE = "https://fusermount3-proxy.dev/build-types/make-release/v1"
BUILDER = "https://fusermount3-proxy.dev/builders/make-release"


@dataclass(frozen=True)
class Material:
    """What went into a build: a URI, and a digest by the name of its algorithm, if there is one."""

    uri: str
    algorithm: str = ""
    digest: str = ""

    def descriptor(self) -> dict[str, Any]:
        """Return it as a ResourceDescriptor of in-toto."""
        return {"uri": self.uri} | ({"digest": {self.algorithm: self.digest}} if self.digest else {})


def debian_material(package: str, version: str, architecture: str, suite: str) -> Material:
    """Return a binary package of Debian's, which its version identifies."""
    return Material(f"pkg:deb/debian/{quote(package)}@{quote(version)}?arch={architecture}&distro={suite}")


def sha256(file: Path) -> str:
    """Return the digest of a file, in hexadecimal."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def digests(directory: Path) -> dict[str, str]:
    """Return the digests of the files in the directory, without the one that lists them, by name."""
    files = sorted(file for file in directory.iterdir() if file.name != CHECKSUMS)
    return {file.name: sha256(file) for file in files}


def write_checksums(directory: Path) -> None:
    """Write the digests of all files there, as sha256sum(1) checks them."""
    lines = (f"{digest}  {name}\n" for name, digest in digests(directory).items())
    (directory / CHECKSUMS).write_text("".join(lines))


def provenance(
    version: str, source: str, commit: str, subjects: dict[str, str], materials: Iterable[Material]
) -> dict[str, Any]:
    """Return in-toto's statement of SLSA's provenance (slsa.dev/provenance/v1).

    `source`: the URL of the repository; `subjects`: the digests of the files of the release, by name.
    """
    repository = Material(f"git+{source}@refs/tags/v{version}", "gitCommit", commit)
    others = sorted(set(materials), key=lambda material: (material.uri, material.digest))
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in subjects.items()],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"command": f"make release VERSION={version}", "version": version},
                "resolvedDependencies": [material.descriptor() for material in (repository, *others)],
            },
            "runDetails": {"builder": {"id": BUILDER}},
        },
    }


def write_provenance(directory: Path, version: str, source: str, commit: str, materials: Sequence[Material]) -> None:
    """Write the statement on all files that are there so far."""
    statement = provenance(version, source, commit, digests(directory), materials)
    text = json.dumps(statement, indent=2)
    (directory / f"fusermount3-proxy-{version}.provenance.json").write_text(f"{text}\n")


def changes(changelog: str, version: str) -> str:
    """Return the part of CHANGELOG.md on this version. Raises KeyError if there is none."""
    found = re.search(rf"^## \[{re.escape(version)}\] - .*?(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None:
        raise KeyError(version)
    return found[0].rstrip() + "\n"
