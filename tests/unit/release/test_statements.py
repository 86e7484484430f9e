"""What vouches for a release: sha256sum(1) checks it, and the provenance names all files and what went into them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from release.statements import CHECKSUMS, Material, changes, debian_material, digests, write_checksums, write_provenance

ROOT = Path(__file__).parents[3]
MATERIALS = [
    debian_material("libpython3.11-dev", "3.11.2-6+deb12u6", "amd64", "bookworm"),
    Material("pkg:pypi/click@8.1.0?file_name=click.whl", "sha256", "12" * 32),
]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name in ("b.whl", "a.deb"):
        (tmp_path / name).write_text(name)
    return tmp_path


def check(directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sha256sum", "--check", CHECKSUMS], cwd=directory, capture_output=True, text=True)


def test_the_checksums_are_those_of_all_files(files: Path) -> None:
    write_checksums(files)
    assert check(files).stdout.splitlines() == ["a.deb: OK", "b.whl: OK"]
    (files / "a.deb").write_text("changed")
    assert check(files).stdout.splitlines() == ["a.deb: FAILED", "b.whl: OK"]


def test_the_provenance_names_files_commit_and_materials(files: Path) -> None:
    subjects = digests(files)
    write_provenance(files, "1.2.3", "https://example.org/source", "ab" * 20, MATERIALS)
    statement = json.loads((files / "fusermount3-proxy-1.2.3.provenance.json").read_text())
    assert (statement["_type"], statement["predicateType"]) == (
        "https://in-toto.io/Statement/v1",
        "https://slsa.dev/provenance/v1",
    )
    assert {each["name"]: each["digest"]["sha256"] for each in statement["subject"]} == subjects
    repository, *others = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert repository == {
        "uri": "git+https://example.org/source@refs/tags/v1.2.3",
        "digest": {"gitCommit": "ab" * 20},
    }
    assert others == [
        {"uri": "pkg:deb/debian/libpython3.11-dev@3.11.2-6%2Bdeb12u6?arch=amd64&distro=bookworm"},
        {"uri": "pkg:pypi/click@8.1.0?file_name=click.whl", "digest": {"sha256": "12" * 32}},
    ]


def test_the_same_release_has_the_same_statements(files: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    for name in ("a.deb", "b.whl"):
        (other / name).write_bytes((files / name).read_bytes())
    for directory, materials in ((files, MATERIALS), (other, [*reversed(MATERIALS), *MATERIALS])):
        write_provenance(directory, "1.2.3", "https://example.org/source", "ab" * 20, materials)
        write_checksums(directory)
    assert (files / CHECKSUMS).read_bytes() == (other / CHECKSUMS).read_bytes()


def test_the_changes_are_those_of_one_version() -> None:
    changelog = (
        "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-11-30\n\n### Added\n\n- A.\n\n## [0.1.0] - 2026-11-20\n"
    )
    assert changes(changelog, "0.2.0") == "## [0.2.0] - 2026-11-30\n\n### Added\n\n- A.\n"
    assert changes(changelog, "0.1.0") == "## [0.1.0] - 2026-11-20\n"
    with pytest.raises(KeyError):
        changes(changelog, "0.3.0")
