"""`make release-check` runs `make release` in two clones, and names the files that differ."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from release import check
from release.version import git

RELEASE = """\
release:
\tmkdir -p build/release
\techo $(VERSION) > build/release/same
\t{}
\tcd build/release && sha256sum * > ../sums && mv ../sums SHA256SUMS
"""


def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """Run the check in a repository whose release has one more file, which the line of its Makefile writes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["check", "1.2.3"])
    (tmp_path / "Makefile").write_text(RELEASE.format(line))
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "Makefile")
    who = ("-c", "user.name=a maintainer", "-c", "user.email=maintainer@example.org")
    git(tmp_path, *who, "commit", "--quiet", "--message=All")
    check.main()


def test_two_clones_that_make_the_same_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    checked(tmp_path, monkeypatch, "true")
    assert "release-check: both clones made the same 1 files\n" in capfd.readouterr().out


def test_both_clones_have_the_commit_at_which_the_check_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    who = "-c user.name=a -c user.email=a@example.org"
    commit = f"git -C {tmp_path} {who} commit --quiet --allow-empty --message=Another"
    checked(tmp_path, monkeypatch, f"git rev-parse HEAD > build/release/other && {commit}")


@pytest.mark.parametrize("difference", ["pwd", "date +%Z", "umask"])
def test_what_differs_by_directory_zone_or_umask_is_named(
    difference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=r"^release-check: these differ: other$"):
        checked(tmp_path, monkeypatch, f"{difference} > build/release/other")
