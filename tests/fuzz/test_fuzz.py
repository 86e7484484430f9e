"""No input makes a parser misbehave: none of the corpus, and none that the engine finds in a minute."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import wait_until
from tests.fuzz.background import AWAITING, Background, awaits_the_engine, wait
from tests.fuzz.runner import CORPUS, LEAST, fuzz
from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]


#: A plugin that is `tests.fuzz.background`, with another command.
COUNTING = """
import subprocess
from pathlib import Path
from tests.fuzz.background import *
from tests.fuzz import background
real = subprocess.Popen
def counted(command, **options):
    with Path("started").open("a") as file:
        file.write("x")
    return real(["echo", "said"], **{**options, "cwd": None})
background.subprocess = type("Counted", (), {"Popen": staticmethod(counted)})
"""
WAITING = """
import pytest
from tests.fuzz.background import directory_of, wait

@pytest.fixture
def fuzzing_in_background(request):
    return directory_of(request.config)

def test_the_engine_finds_nothing(fuzzing_in_background):
    assert wait(fuzzing_in_background) == (0, "said\\n")
"""


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_passes(name: str) -> None:
    target = TARGETS[name]
    inputs = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
    assert inputs
    for data in (*inputs, *target.SEEDS, *target.WORDS):
        target.check(data)


def test_every_corpus_is_of_a_target() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)


def test_an_input_that_fails_is_found_and_told(tmp_path: Path) -> None:
    result = fuzz("tests.fuzz.failing", "-max_total_time=60", tmp_path)
    assert "AssertionError: a record" in result.failure
    told = re.search("Base64: (.+)", result.failure)
    assert told
    (kept,) = tmp_path.glob("crash-*")
    assert base64.b64decode(told[1]) == kept.read_bytes()
    assert kept.read_bytes().endswith(b"\0")


def test_an_engine_that_is_ended_early_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    engine = Background()
    engine.start()
    wait_until(lambda: any(tmp_path.glob("**/words")), 60)
    engine.end()
    assert list(tmp_path.iterdir()) == []


def test_no_test_elsewhere_starts_the_engine(request: pytest.FixtureRequest) -> None:
    awaiting = {item.path for item in request.session.items if awaits_the_engine(item)}
    assert awaiting <= {Path(__file__)}
    assert f"::{test_the_engine_finds_nothing.__name__}" == AWAITING


def test_several_processes_have_one_engine(tmp_path: Path) -> None:
    """A session of two processes, whose plugin counts instead of fuzzing."""
    (tmp_path / "counting.py").write_text(COUNTING)
    (tmp_path / "test_it.py").write_text(WAITING)
    (tmp_path / "test_other.py").write_text("def test_something(): pass\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "counting",
        "-n2",
        "-p",
        "no:cacheprovider",
        f"--rootdir={tmp_path}",
    ]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTEST_ADDOPTS": ""}
    result = subprocess.run([*command, "."], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "started").read_text() == "x"


@pytest.mark.long
def test_the_engine_finds_nothing(fuzzing_in_background: Path) -> None:
    status, said = wait(fuzzing_in_background)
    assert status == 0, said
    tried = dict(re.findall(r"^(\w+) +(\d+) inputs", said, re.MULTILINE))
    assert tried.keys() == TARGETS.keys(), said
    assert all(int(inputs) > LEAST for inputs in tried.values()), said
    print(said)
