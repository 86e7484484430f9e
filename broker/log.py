"""The log: one structured record a decision, to the journal where stderr is one, else to stderr as a line of JSON.

The fields are the same in both: `journalctl -u fusermount3-broker REQUEST_ID=…` finds what a user was told.
"""

import json
import os
import time
from typing import Protocol

from systemd import journal

#: Priorities of syslog(3).
ERROR, WARNING, NOTICE, INFO = 3, 4, 5, 6

#: How much of a value is logged, before what is not printable is escaped: a caller chooses some, and must not fill
#: the disk with them.
LONGEST_FIELD = 4096

Value = str | int | float | bytes


class Log(Protocol):
    def __call__(self, priority: int, message: str, **fields: Value) -> None:
        """Write one record. Field names are lower case here and upper case in the journal."""


def open_log() -> Log:
    """Return the log that stderr leads to."""
    return to_journal if _stderr_is_journal() else to_stderr


def to_journal(priority: int, message: str, **fields: Value) -> None:
    named = {"SYSLOG_IDENTIFIER": "fusermount3-broker", "PRIORITY": str(priority)}
    journal.send(message, **named, **{name.upper(): _text(value) for name, value in fields.items()})


def to_stderr(priority: int, message: str, **fields: Value) -> None:
    record = {"time": round(time.time(), 3), "priority": priority, "message": message}
    record |= {name: value if isinstance(value, int | float) else _text(value) for name, value in fields.items()}
    line = f"{json.dumps(record)}\n".encode()
    try:
        os.write(2, line)  # at once: the broker's processes write to one file, each between the others' lines
    except OSError:
        pass  # nobody reads it any more; that is no reason to stop serving


def _text(value: Value) -> str:
    if isinstance(value, bytes):
        return value[:LONGEST_FIELD].decode("utf-8", "backslashreplace")
    return str(value)[:LONGEST_FIELD].encode("utf-8", "backslashreplace").decode()  # of os.fsdecode may be no UTF-8


def _stderr_is_journal() -> bool:
    """Whether $JOURNAL_STREAM names the file that stderr is (systemd.exec(5))."""
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        status = os.fstat(2)
    except OSError:
        return False
    return (device, inode) == (str(status.st_dev), str(status.st_ino))
