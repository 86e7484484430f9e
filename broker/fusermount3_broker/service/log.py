"""The log: one record for each decision, with a sentence for people and the fields for programs.

To the journal if stderr is connected to it; to a terminal as a line with time, level and sentence; else to stderr as a
line of JSON. The fields are the same in the journal and in JSON: `journalctl -u fusermount3-broker REQUEST_ID=…` finds
the answer that a user got. `log_sentences` makes the sentence of the event and its fields. Where it differs from the
event, that is a field of its own, by which programs find the record: its words stay.

Callers choose some of the values. The bounds therefore apply to values as written: a NUL byte takes six bytes in JSON.
A value that is too long loses its end, and the record stays whole.
"""

import json
import os
import time
from collections.abc import Mapping
from typing import Protocol

from systemd import journal

from fusermount3_broker.messages import log_sentences
from fusermount3_broker.messages.untrusted_text import visible
from fusermount3_broker.service.truncation import MOST_OF_ONE, Writing, cut, in_json

#: Priorities of syslog(3).
ERROR, WARNING, NOTICE, INFO = 3, 4, 5, 6
_LEVELS = {ERROR: "error", WARNING: "warning", NOTICE: "notice", INFO: "info"}

#: The most bytes of a value as written in the log: escaped, without the quotation marks of JSON.
LONGEST_FIELD = 4096
#: The most bytes of all values of a record together, as written. Their names, the numbers and JSON's punctuation add to
#: it, and are ours: less than 1 KiB.
LONGEST_VALUES = 7168
#: The most bytes of a whole record.
LONGEST_RECORD = 8192

Value = log_sentences.Value


class Log(Protocol):
    def __call__(self, priority: int, message: str, **fields: Value) -> None:
        """Write one record: an event of `log_sentences`, or a message that is a sentence already.

        Field names are lower case here and upper case in the journal.
        """


def open_log(format: str = "auto") -> Log:
    """Return the log function for that one of `configuration.LOG_FORMATS`."""
    if format == "auto":
        return to_journal if _stderr_is_journal() else to_terminal if os.isatty(2) else to_stderr
    return {"text": to_terminal, "json": to_stderr}[format]


def to_journal(priority: int, message: str, **fields: Value) -> None:
    named = {"SYSLOG_IDENTIFIER": "fusermount3-broker", "PRIORITY": str(priority)}
    texts = _shortened({**_said(message, fields), **fields}, str.encode)
    journal.send(texts.pop("message"), **named, **{name.upper(): text for name, text in texts.items()})


def to_stderr(priority: int, message: str, **fields: Value) -> None:
    numbers = {name: value for name, value in fields.items() if isinstance(value, int | float)}
    said = _said(message, fields)
    texts = _shortened({**said, **{name: fields[name] for name in fields.keys() - numbers}}, in_json)
    named = {name: numbers.get(name, texts.get(name)) for name in (*said, *fields)}
    _write(json.dumps({"time": round(time.time(), 3), "priority": priority} | named))


def to_terminal(priority: int, message: str, **fields: Value) -> None:
    """Write one line, without the fields: 2026-11-23 18:27:13 notice  SENTENCE."""
    _write(f"{time.strftime('%F %T')} {_LEVELS[priority]:7} {_said(message, fields)['message']}")


def _write(line: str) -> None:
    try:
        # one write(2): the broker's processes write to one file, each between the others' lines
        os.write(2, f"{line}\n".encode("utf-8", "backslashreplace"))
    except OSError:
        pass  # the reader is gone; that is no reason to stop serving


def _said(message: str, fields: Mapping[str, Value]) -> dict[str, str]:
    """Return the sentence as "message"; and the event, if that is what `message` is."""
    sentence = log_sentences.sentence(message, fields)
    if sentence is None:
        return {"message": visible(message[:LONGEST_FIELD])}
    return {"message": sentence, "event": message}


def _shortened(values: Mapping[str, Value], written: Writing) -> dict[str, str]:
    """Return the values as text. If they take too much as `written`, the longest lose their ends."""
    texts = {name: cut(_text(value), LONGEST_FIELD, written) for name, value in values.items()}
    if sum(map(len, texts.values())) * MOST_OF_ONE <= LONGEST_VALUES:
        return texts
    left = LONGEST_VALUES
    by_length = sorted(texts, key=lambda name: len(written(texts[name])))
    for number, name in enumerate(by_length):
        texts[name] = cut(texts[name], left // (len(texts) - number), written)
        left -= len(written(texts[name]))
    return texts


def _text(value: Value) -> str:
    """Return a value as text that can be encoded; cut a longer one where it exceeds the bound in any case."""
    most = LONGEST_FIELD + 4  # a character that is cut in two lies beyond the bound
    if isinstance(value, bytes):
        return value[:most].decode("utf-8", "backslashreplace")
    return str(value)[:most].encode("utf-8", "backslashreplace").decode()  # os.fsdecode's text may be no UTF-8


def _stderr_is_journal() -> bool:
    """Test whether stderr is the file that $JOURNAL_STREAM names (systemd.exec(5))."""
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        status = os.fstat(2)
    except OSError:
        return False
    return (device, inode) == (str(status.st_dev), str(status.st_ino))
