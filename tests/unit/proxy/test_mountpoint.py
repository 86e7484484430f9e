"""Finding and pinning the mountpoint: the parent directory is resolved, the last component is kept as it is."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fusermount3_proxy import mountpoint
from fusermount3_proxy.failure import Failure


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate working directory, left after the test, since `locate` changes the working directory."""
    directory = (tmp_path / "here").resolve()
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


def locate(path: bytes | str | Path) -> tuple[Path, bytes, bytes]:
    """Locate the path; return the directory, the name and the path found."""
    place = mountpoint.locate(os.fsencode(path))
    try:
        return Path(f"/proc/self/fd/{place.directory}").readlink(), place.name, place.path
    finally:
        os.close(place.directory)


def pinned(path: bytes | str | Path) -> os.stat_result:
    """Locate and pin the path, check that the descriptor is a mere handle, and return its status."""
    place = mountpoint.locate(os.fsencode(path))
    descriptor = mountpoint.pin(place)
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.read(descriptor, 1)
        assert not os.get_inheritable(descriptor)
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)
        os.close(place.directory)


def complaint(path: bytes | str | Path) -> str:
    with pytest.raises(Failure) as caught:
        place = mountpoint.locate(os.fsencode(path))
        try:
            mountpoint.pin(place)
        finally:
            if not place.problem:
                os.close(place.directory)
    return os.fsdecode(caught.value.text)


@pytest.mark.parametrize(
    "written", ["mnt", "mnt/", "mnt///", "./mnt", "../here/mnt", ".//mnt/", "a/../mnt", "link/mnt"]
)
def test_a_relative_path_is_found_from_the_working_directory(here: Path, written: str) -> None:
    (here / "mnt").mkdir()
    (here / "a").mkdir()
    (here / "link").symlink_to(here)
    assert locate(written) == (here, b"mnt", bytes(here / "mnt"))


@pytest.mark.parametrize("written", ["{}/mnt", "{}/mnt/", "/{}//mnt//", "{}/./mnt", "{}/../here/mnt", "{}/link/mnt"])
def test_an_absolute_path_is_resolved(here: Path, written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "mnt").mkdir()
    (here / "link").symlink_to(".")
    monkeypatch.chdir("/")
    assert locate(written.format(here)) == (here, b"mnt", bytes(here / "mnt"))


@pytest.mark.parametrize("written", [".", "./", "../mnt/.", "./.", "deep/..", "deep/../", "{}/.", "{}/deep/.."])
def test_a_path_that_ends_in_dots_is_resolved_whole(here: Path, written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "mnt" / "deep").mkdir(parents=True)
    monkeypatch.chdir(here / "mnt")
    assert locate(written.format(here / "mnt")) == (here, b"mnt", bytes(here / "mnt"))


def test_a_link_that_ends_in_a_dot_is_what_it_leads_to(here: Path) -> None:
    (here / "mnt").mkdir()
    (here / "link").symlink_to("mnt")
    assert locate("link/.") == (here, b"mnt", bytes(here / "mnt"))


@pytest.mark.parametrize("written", ["/", "//", "/.", "/..", "///"])
def test_the_root_directory_is_found(here: Path, written: str) -> None:
    assert here
    directory, _, path = locate(written)
    assert (directory, path) == (Path("/"), b"/")


def test_an_entry_of_the_root_directory_has_one_slash(here: Path) -> None:
    assert here
    assert locate("/none-such") == (Path("/"), b"none-such", b"/none-such")


def test_an_entry_need_not_exist_to_be_found(here: Path) -> None:
    assert locate("gone") == (here, b"gone", bytes(here / "gone"))


@pytest.mark.parametrize(
    "name", [b" ", b"a b", b"a\nb", b"a\\b", b"\\040", b"\xff\xfe", "ä".encode(), b"-u", b"...", b"a:b,c=d", b"x" * 255]
)
def test_a_name_is_bytes(here: Path, name: bytes) -> None:
    os.mkdir(os.path.join(bytes(here), name))  # noqa: PTH102, PTH118 - a name that is no text
    assert locate(name) == (here, name, bytes(here) + b"/" + name)
    assert stat.S_ISDIR(pinned(name).st_mode)


def test_the_longest_path_is_found(here: Path) -> None:
    path = bytes(here)
    while len(path) + 201 < 4095 - 1:
        path += b"/" + b"d" * 200
    last = b"m" * (4095 - len(path) - 1)
    Path(os.fsdecode(path)).mkdir(parents=True)
    path += b"/" + last
    Path(os.fsdecode(path)).mkdir()
    assert len(path) == 4095
    assert locate(path)[1:] == (last, path)
    assert stat.S_ISDIR(pinned(path).st_mode)


def test_a_longer_path_is_refused(here: Path) -> None:
    assert here
    assert complaint(b"/" + b"x" * 256).startswith("failed to access mountpoint /x")
    path = b"/x" * 2050
    assert complaint(path) == f"bad mount point {path.decode()}: File name too long"


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("none/mnt", "No such file or directory"),
        ("{}/none/mnt", "No such file or directory"),
        ("none/.", "No such file or directory"),
        ("file/.", "Not a directory"),
        ("loop/mnt", "Too many levels of symbolic links"),
        ("dangling/mnt", "No such file or directory"),
    ],
)
def test_a_bad_directory_above_is_told_with_the_path_as_written(here: Path, written: str, reason: str) -> None:
    (here / "file").touch()
    (here / "loop").symlink_to("loop")
    (here / "dangling").symlink_to("nowhere")
    written = written.format(here)
    assert complaint(written) == f"bad mount point {written}: {reason}"


def test_a_file_above_is_told_with_the_resolved_path(here: Path) -> None:
    (here / "file").touch()
    assert complaint("file/mnt") == f"failed to access mountpoint {here}/file/mnt: Not a directory"


def test_an_empty_path_is_refused() -> None:
    assert complaint("") == "invalid mountpoint ''"


@pytest.mark.parametrize("written", ["mnt", "."])
def test_a_working_directory_that_was_removed_is_told(here: Path, written: str) -> None:
    here.rmdir()
    assert complaint(written) == f"bad mount point {written}: No such file or directory"


def test_a_missing_mountpoint_is_told_with_the_resolved_path(here: Path) -> None:
    assert complaint("./gone/") == f"failed to access mountpoint {here}/gone: No such file or directory"


def test_a_directory_and_a_file_are_pinned(here: Path) -> None:
    (here / "mnt").mkdir()
    (here / "file").touch()
    assert pinned("mnt").st_ino == (here / "mnt").stat().st_ino
    assert pinned("file").st_ino == (here / "file").stat().st_ino


def test_what_was_found_stays_found_when_the_directory_is_renamed(here: Path) -> None:
    (here / "above" / "mnt").mkdir(parents=True)
    place = mountpoint.locate(b"above/mnt")
    (here / "above").rename(here / "elsewhere")
    (here / "above" / "mnt").mkdir(parents=True)
    descriptor = mountpoint.pin(place)
    assert os.fstat(descriptor).st_ino == (here / "elsewhere" / "mnt").stat().st_ino
    os.close(descriptor)
    os.close(place.directory)


@pytest.mark.parametrize("written", ["link", "link/"])
def test_a_users_symbolic_link_is_pinned_as_such(here: Path, monkeypatch: pytest.MonkeyPatch, written: str) -> None:
    (here / "mnt").mkdir()
    (here / "link").symlink_to("mnt")
    monkeypatch.setattr(mountpoint, "getuid", lambda: 1000)
    assert stat.S_ISLNK(pinned(written).st_mode)


def test_roots_symbolic_link_is_followed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "mnt").mkdir()
    (here / "link").symlink_to("mnt")
    monkeypatch.setattr(mountpoint, "getuid", lambda: 0)
    assert pinned("link").st_ino == (here / "mnt").stat().st_ino


@pytest.mark.parametrize("path", ["/proc/self/fd", "/proc/self/map_files", "/proc/thread-self/fd", "/proc/self/fd/"])
def test_what_only_this_process_may_write_is_refused_for_what_it_is(path: str) -> None:
    """The broker would report that the caller may not write: no other process may, not even the broker."""
    with pytest.raises(Failure) as caught:
        mountpoint.pin(mountpoint.locate(path.encode()))
    assert caught.value.text == b"mounting over filesystem type 0x00009fa0 is forbidden"
