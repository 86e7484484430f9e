"""Text from callers, as people may read it: in the log, on a terminal, in an event of a pod."""

import re

#: What can pass neither for several words nor for a part of the sentence around it.
_WORD = re.compile(r"[A-Za-z0-9@%+=:,./_-]+")


def visible(text: str) -> str:
    """Return `text` with unprintable characters and line breaks escaped: it can't move a terminal's cursor, and can't
    pass for a line of its own."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def shortened(text: str, most: int) -> str:
    """Return `text`, visible and in at most `most` characters; a longer one loses its end, and then ends in "…"."""
    seen = visible(text[: most + 1])
    return seen if len(seen) <= most else f"{seen[: most - 1]}…"


def quoted(text: str, most: int) -> str:
    """Return `text` as `shortened`, in quotation marks unless it is plainly one word: `_WORD`."""
    text = text[: most + 1]
    if _WORD.fullmatch(text):
        return shortened(text, most)
    inside = shortened(text.replace("\\", "\\\\").replace("'", "\\'"), most)
    return f"'{inside}'"
