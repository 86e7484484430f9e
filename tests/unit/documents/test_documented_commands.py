"""A test executes each block of commands in the documentation, or the block is listed with the reason why none can."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e import documented
from tests.e2e.documented import EXECUTED, NOT_EXECUTED

TESTS = Path(__file__).parents[2]
LANGUAGES_OF_COMMANDS = ("", "Containerfile")
LISTED = [*EXECUTED, *NOT_EXECUTED]

COMMANDS = [block for block in documented.blocks() if block.language in LANGUAGES_OF_COMMANDS]


def is_block(block: documented.Block, listed: tuple[str, str]) -> bool:
    page, beginning = listed
    return block.page == page and block.text.startswith(beginning)


@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: f"{block.page}: {block.text.partition(chr(10))[0][:60]}")
def test_a_block_of_commands_is_listed_once(block: documented.Block) -> None:
    assert len([listed for listed in LISTED if is_block(block, listed)]) == 1


@pytest.mark.parametrize("listed", LISTED, ids=": ".join)
def test_what_is_listed_is_one_block(listed: tuple[str, str]) -> None:
    assert len([block for block in COMMANDS if is_block(block, listed)]) == 1


@pytest.mark.parametrize(("listed", "file"), EXECUTED.items(), ids=lambda value: "".join(value))
def test_the_test_that_executes_a_block_reads_it(listed: tuple[str, str], file: str) -> None:
    (test,) = TESTS.rglob(file)
    assert "from tests.e2e.documented import" in test.read_text()
    assert listed[0] == "containers.md" or f'"{listed[0]}"' in test.read_text()


def test_other_blocks_have_a_language() -> None:
    languages = {block.language for block in documented.blocks() if block.page != "troubleshooting.md"}
    assert languages <= {*LANGUAGES_OF_COMMANDS, "text", "yaml", "toml"}


def test_what_is_typed_in_troubleshooting_is_typed_by_its_test() -> None:
    assert {block.language for block in documented.blocks() if block.page == "troubleshooting.md"} == {"", "console"}
    assert 'PAGES["troubleshooting.md"]' in (TESTS / "e2e/test_troubleshooting.py").read_text()


def test_all_pages_install_into_the_same_directory() -> None:
    directories = re.findall(r"^python3 -m venv (/\S+)$", "\n".join(block.text for block in COMMANDS), re.MULTILINE)
    assert len(directories) >= 2
    assert len(set(directories)) == 1
