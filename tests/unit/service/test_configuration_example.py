"""packaging/fusermount3-broker.toml documents every key, with its default, and nothing else."""

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from fusermount3_broker.service.configuration import Configuration, Deadlines, Limits, Socket
from fusermount3_broker.service.configuration_file import load

EXAMPLE = Path(__file__).parents[3] / "packaging/fusermount3-broker.toml"


def uncommented(text: str) -> str:
    """Return the example with every key set. Prose begins with "# " and a word; all else after a "#" is TOML."""
    return re.sub(r"^#(?! \S)", "", text, flags=re.MULTILINE)


def keys_of(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)} - {"source"}


@pytest.mark.parametrize("edit", [str, uncommented], ids=["as it is", "uncommented"])
def test_the_example_is_the_default(tmp_path: Path, edit: type[str]) -> None:
    file = tmp_path / "broker.toml"
    file.write_text(edit(EXAMPLE.read_text()))
    assert load(file) == dataclasses.replace(Configuration(), source=bytes(file))


def test_the_example_has_every_key_and_no_other() -> None:
    table = tomllib.loads(uncommented(EXAMPLE.read_text()))
    assert set(table) == keys_of(Configuration)
    assert set(table["deadlines"]) == keys_of(Deadlines)
    assert set(table["limits"]) == keys_of(Limits)
    assert [set(each) for each in table["socket"]] == [keys_of(Socket)]


def test_the_example_sets_nothing_and_begins_no_table_so_that_a_key_may_be_appended(tmp_path: Path) -> None:
    assert tomllib.loads(EXAMPLE.read_text()) == {}
    file = tmp_path / "broker.toml"
    file.write_text(EXAMPLE.read_text() + "mount_max = 7\n[limits]\nburst = 8\n")
    assert load(file) == dataclasses.replace(Configuration(), mount_max=7, limits=Limits(burst=8), source=bytes(file))
