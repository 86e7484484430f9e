"""The new version, in all files that state it, as a commit and a tag.

Both depend on the last commit only, so that two clones make the same release: its date is the date of that commit.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path

NUMBER = r"(\d+\.\d+\.\d+)"
_KUSTOMIZATION = (rf"- name: fusermount3-broker\n +newTag: {NUMBER}$", 1)
#: By file: the text around the version, and its number of occurrences. debian/changelog has it, too.
STATED = {
    "fusermount3_proxy/__init__.py": (rf'^__version__ = "{NUMBER}"$', 1),
    "packaging/kubernetes/chart/Chart.yaml": (rf"^(?:version|appVersion): {NUMBER}$", 2),
    "packaging/kubernetes/base/kustomization.yaml": _KUSTOMIZATION,
    "packaging/kubernetes/controller/kustomization.yaml": (rf"- name: fusermount3-controller\n +newTag: {NUMBER}$", 1),
    "packaging/kubernetes/device-plugin/kustomization.yaml": _KUSTOMIZATION,
    "packaging/kubernetes/device-plugin-cdi/kustomization.yaml": _KUSTOMIZATION,
    "packaging/kubernetes/metrics/kustomization.yaml": _KUSTOMIZATION,
    "packaging/rpm/fusermount3-proxy.spec": (rf"^Version: +{NUMBER}$", 1),
    "docs/containers.md": (rf"localhost/fusermount3-(?:proxy|broker):{NUMBER}\b", 3),
    "docs/kubernetes.md": (rf"localhost/fusermount3-broker:{NUMBER}\b", 1),
    "docs/troubleshooting.md": (rf"^fusermount3-proxy version: {NUMBER}$", 1),
}
_CHANGES = "CHANGELOG.md"
_DEBIAN = "debian/changelog"
_UNRELEASED = "## [Unreleased]\n"
_ENTRY = """\
fusermount3-proxy ({version}) unstable; urgency=medium

  * CHANGELOG.md, in the documentation's package, has what is new.

 -- {maintainer}  {date}

"""


class CannotRelease(Exception):
    """The clone is in no state to be released from; the message says why, and what to do."""


def prepare(root: Path, version: str) -> str:
    """Commit and tag the version, unless this commit has the tag already. Return the commit. Raises CannotRelease."""
    if not re.fullmatch(NUMBER, version):
        raise CannotRelease(f"VERSION={version} is not of the form 1.2.3")
    if changed := git(root, "status", "--porcelain"):
        raise CannotRelease(f"commit these changes first, or remove them:\n{changed}")
    tag = f"v{version}"
    if git(root, "tag", "--list", tag):
        if git(root, "rev-list", "--max-count=1", tag) != git(root, "rev-parse", "HEAD"):
            raise CannotRelease(f"{tag} is another commit: git checkout {tag} to build that release again")
        return git(root, "rev-parse", "HEAD")
    committed = datetime.fromtimestamp(int(git(root, "show", "--no-patch", "--format=%ct", "HEAD")), UTC)
    state(root, version, committed)
    date = committed.isoformat()
    environment = {**os.environ, "GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    message = [f"--message=Release {version}", f"--message=CHANGELOG.md has what is new since {_before(root)}."]
    git(root, "-c", "commit.gpgsign=false", "commit", "--quiet", "--all", *message, environment=environment)
    git(root, "tag", "--annotate", f"--message=Release {version}", tag, environment=environment)
    return git(root, "rev-parse", "HEAD")


def state(root: Path, version: str, date: datetime) -> None:
    """Write version and date into all files that state them. Raises CannotRelease, and then has changed nothing."""
    texts = {name: (root / name).read_text() for name in (*STATED, _CHANGES, _DEBIAN)}
    ((current,),) = [re.findall(STATED[name][0], texts[name], re.MULTILINE) for name in list(STATED)[:1]]
    if tuple(map(int, version.split("."))) <= tuple(map(int, current.split("."))):
        raise CannotRelease(f"the last version is {current}, and {version} is not newer")
    before, heading, after = texts[_CHANGES].partition(_UNRELEASED)
    if not re.match(r"\n### ", after):
        raise CannotRelease(f"{_CHANGES} has nothing below {_UNRELEASED.strip()}")
    texts[_CHANGES] = f"{before}{heading}\n## [{version}] - {date.date().isoformat()}\n{after}"
    (maintainer, *_) = re.findall(r"^ -- (.*>)  ", texts[_DEBIAN], re.MULTILINE)
    texts[_DEBIAN] = _ENTRY.format(version=version, maintainer=maintainer, date=format_datetime(date)) + texts[_DEBIAN]
    for name, (pattern, times) in STATED.items():
        texts[name], found = re.subn(pattern, lambda match: _replaced(match, version), texts[name], flags=re.MULTILINE)
        if found != times:
            raise CannotRelease(f"{name} states the version {found} times, not {times}: see release/version.py")
    for name, text in texts.items():
        (root / name).write_text(text)


def _replaced(match: re.Match[str], version: str) -> str:
    """Return the text that was found, with this version."""
    begin, end = (each - match.start() for each in match.span(1))
    return match[0][:begin] + version + match[0][end:]


def _before(root: Path) -> str:
    """Return the version before the newest, from Debian's changelog."""
    _, before, *_ = re.findall(rf"^fusermount3-proxy \({NUMBER}\)", (root / _DEBIAN).read_text(), re.MULTILINE)
    return str(before)


def git(root: Path, *arguments: str, environment: dict[str, str] | None = None) -> str:
    """Run git and return what it prints. Raises CannotRelease with what it says if it fails."""
    result = subprocess.run(["git", *arguments], cwd=root, env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        raise CannotRelease(f"git {' '.join(arguments)}: {result.stderr.strip()}")
    return result.stdout.strip()


def main() -> None:
    """`make release-commit VERSION=…`: commit and tag, and print the commit."""
    try:
        print(prepare(Path.cwd(), sys.argv[1]))
    except CannotRelease as failed:
        sys.exit(f"release: {failed}")


if __name__ == "__main__":
    main()
