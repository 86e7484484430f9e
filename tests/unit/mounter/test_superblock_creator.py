"""The process that creates a superblock among a container's processes can do that, and nothing else."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from errno import EBADF, EINVAL, EPERM
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fusermount3_broker.mounter import programs

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

ROOT = Path(__file__).parents[3]
PROGRAM = Path(programs.file_of(programs.SUPERBLOCK_CREATOR))
SCRIPT = ROOT / "packaging/mounter_programs.py"
#: What `confined.c` tries that a confined process may do, and the errno with which it ends.
POSSIBLE = {
    "create a filesystem": EBADF,
    "create a new filesystem": EBADF,
    "create a filesystem in a child": EBADF,
}
FREE = "be unconfined"


def _load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mounter_programs", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = _load_script()


@pytest.fixture(scope="session")
def confined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that confines itself with the source of `superblock_creator`, compiled."""
    program = tmp_path_factory.mktemp("confined") / "confined"
    flags = [*build.FREESTANDING, "-Wno-unused-function", f"-I{PROGRAM.parent}"]
    subprocess.run(["cc", *flags, Path(__file__).with_name("confined.c"), "-o", program], check=True)
    return program


@pytest.fixture
def attempt(confined: Path) -> Callable[[str], int]:
    """Try something in a confined process; return the errno, or 0."""
    return lambda name: subprocess.run([confined, name]).returncode


@pytest.fixture(scope="session")
def attempts(confined: Path) -> list[str]:
    return subprocess.run([confined], check=True, capture_output=True, text=True).stdout.splitlines()


def test_it_can_do_nothing_else(attempts: list[str], attempt: Callable[[str], int]) -> None:
    found = {name: attempt(name) for name in attempts}
    assert found == dict.fromkeys(attempts, EPERM) | POSSIBLE | {FREE: 0}
    assert len(found) > 25


@pytest.mark.parametrize("commands", [[], ["6", "8"]])
def test_it_says_why_it_creates_nothing(tmp_path: Path, commands: list[str]) -> None:
    expected = EBADF if commands else EINVAL
    directory = os.open(tmp_path, os.O_PATH)
    arguments = [str(directory), "-1", "0", "1000", *commands]
    assert subprocess.run([PROGRAM, *arguments], stdin=subprocess.DEVNULL, pass_fds=[directory]).returncode == expected
    os.close(directory)


def test_whatever_its_arguments_are_it_ends_with_an_errno() -> None:
    """It does not check its arguments: the mounter's are numbers. But no argument makes it do anything else."""
    generator = random.Random(1)
    words = ["", "-", "-1", "0", "1", "2", "3", "99999999999999999999", "x", "6", "8", "%s", "\udcff", "-9" * 50]
    for _ in range(500):
        arguments = generator.choices(words, k=generator.randrange(9))
        ended = subprocess.run([PROGRAM, *arguments], stdin=subprocess.DEVNULL, capture_output=True)
        assert ended.returncode in range(1, 134), arguments
        assert (ended.stdout, ended.stderr) == (b"", b"")


def test_the_programs_are_built_of_the_sources_that_are_here(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'broker'}"}
    subprocess.run([sys.executable, SCRIPT, "--output", tmp_path], env=environment, check=True)
    for name in build.PROGRAMS:
        assert (tmp_path / name).read_bytes() == PROGRAM.with_name(name).read_bytes()
