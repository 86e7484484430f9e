"""Truncation of texts by their length as written.

Callers choose texts, and JSON encodes one character in up to twelve bytes. So a bound on the space that texts take on a
disk or a terminal must apply to their written form.
"""

import json
from collections.abc import Callable

#: Returns a text in its written form.
Writing = Callable[[str], bytes]
#: The most bytes that any written form here takes for one character.
MOST_OF_ONE = 12


def in_json(text: str) -> bytes:
    """Return `text` as encoded in JSON, without quotation marks."""
    return json.dumps(text).encode()[1:-1]


def cut(text: str, most: int, written: Writing) -> str:
    """Return a beginning of `text` that takes at most `most` bytes as `written`; all of `text` if it fits.

    Where some characters take more than others, it may be shorter than the bound permits: it is found in a few steps.
    """
    if len(text) * MOST_OF_ONE <= most:
        return text
    text = text[:most]
    while (length := len(written(text))) > most:
        text = text[: len(text) * most // length]
    return text
