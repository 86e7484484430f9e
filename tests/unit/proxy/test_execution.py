"""The file that a program's name leads to, and the status with which its execution fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fusermount3_proxy import execution
from fusermount3_proxy.failure import Failure


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    """An environment with the directories `one` and `two` in PATH, in the working directory."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    return {b"PATH": b"one:two"}


def program(path: str, mode: int = 0o755) -> bytes:
    Path(path).write_text("#!/bin/sh\n")
    Path(path).chmod(mode)
    return path.encode()


def failure(name: bytes, environment: dict[bytes, bytes]) -> tuple[bytes, int]:
    with pytest.raises(Failure) as caught:
        execution.find(name, environment)
    return caught.value.text, caught.value.status


def test_the_first_in_path_is_found(two: dict[bytes, bytes]) -> None:
    program("two/prog")
    assert execution.find(b"prog", two) == b"two/prog"
    program("one/prog")
    assert execution.find(b"prog", two) == b"one/prog"


def test_what_may_not_be_executed_is_passed_over(two: dict[bytes, bytes]) -> None:
    program("one/prog", 0o644)
    program("two/prog")
    assert execution.find(b"prog", two) == b"two/prog"
    Path("two/prog").unlink()
    assert failure(b"prog", two) == (b"failed to execute prog: Permission denied", 126)


def test_a_directory_is_no_program(two: dict[bytes, bytes]) -> None:
    Path("one/prog").mkdir()
    assert failure(b"prog", two) == (b"failed to execute prog: Permission denied", 126)
    assert failure(b"./one", two) == (b"failed to execute ./one: Permission denied", 126)


def test_a_name_with_a_slash_is_not_looked_for(two: dict[bytes, bytes]) -> None:
    program("one/prog")
    assert execution.find(b"./one/prog", two) == b"./one/prog"
    assert failure(b"./prog", two) == (b"failed to execute ./prog: No such file or directory", 127)


def test_what_is_not_there_is_not_found(two: dict[bytes, bytes]) -> None:
    Path("one").rmdir()
    assert failure(b"prog", two) == (b"failed to execute prog: No such file or directory", 127)


def test_an_empty_directory_in_path_is_the_working_directory(two: dict[bytes, bytes]) -> None:
    program("prog")
    assert execution.find(b"prog", {**two, b"PATH": b"one::two"}) == b"./prog"


def test_without_path_the_usual_directories_are_searched() -> None:
    assert Path(os.fsdecode(execution.find(b"sh", {}))).samefile("/bin/sh")


def test_what_the_kernel_refuses_is_a_failure_with_a_status(two: dict[bytes, bytes]) -> None:
    Path("script").write_text("#!/no/such/interpreter\n")
    Path("nothing").write_text("neither script nor executable\n")
    for name, status in ((b"script", 127), (b"nothing", 126)):
        Path(os.fsdecode(name)).chmod(0o755)
        with pytest.raises(Failure) as caught:
            execution.execute(name, [name], two)
        assert caught.value.status == status
        assert caught.value.text.startswith(b"failed to execute " + name)
