"""The lines on which the keys of a TOML document are, which tomllib does not tell."""

import io
import tomllib
from collections.abc import Iterator
from typing import Any

#: A key, below the keys of its tables and the indexes of its lists.
Key = tuple[str | int, ...]

#: The most lines of a value whose key gets a number. Each further line costs another attempt to parse all of them.
_LONGEST_VALUE = 200


def of_keys(text: str) -> dict[Key, int]:
    """Return the number of the line on which each key, table and element of a list begins; the first line is 1.

    `text` is valid TOML. Of what comes after a value of too many lines, nothing is returned.
    """
    lines: dict[Key, int] = {}
    tables: dict[Key, int] = {}
    table: Key = ()
    for number, statement in _statements(text):
        parsed = tomllib.loads(statement)
        if statement.lstrip().startswith("["):
            table = _table(parsed, tables)
            lines.setdefault(table, number)
            continue
        for key in _keys(parsed):
            lines.setdefault(table + key, number)
    return lines


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield each header of a table and each key with its value, and the number of its first line."""
    statement, first = "", 1
    for number, line in enumerate(io.StringIO(text, newline="\n"), 1):
        statement += line
        try:
            parsed = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:  # its value goes on
            if number - first >= _LONGEST_VALUE:
                return
            continue
        if parsed:
            yield first, statement
        statement, first = "", number + 1


def _table(parsed: dict[str, Any], tables: dict[Key, int]) -> Key:
    """Return the key of the table that a header begins, counting in `tables` the elements of each list of tables."""
    key: Key = ()
    value: Any = parsed
    while value:
        if isinstance(value, dict):
            (name,) = value
            key, value = (*key, name), value[name]
            if isinstance(value, dict) and key in tables:  # a table of the last element
                key = (*key, tables[key])
        else:
            tables[key] = tables.get(key, -1) + 1
            key, value = (*key, tables[key]), value[0]
    return key


def _keys(value: Any) -> Iterator[Key]:
    """Yield the keys in a value, outer ones first."""
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield (name,)
            yield from ((name, *key) for key in _keys(inner))
