"""Invalid rows of a table: they are put aside, and stay in its file."""

import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

#: The most bytes in a value of a row: as many as in a message.
_LONGEST_VALUE = 65536
#: How many of the rows put aside are logged, and how many characters of each.
_MOST_TOLD, _LONGEST_TOLD = 10, 200


class Rows(NamedTuple):
    """Valid rows, and damaged ones: the number (rowid) and text of each."""

    good: list[tuple[Any, ...]]
    damaged: list[tuple[int, str]]


def sort_rows(rows: Iterable[tuple[Any, ...]], types: Iterable[Any]) -> Rows:
    """Sort rows, each beginning with its number, by whether their values have these types and are in their bounds.

    A type is int, bool, float, str or bytes, or an int with a range, as in `messages.quantities`.
    """
    checks = [_check_of(kind) for kind in types]
    sorted_rows = Rows([], [])
    for number, *values in rows:
        if all(is_well(value) for is_well, value in zip(checks, values, strict=True)):
            sorted_rows.good.append(tuple(values))
        else:
            sorted_rows.damaged.append((number, repr(values)))
    return sorted_rows


def told(damaged: Sequence[tuple[int, str]]) -> str:
    """Return the log text about damaged rows."""
    rows = ", ".join(row[:_LONGEST_TOLD] for _, row in damaged[:_MOST_TOLD])
    return f"{len(damaged)} rows with invalid values: {rows}"


def put_rows_aside(database: sqlite3.Connection, table: str, damaged: Iterable[tuple[int, str]]) -> None:
    """Move damaged rows of the table into the table "damaged", each as a line of text. Raises sqlite3.Error."""
    database.execute("CREATE TABLE IF NOT EXISTS damaged (found, row)")
    for number, row in damaged:
        database.execute("INSERT INTO damaged VALUES (?, ?)", [int(time.time()), row])
        database.execute(f"DELETE FROM {table} WHERE rowid = ?", [number])


def types_of(kind: type[Any]) -> dict[str, Any]:
    """Return the types of a dataclass's fields, for `sort_rows`."""
    return {name: _plain(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}


def _plain(hint: Any) -> Any:
    """Return the type below a NewType."""
    return _plain(hint.__supertype__) if hasattr(hint, "__supertype__") else hint


def _check_of(kind: Any) -> Callable[[Any], bool]:
    """Return a function that tells whether a value of a row is valid for that type: callers wait for a broker that
    starts, and it looks at each value of each row."""
    if get_origin(kind) is Annotated:
        _, numbers = get_args(kind)
        return lambda value: type(value) is int and value in numbers
    if kind is bool:
        return lambda value: type(value) is int and value in (0, 1)
    if kind is int:
        return lambda value: type(value) is int and value >= 0
    if kind is float:
        return lambda value: isinstance(value, int | float) and 0 <= value < 2**40  # seconds; no clock has more
    nul = b"\0" if kind is bytes else "\0"  # no path contains it, and no record can hold it
    return lambda value: type(value) is kind and len(value) <= _LONGEST_VALUE and nul not in value
