"""A cache of results that are slow to make: Debian root filesystems, compiled programs.

An entry is a directory. Its name ends in a hash of its recipe, so a changed recipe makes a new entry and an old
checkout still finds its own. It is built under a temporary name and renamed when complete; a manifest in the format of
sha256sum(1) is written last and checked before each process's first use, so a damaged entry is built again instead of
failing a test in odd ways. Two runs that want the same entry wait for each other on a lock file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MANIFEST = "SHA256SUMS"
ATTEMPTS, PAUSE = 3, 10.0
"""How often a build whose download fails is tried, and the seconds in between."""

DAYS = 3
"""How long an entry that was made of a checkout stays when another one has been made."""


class DownloadFailed(RuntimeError):
    """A build could not download something. A moment later it may be able to."""


def default_root() -> Path:
    """Return the cache's directory: $FUSERMOUNT3PROXY_CACHE, else below $XDG_CACHE_HOME, else below ~/.cache."""
    if chosen := os.environ.get("FUSERMOUNT3PROXY_CACHE"):
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).absolute() / "fusermount3-proxy"


def recipe_hash(*parts: str | bytes) -> str:
    """Return a short name for a recipe; the parts are kept apart, so ("ab", "c") and ("a", "bc") differ."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(b"%d:" % len(data) + data)
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Cache:
    """The entries below one directory, which is created when first needed."""

    root: Path = field(default_factory=default_root)
    _verified: set[Path] = field(default_factory=set, repr=False, compare=False)

    def entry(self, name: str, recipe: str, build: Callable[[Path], None]) -> Path:
        """Return the directory NAME-RECIPE; `build` fills an empty directory if there is none or it is damaged.

        If it raises DownloadFailed, it is called again after a pause, `ATTEMPTS` times in all.
        """
        path = self.root / f"{name}-{recipe}"
        if path in self._verified:
            return path
        with self.locked(path.name):
            if not is_whole(path):
                self._build(path, build)
        self._verified.add(path)
        return path

    def entry_of_checkout(self, name: str, recipe: str, build: Callable[[Path], None]) -> Path:
        """Return `entry`, and remove others of this name that are days old: each change of a checkout makes one."""
        path = self.entry(name, recipe, build)
        for other in self.root.glob(f"{name}-*"):
            if other != path and time.time() - other.stat().st_mtime > DAYS * 86400:
                shutil.rmtree(other)
        return path

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Hold the lock of this name against other processes; the lock files stay, they are empty."""
        locks = self.root / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / name).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _build(self, path: Path, build: Callable[[Path], None]) -> None:
        for attempt in range(1, ATTEMPTS):
            try:
                return self._try_to_build(path, build)
            except DownloadFailed as error:
                print(f"{path.name}: attempt {attempt} of {ATTEMPTS} failed: {error}", file=sys.stderr, flush=True)
                time.sleep(PAUSE)
        return self._try_to_build(path, build)

    def _try_to_build(self, path: Path, build: Callable[[Path], None]) -> None:
        shutil.rmtree(path, ignore_errors=True)
        # This process holds the lock, so no other one uses the remains of an interrupted build.
        for abandoned in self.root.glob(f".{path.name}.*"):
            shutil.rmtree(abandoned)
        building = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=self.root))
        try:
            building.chmod(0o755)  # containers of any uid use the files in here
            build(building)
            write_manifest(building)
            building.rename(path)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise


def write_manifest(directory: Path) -> None:
    """Record the files of this directory; written after them, so that it never vouches for an incomplete entry."""
    lines = [f"{sha256(path)}  {path.name}\n" for path in files_of(directory)]
    with (directory / MANIFEST).open("w") as manifest:
        manifest.write("".join(lines))
        manifest.flush()
        os.fsync(manifest.fileno())


def read_manifest(directory: Path) -> dict[str, str]:
    """Return the sha256 of each file of an entry, by name. FileNotFoundError if there is no entry."""
    lines = (directory / MANIFEST).read_text(errors="replace").splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def is_whole(directory: Path) -> bool:
    """Return whether the entry exists and holds exactly the files that its manifest names, unchanged."""
    try:
        return read_manifest(directory) == {path.name: sha256(path) for path in files_of(directory)}
    except OSError:
        return False


def files_of(directory: Path) -> list[Path]:
    """Return the files that a manifest covers, sorted. Entries are flat: a tree goes into a tarball."""
    return sorted(path for path in directory.iterdir() if path.name != MANIFEST)


def sha256(path: Path) -> str:
    """Return the digest of a file's content, as sha256sum(1) prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
