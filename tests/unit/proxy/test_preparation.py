"""run: what it prepares in directories that stand in for a container's, and what it reports about the rest."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fusermount3_proxy import preparation

PROBLEM = "it may mount by itself"


class Image:
    """A root directory with the files that `preparation` examines; its constants are patched to lead there."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        for directory in ("dev", "usr/bin", "bin", "run", "tmp", "opt"):
            (root / directory).mkdir(parents=True)
        self.own = root / "opt/fusermount3-proxy"
        self.own.write_text("#!/bin/sh\n# the proxy\n")
        self.own.chmod(0o755)
        self.device = root / "dev/fuse"
        monkeypatch.setattr(preparation, "DEVICE", bytes(self.device))
        monkeypatch.setattr(preparation, "DIRECTORIES", (bytes(root / "usr/bin"), bytes(root / "bin")))
        monkeypatch.setattr(preparation, "PLACES", (bytes(root / "run"), bytes(root / "tmp")))
        monkeypatch.setattr(preparation, "_may_have_privilege", lambda: False)
        self.environment = {b"PATH": bytes(root / "usr/bin")}

    def prepare_helper(self) -> list[str]:
        return [os.fsdecode(line) for line in preparation.prepare_helper(bytes(self.own), self.environment)]

    def prepare_device(self) -> list[str]:
        return [os.fsdecode(line) for line in preparation.prepare_device(self.environment)]

    def genuine(self, path: str) -> Path:
        file = self.root / path
        file.write_text("#!/bin/sh\n# the genuine helper\n")
        file.chmod(0o4755)
        return file

    def path(self) -> list[str]:
        return os.fsdecode(self.environment[b"PATH"]).split(":")


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Image:
    return Image(tmp_path.resolve(), monkeypatch)


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, beneath: Path, number: int) -> None:
    """Make a system call fail as on a read-only filesystem: permissions don't stop the tests, which run as root."""
    real = getattr(preparation, name)

    def refused(*arguments: bytes, **options: object) -> object:
        if os.fsencode(beneath) in b" ".join(each for each in arguments if isinstance(each, bytes)):
            raise OSError(number, os.strerror(number))
        return real(*arguments, **options)

    monkeypatch.setattr(preparation, name, refused)


# /dev/fuse


def test_a_device_that_can_be_opened_is_left(image: Image) -> None:
    image.device.write_text("whatever")
    before = dict(image.environment)
    assert image.prepare_device() == []
    assert image.device.read_text() == "whatever"
    assert image.environment == before


def test_where_there_is_none_a_character_device_stands_in(image: Image) -> None:
    assert image.prepare_device() == []
    assert image.device.is_char_device()
    image.device.write_bytes(b"lost")
    assert preparation.DEVICE_VARIABLE not in image.environment
    assert image.prepare_device() == []


def test_where_none_can_be_made_libfuse_is_told_of_another(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "symlink", image.root / "dev", errno.EACCES)
    (line,) = image.prepare_device()
    assert line.startswith(f"{image.device} can't be opened or made: Permission denied; ")
    assert line.endswith(f"start the container with -v /dev/null:{image.device}:ro")
    assert image.environment[b"FUSE_KERN_DEVICE"] == b"/dev/null"


def test_one_that_cannot_be_opened_is_left(image: Image) -> None:
    image.device.mkdir()
    (line,) = image.prepare_device()
    assert "Is a directory" in line
    assert image.device.is_dir()
    assert image.environment[b"FUSE_KERN_DEVICE"] == b"/dev/null"


def test_a_device_that_the_user_named_is_kept(image: Image) -> None:
    image.device.mkdir()
    image.environment[b"FUSE_KERN_DEVICE"] = b"/dev/other"
    assert len(image.prepare_device()) == 1
    assert image.environment[b"FUSE_KERN_DEVICE"] == b"/dev/other"


# fusermount3


def test_an_image_without_a_helper_gets_links(image: Image) -> None:
    assert image.prepare_helper() == []
    for name in ("fusermount3", "fusermount", "mergerfs-fusermount"):
        for directory in ("usr/bin", "bin"):
            assert (image.root / directory / name).readlink() == image.own
    assert image.path() == [str(image.root / "usr/bin")]


def test_genuine_helpers_give_way(image: Image) -> None:
    image.genuine("usr/bin/fusermount3")
    image.genuine("usr/bin/mergerfs-fusermount")
    (image.root / "usr/bin/fusermount").symlink_to("fusermount3")
    assert image.prepare_helper() == []
    names = {"fusermount3", "fusermount", "mergerfs-fusermount"}
    assert {path.name for path in (image.root / "usr/bin").iterdir()} == names
    assert {(image.root / "usr/bin" / name).resolve() for name in names} == {image.own}


def test_a_genuine_helper_that_may_mount_by_itself_stays(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = image.genuine("usr/bin/fusermount3")
    monkeypatch.setattr(preparation, "_may_have_privilege", lambda: True)
    (line,) = image.prepare_helper()
    assert line.startswith(f"{genuine} is another program, which programs with libfuse will use: ")
    assert line.endswith(PROBLEM)
    assert "genuine" in genuine.read_text()
    assert image.path() == [f"{image.root}/run/fusermount3-proxy-{os.getuid()}", str(image.root / "usr/bin")]


def test_where_the_image_cannot_be_written_it_is_first_in_path(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = image.genuine("usr/bin/fusermount3")
    for directory in ("usr", "bin"):
        refuse(monkeypatch, "symlink", image.root / directory, errno.EROFS)
    assert image.prepare_helper() == [
        f"{genuine} is another program, which programs with libfuse will use: Read-only file system"
    ]
    links = Path(image.path()[0])
    assert links == image.root / f"run/fusermount3-proxy-{os.getuid()}"
    assert {path.name: path.readlink() for path in links.iterdir()} == {
        "fusermount3": image.own,
        "fusermount": image.own,
        "mergerfs-fusermount": image.own,
    }
    assert links.stat().st_mode & 0o022 == 0


def test_nothing_is_said_of_what_is_not_there(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    for directory in ("usr", "bin"):
        refuse(monkeypatch, "symlink", image.root / directory, errno.EROFS)
    assert image.prepare_helper() == []
    assert image.path()[0] == f"{image.root}/run/fusermount3-proxy-{os.getuid()}"


def test_a_second_time_finds_what_the_first_has_prepared(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    for directory in ("usr", "bin"):
        refuse(monkeypatch, "symlink", image.root / directory, errno.EROFS)
    assert image.prepare_helper() == []
    first = image.path()
    assert image.prepare_helper() == []
    assert image.path() == first
    image.environment[b"PATH"] = bytes(image.root / "usr/bin")
    assert image.prepare_helper() == []
    assert image.path() == first
    assert [path.name for path in (image.root / "run").iterdir()] == [Path(first[0]).name]


def test_a_copy_of_the_executable_counts_as_it(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fusermount3", "fusermount"):
        copy = image.root / "usr/bin" / name
        copy.write_bytes(image.own.read_bytes())
        copy.chmod(0o755)
    refuse(monkeypatch, "symlink", image.root, errno.EROFS)
    assert image.prepare_helper() == []
    assert image.path() == [str(image.root / "usr/bin")]


def test_the_helper_of_mergerfs_that_cannot_be_replaced_is_told(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    """In contrast, an image without mergerfs lacks nothing: see the test above."""
    for name in ("fusermount3", "fusermount"):
        (image.root / "usr/bin" / name).symlink_to(image.own)
    genuine = image.genuine("usr/bin/mergerfs-fusermount")
    refuse(monkeypatch, "symlink", image.root / "usr", errno.EROFS)
    refuse(monkeypatch, "symlink", image.root / "bin", errno.EROFS)
    (line,) = image.prepare_helper()
    assert line == f"{genuine} is another program, which programs with libfuse will use: Read-only file system"


@pytest.mark.parametrize("obstacle", ["writable by others", "a link", "a file"])
def test_a_directory_that_others_may_have_made_is_not_used(
    obstacle: str, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    for directory in ("usr", "bin"):
        refuse(monkeypatch, "symlink", image.root / directory, errno.EROFS)
    place = image.root / f"run/fusermount3-proxy-{os.getuid()}"
    if obstacle == "a link":
        place.symlink_to(image.root / "opt")
    elif obstacle == "a file":
        place.touch()
    else:
        place.mkdir()
        place.chmod(0o777)
    assert image.prepare_helper() == []
    assert image.path()[0] == f"{image.root}/tmp/fusermount3-proxy-{os.getuid()}"


def test_where_nothing_can_be_written_that_is_said(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "symlink", image.root, errno.EROFS)
    (line,) = image.prepare_helper()
    assert line == f"no fusermount3 in PATH: none of {image.root}/run, {image.root}/tmp can be written"
    assert image.path() == [str(image.root / "usr/bin")]


@pytest.mark.parametrize(("mask", "has_it"), [("000001ffffffffff", True), ("00000000a80425fb", False)])
def test_the_bounding_set_says_whether_a_helper_could_mount(
    mask: str, has_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = f"Name:\tx\nCapEff:\t0000000000000000\nCapBnd:\t{mask}\nCapAmb:\t0000000000000000\n"
    monkeypatch.setattr(preparation, "_read", lambda _: status.encode())
    assert preparation._may_have_privilege() is has_it
