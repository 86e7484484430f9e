"""No input makes a parser misbehave: none of the corpus, and none that the engine finds in a minute."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest

from tests.fuzz.conftest import Background
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


@pytest.mark.long
def test_the_engine_finds_nothing(background: Background) -> None:
    status, said = background.wait()
    assert status == 0, said
    tried = dict(re.findall(r"^(\w+) +(\d+) inputs", said, re.MULTILINE))
    assert tried.keys() == TARGETS.keys(), said
    assert all(int(inputs) > LEAST for inputs in tried.values()), said
    print(said)
