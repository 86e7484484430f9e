"""No user reads the number that Python writes before the text of an error."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from fusermount3_broker.kernel import error_texts

BROKER = Path(__file__).parents[3] / "broker/fusermount3_broker"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOENT, "No such file or directory", "/a"), "/a: No such file or directory"),
        (OSError(errno.ENOENT, "No such file or directory", b"/\xff"), "/\\xff: No such file or directory"),
        (OSError(errno.EACCES, ""), "Permission denied"),
        (TimeoutError("timed out"), "timed out"),
        (ValueError("malformed record"), "malformed record"),
    ],
)
def test_an_error_is_told_without_its_number(error: Exception, expected: str) -> None:
    assert error_texts.of(error) == expected


#: Where an exception is written that can be no OSError, or whose text is put together elsewhere.
_CLAUSE = re.compile(r"except (\(?[^:]*\bOSError\b[^:]*) as (\w+):\n((?: {8,}.*\n|\n)+)")


@pytest.mark.parametrize("file", sorted(BROKER.rglob("*.py")), ids=lambda file: str(file.relative_to(BROKER)))
def test_no_module_writes_an_error_of_the_kernel_as_python_does(file: Path) -> None:
    for _, name, block in _CLAUSE.findall(file.read_text()):
        block = block.partition("\n    except ")[0]
        raw = rf"\{{{name}\}}|str\({name}\)"
        assert not re.search(raw, re.sub(rf"error_texts\.of\({name}\)", "", block)), block
