"""No input makes a parser misbehave: none of the corpus, and none that the engine finds in a minute."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest

from tests.e2e.conftest import wait_until
from tests.fuzz.conftest import Background, awaits_the_engine
from tests.fuzz.runner import CORPUS, LEAST, fuzz
from tests.fuzz.targets import TARGETS


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
    wait_until(lambda: any(tmp_path.glob("**/words")), 60)
    engine.end()
    assert list(tmp_path.iterdir()) == []


def test_no_test_elsewhere_starts_the_engine(request: pytest.FixtureRequest) -> None:
    awaiting = {item.path for item in request.session.items if awaits_the_engine(item)}
    assert awaiting <= {Path(__file__)}


@pytest.mark.long
def test_the_engine_finds_nothing(fuzzing_in_background: Background) -> None:
    status, said = fuzzing_in_background.wait()
    assert status == 0, said
    tried = dict(re.findall(r"^(\w+) +(\d+) inputs", said, re.MULTILINE))
    assert tried.keys() == TARGETS.keys(), said
    assert all(int(inputs) > LEAST for inputs in tried.values()), said
    print(said)
