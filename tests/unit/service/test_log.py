"""The log: to the journal if stderr is the journal, otherwise one line of JSON for each record."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fusermount3_broker.service import log
from fusermount3_broker.service.configuration import LOG_FORMATS


def stream_of_stderr() -> str:
    status = os.fstat(2)
    return f"{status.st_dev}:{status.st_ino}"


def test_a_record_is_a_line_of_json(capfd: pytest.CaptureFixture[str]) -> None:
    log.to_stderr(
        log.NOTICE, "mount refused", request_id="1a2b", errno=13, text=b"no", milliseconds=1.5, mountpoint=b"/m\n\xff"
    )
    line = capfd.readouterr().err
    assert line.endswith("}\n")
    assert line.count("\n") == 1
    record = json.loads(line)
    assert abs(record.pop("time") - time.time()) < 60
    assert record == {
        "priority": 5,
        "message": r"refused to mount on '/m\n\\xff' for an unknown caller: no (request 1a2b)",
        "event": "mount refused",
        "request_id": "1a2b",
        "errno": 13,
        "text": "no",
        "milliseconds": 1.5,
        "mountpoint": "/m\n\\xff",
    }


@contextmanager
def stderr_is(descriptor: int) -> Iterator[None]:
    before = os.dup(2)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def test_a_record_is_written_at_once_as_other_processes_write_to_the_same_file() -> None:
    reading, writing = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with reading, writing:
        with stderr_is(writing.fileno()):
            log.to_stderr(log.NOTICE, "mounted")
        written = reading.recv(100_000, socket.MSG_DONTWAIT)
    assert written.endswith(b"}\n")
    assert json.loads(written)["message"] == "mounted"


def test_a_stderr_that_nobody_reads_does_not_matter() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with stderr_is(writing):
        log.to_stderr(log.INFO, "lost")
    os.close(writing)


#: Values, and their logged forms in JSON and in the journal.
LONG = [
    (b"x" * 4096, "x" * 4096, "x" * 4096),
    (b"x" * 4097, "x" * 4096, "x" * 4096),
    ("x" * 100_000, "x" * 4096, "x" * 4096),
    (b"\xff" * 5000, "\\xff" * 819, "\\xff" * 1024),
    (os.fsdecode(b"\xff" * 5000), "\\udcff" * 585, "\\udcff" * 682 + "\\udc"),
    (b"\0" * 5000, "\0" * 682, "\0" * 4096),
    ("\N{GRINNING FACE}" * 5000, "\N{GRINNING FACE}" * 341, "\N{GRINNING FACE}" * 1024),
    (b"x" * 4095 + "é".encode(), "x" * 4091, "x" * 4095),
]


@pytest.mark.parametrize(("value", "in_json", "in_journal"), LONG, ids=range(len(LONG)))
def test_a_value_that_a_caller_made_long_is_cut(
    capfd: pytest.CaptureFixture[str],
    fake_journal: list[dict[str, Any]],
    value: log.Value,
    in_json: str,
    in_journal: str,
) -> None:
    log.to_stderr(log.NOTICE, "mount refused", options=value, request_id="1a2b")
    log.to_journal(log.NOTICE, "mount refused", options=value, request_id="1a2b")
    record = json.loads(capfd.readouterr().err)
    assert (record["options"], record["request_id"]) == (in_json, "1a2b")
    assert (fake_journal[0]["OPTIONS"], fake_journal[0]["REQUEST_ID"]) == (in_journal, "1a2b")


@pytest.mark.parametrize("value", [b"x", b"\0", b"\xff", "\N{GRINNING FACE}".encode(), b"\\", b'"', b"\x7f"], ids=repr)
def test_a_record_of_which_a_caller_made_all_values_long_is_bounded_as_it_is_written(
    capfd: pytest.CaptureFixture[str], fake_journal: list[dict[str, Any]], value: bytes
) -> None:
    """Numbers and short values are logged whole; the long values share the remaining space."""
    fields = {"request_id": "1a2b", "errno": 22, "mountpoint": value * 65536, "options": value * 65536}
    fields |= {"text": value * 65536, "source": value * 65536, "caller_command": "sshfs", "caller_uid": 2**32 - 1}
    log.to_stderr(log.NOTICE, "mount refused", **fields)  # type: ignore[arg-type]
    log.to_journal(log.NOTICE, "mount refused", **fields)  # type: ignore[arg-type]
    line = capfd.readouterr().err
    assert log.LONGEST_RECORD / 2 < len(line.encode()) <= log.LONGEST_RECORD
    record = json.loads(line)
    (sent,) = fake_journal
    assert sum(len(f"{name}={text}\n".encode()) for name, text in sent.items()) > log.LONGEST_RECORD / 2
    assert sum(len(f"{name}={text}\n".encode()) for name, text in sent.items()) <= log.LONGEST_RECORD
    whole = {"event": "mount refused", "request_id": "1a2b", "errno": 22, "caller_uid": 2**32 - 1}
    assert record.items() >= whole.items()
    assert all(sent[name.upper()] == str(text) for name, text in whole.items())
    assert record["message"].startswith("refused to mount on ")
    assert sent["MESSAGE"].endswith(" (request 1a2b)")
    for name in ("mountpoint", "options", "text", "source"):
        assert 1400 < len(json.dumps(record[name])) <= log.LONGEST_FIELD
        assert len(sent[name.upper()].encode()) > 1400


def test_a_message_that_quotes_something_long_is_cut(
    capfd: pytest.CaptureFixture[str], fake_journal: list[dict[str, Any]]
) -> None:
    log.to_stderr(log.ERROR, "internal error: " + "\0" * 100_000)
    log.to_journal(log.ERROR, "internal error: " + "\0" * 100_000)
    assert len(capfd.readouterr().err) <= log.LONGEST_FIELD + 100
    assert len(fake_journal[0]["MESSAGE"].encode()) <= log.LONGEST_FIELD


@pytest.fixture
def fake_journal(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The records that would have gone to the journal."""
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "fusermount3_broker.service.log.journal.send",
        lambda message, **fields: sent.append({"MESSAGE": message} | fields),
    )
    return sent


def test_a_record_of_the_journal_has_the_same_fields_in_upper_case(fake_journal: list[dict[str, Any]]) -> None:
    log.to_journal(log.INFO, "mounted", request_id="1a2b", device=12, mountpoint=b"/m\xff")
    (record,) = fake_journal
    expected = {"MESSAGE": "mounted", "PRIORITY": "6", "REQUEST_ID": "1a2b", "DEVICE": "12", "MOUNTPOINT": "/m\\xff"}
    assert record.items() >= expected.items()


def test_the_message_of_the_journal_is_a_sentence_and_the_event_is_beside_it(
    fake_journal: list[dict[str, Any]],
) -> None:
    log.to_journal(log.NOTICE, "mount refused", request_id="1a2b", caller_uid=1000, mountpoint=b"/m", text=b"no")
    (record,) = fake_journal
    assert record["MESSAGE"] == "refused to mount on /m for uid 1000: no (request 1a2b)"
    assert record["EVENT"] == "mount refused"


def test_what_reaches_the_journal_is_utf_8(fake_journal: list[dict[str, Any]]) -> None:
    log.to_journal(log.INFO, "mounted", type=os.fsdecode(b"fuse.\xff"))
    for value in fake_journal[0].values():
        value.encode()


def test_the_journal_is_used_where_stderr_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOURNAL_STREAM", stream_of_stderr())
    assert log.open_log() is log.to_journal


@pytest.mark.parametrize("stream", ["", "1:2", "garbage", ":", "0:0:0"])
def test_a_stderr_that_was_redirected_is_written_to(monkeypatch: pytest.MonkeyPatch, stream: str) -> None:
    monkeypatch.setenv("JOURNAL_STREAM", stream)
    assert log.open_log() is log.to_stderr


def test_without_the_variable_stderr_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    assert log.open_log() is log.to_stderr


def test_a_terminal_gets_a_line_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    ours, theirs = os.openpty()
    try:
        with stderr_is(theirs):
            write = log.open_log()
            write(log.NOTICE, "mount refused", caller_uid=1000, mountpoint=b"/m\x1b[2J\n", text=b"no")
            write(log.WARNING, "a sentence\nof two lines")
            written = ""
            while written.count("\n") < 2:  # a terminal hands on what was written to it in parts, later
                written += os.read(ours, 4096).decode()
    finally:
        os.close(ours)
    now = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    first, second, rest = written.split("\r\n")
    assert re.fullmatch(now + re.escape(r" notice  refused to mount on '/m\x1b[2J\n' for uid 1000: no"), first)
    assert re.fullmatch(now + re.escape(r" warning a sentence\nof two lines"), second)
    assert rest == ""


def test_the_format_of_the_configuration_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOURNAL_STREAM", stream_of_stderr())
    assert [log.open_log(each) for each in LOG_FORMATS] == [log.to_journal, log.to_terminal, log.to_stderr]


def test_every_priority_has_a_name(capfd: pytest.CaptureFixture[str]) -> None:
    for priority in (log.ERROR, log.WARNING, log.NOTICE, log.INFO):
        log.to_terminal(priority, "said")
    assert [line.split()[2] for line in capfd.readouterr().err.splitlines()] == ["error", "warning", "notice", "info"]


def test_a_closed_stderr_is_no_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOURNAL_STREAM", stream_of_stderr())

    def closed(_: int) -> os.stat_result:
        raise OSError("Bad file descriptor")

    with monkeypatch.context() as patch:
        patch.setattr("fusermount3_broker.service.log.os.fstat", closed)
        chosen = log.open_log()
    assert chosen is log.to_stderr
