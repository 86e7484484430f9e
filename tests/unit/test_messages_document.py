"""docs/messages.md has every message that the broker and the proxy can write or answer, and none besides."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from broker.metrics import REQUESTS

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/messages.md").read_text()
#: Where the metrics are, with the descriptions that their text has.
METRICS = (ROOT / "docs/operations.md").read_text()
MODULES = sorted(
    path
    for package in ("broker", "fusermount3_proxy")
    for path in (ROOT / package).rglob("*.py")
    if not path.name.endswith("_pb2.py")
)
#: What is between backticks; what is so in the first column of a table is a message, or several.
QUOTED = re.findall("`([^`\n]+)`", PAGE)
TOLD = [message for row in re.findall(r"^\| (`.+?) \|", PAGE, re.MULTILINE) for message in re.findall("`([^`]+)`", row)]

#: What stands in the page for a value.
VALUE = "…"
_PLACE = re.compile(r"%[-0-9.]*[a-z]")
_WORDS = re.compile(r"[A-Za-z]{2}\S* \S*[a-z]{2}")

#: Of calls and names with these, nobody reads the strings as a message: help and statements of SQL, what `status`,
#: `top` and `-V` show, names of system calls.
NO_MESSAGES = {
    *("option", "execute", "once_a_boot", "echo", "_table", "Text", "strftime", "AccountName", "choose_encoder"),
    *("content_type", "USAGE", "_SYSTEM_CALLS", "_SYSTEM_CALLS_OF_GRPC"),
}
#: The version, and how the proxy prints a refusal.
OUTPUT = {f"fusermount3 version: {VALUE}", f"{VALUE}: {VALUE}\n{VALUE}: broker request {VALUE}"}
#: What these say, others than the programmer see only the number of. But where sockets are made, they are told.
OF_THE_KERNEL = {
    *("OSError", "PermissionError", "ProcessLookupError", "FileNotFoundError", "FileExistsError", "TimeoutError"),
    *("LookupError", "ConnectionResetError"),
}
TELLING = {"sockets.py", "rpc.py", "client.py"}


def strings_of(tree: ast.AST, none: set[str]) -> Iterator[ast.expr]:
    """Yield the strings of a module, without docstrings, annotations, usages, and what is in calls of `none`."""
    for name, value in ast.iter_fields(tree):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or name in ("annotation", "returns") or is_no_message(child, none):
                continue
            if isinstance(child, ast.JoinedStr) or (
                isinstance(child, ast.Constant) and isinstance(child.value, str | bytes)
            ):
                yield child
            else:
                yield from strings_of(child, none)


def is_no_message(node: ast.AST, none: set[str]) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)  # a docstring
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return any(
            name_of(target) in none for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        )
    return isinstance(node, ast.Call) and name_of(node.func) in none


def name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def text_of(string: ast.expr) -> str:
    """Return the string as the page writes it, with `VALUE` for each value."""
    if isinstance(string, ast.JoinedStr):
        return "".join(map(text_of, string.values))
    if not isinstance(string, ast.Constant):
        return VALUE
    text = string.value.decode() if isinstance(string.value, bytes) else str(string.value)
    return _PLACE.sub(VALUE, text)


def messages_of(path: Path) -> set[str]:
    none = NO_MESSAGES if path.name in TELLING else NO_MESSAGES | OF_THE_KERNEL
    texts = (text_of(string).strip() for string in strings_of(ast.parse(path.read_text()), none))
    return {re.sub(f"{VALUE}+", VALUE, text) for text in texts if _WORDS.search(text)}


def is_told(message: str, told: str) -> bool:
    """Whether `told`, of the page, is this message, or one that begins or ends with it."""
    return bool(re.search(".+".join(map(re.escape, message.split(VALUE))), told))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_page_has_every_message_of(path: Path) -> None:
    messages = {each for each in messages_of(path) - OUTPUT if each not in METRICS}
    assert {each for each in messages if not any(is_told(each, told) for told in QUOTED)} == set()


def test_the_page_has_every_result_that_is_counted_and_logged() -> None:
    results = {f"{operation} {result}" for operation, results in REQUESTS for result in results}
    assert {each for each in results if not any(told.startswith(each) for told in QUOTED)} == set()


def test_the_page_has_no_message_that_nobody_writes() -> None:
    messages = {message for path in MODULES for message in messages_of(path)}
    results = [f"{operation} {result}" for operation, results in REQUESTS for result in results]
    unknown = [
        told
        for told in TOLD
        if _WORDS.search(told) and not told.startswith(tuple(results)) and not any(is_told(m, told) for m in messages)
    ]
    assert unknown == []


def test_the_page_says_of_every_message_what_it_means_and_what_to_do() -> None:
    rows = re.findall(r"^\| `.+ \|$", PAGE, re.MULTILINE)
    assert len(rows) > 100
    assert [row for row in rows if "" in [cell.strip() for cell in row.strip("|").split(" |")]] == []


def test_a_message_is_found_whatever_it_is_made_of() -> None:
    function = """
def f(path: "some annotation") -> None:
    "A docstring, with words."
    raise Refusal(EIO, b"failed to open %b: %b" % (path, reason))
    log(ERROR, f"the mounter has ended with {status}")
    option(help="Where to listen")
"""
    found = [text_of(string) for string in strings_of(ast.parse(function), NO_MESSAGES)]
    assert found == [f"failed to open {VALUE}: {VALUE}", f"the mounter has ended with {VALUE}"]
