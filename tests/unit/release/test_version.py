"""The commit of a release: two clones make the same one, and nothing is changed where it can't be made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusermount3_proxy import __version__
from release.version import STATED, CannotRelease, git, prepare

ROOT = Path(__file__).parents[3]
UNRELEASED = "## [Unreleased]\n"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the files that state the version, and what lies beside them."""
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "a maintainer")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "maintainer@example.org")
    place = tmp_path / "sources"
    place.mkdir()
    for name in (*STATED, "CHANGELOG.md", "debian/changelog", "tests/unit/packaging/test_version.py"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes((ROOT / name).read_bytes())
    changes = place / "CHANGELOG.md"
    changes.write_text(changes.read_text().replace(UNRELEASED, f"{UNRELEASED}\n### Added\n\n- A text.\n", 1))
    git(place, "init", "--quiet")
    git(place, "add", "--all")
    date = {"GIT_COMMITTER_DATE": "2026-11-30T12:00:00Z", "GIT_AUTHOR_DATE": "2026-11-30T12:00:00Z"}
    git(place, "commit", "--quiet", "--message=All", environment={**os.environ, **date})
    return place


def test_two_clones_make_the_same_commit_which_states_the_version(sources: Path, tmp_path: Path) -> None:
    clones = [tmp_path / "one", tmp_path / "other"]
    for clone in clones:
        git(tmp_path, "clone", "--quiet", str(sources), str(clone))
    one, other = (prepare(clone, "9.0.0") for clone in clones)
    assert one == other == prepare(clones[0], "9.0.0")
    assert "## [Unreleased]\n\n## [9.0.0] - 2026-11-30\n\n### " in (clones[0] / "CHANGELOG.md").read_text()
    code = "import pytest, sys; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', sys.argv[1], '--rootdir=.']))"
    stated = [sys.executable, "-c", code, "tests/unit/packaging/test_version.py"]
    environment = {**os.environ, "PYTHONPATH": f"{clones[0]}:{ROOT}"}
    result = subprocess.run(stated, cwd=clones[0], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("version", ["0.0.1", __version__, "1.0", "v9.0.0"])
def test_a_version_that_is_not_newer_changes_nothing(sources: Path, version: str) -> None:
    with pytest.raises(CannotRelease):
        prepare(sources, version)
    assert git(sources, "status", "--porcelain") == git(sources, "tag", "--list") == ""


def test_changes_that_are_not_committed_are_refused(sources: Path) -> None:
    (sources / "new").touch()
    with pytest.raises(CannotRelease, match="commit these changes first"):
        prepare(sources, "9.0.0")


def test_a_release_without_changes_is_refused(sources: Path) -> None:
    prepare(sources, "9.0.0")
    with pytest.raises(CannotRelease, match=r"CHANGELOG.md has nothing below ## \[Unreleased\]"):
        prepare(sources, "9.0.1")


def test_a_release_is_not_made_from_two_commits(sources: Path) -> None:
    commit = prepare(sources, "9.0.0")
    git(sources, "commit", "--quiet", "--allow-empty", "--message=More")
    with pytest.raises(CannotRelease, match="to build that release again"):
        prepare(sources, "9.0.0")
    assert git(sources, "rev-list", "--max-count=1", "v9.0.0") == commit
