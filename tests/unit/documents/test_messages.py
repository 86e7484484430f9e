"""docs/messages.md has every message that the broker and the proxy can write or reply with, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fusermount3_broker.front.metrics import REQUESTS

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/messages.md").read_text()
#: The page that lists the metrics with the descriptions from their exposition.
METRICS = (ROOT / "docs/operations.md").read_text()
MODULES = sorted(
    path
    for package in ("broker", "fusermount3_proxy")
    for path in (ROOT / package).rglob("*.py")
    if not path.name.endswith("_pb2.py")
)
#: All text between backticks; in the first column of a table, each such text is a message.
QUOTED = re.findall("`([^`\n]+)`", PAGE)
TOLD = [message for row in re.findall(r"^\| (`.+?) \|", PAGE, re.MULTILINE) for message in re.findall("`([^`]+)`", row)]

#: Placeholder for a value on the page.
VALUE = "…"
_PLACE = re.compile(r"%[-0-9.]*[a-z]")
_WORDS = re.compile(r"[A-Za-z]{2}\S* \S*[a-z]{2}")

#: Calls and variables whose strings are not messages: help and SQL statements, the output of `status`, `top` and `-V`,
#: names of system calls, options of container engines, and what a kernel lacks (docs/compatibility.md lists that).
NO_MESSAGES = {
    *("option", "execute", "Form", "echo", "_say", "_table", "Text", "strftime", "AccountName", "choose_encoder"),
    *("content_type", "USAGE", "_SYSTEM_CALLS", "_SYSTEM_CALLS_OF_GRPC", "Feature", "_OPTIONS", "_UNCONFINED"),
}
#: The version lines, and the form in which the proxy prints a refusal.
OUTPUT = {
    *(f"{name} version: {VALUE}" for name in ("fusermount3", "fusermount3-proxy")),
    f"{VALUE}: {VALUE}\n{VALUE}: broker request {VALUE}",
}
#: Exceptions of which users see only the error number, not the text; except where sockets are made (`TELLING`).
OF_THE_KERNEL = {
    *("OSError", "PermissionError", "ProcessLookupError", "FileNotFoundError", "FileExistsError", "TimeoutError"),
    *("LookupError", "ConnectionResetError"),
}
TELLING = {"listening_sockets.py", "grpc_server.py", "client.py"}


def strings_of(tree: ast.AST, none: set[str]) -> Iterator[ast.expr]:
    """Yield the strings of a module, except docstrings, annotations, usages, and those in calls of `none`."""
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
    """Return the string as the page has it, with `VALUE` for each value."""
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
    """Return whether `told`, from the page, is this message, or begins or ends with it."""
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
