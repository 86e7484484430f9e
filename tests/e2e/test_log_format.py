"""The form of the log: lines for people on a terminal, or as an administrator says."""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import wait_until
from tests.e2e.hostile import Client, mount_request
from tests.lab.broker import PROGRAM, Broker

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.e2e

LINE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (error  |warning|notice |info   ) "


@contextmanager
def logging(
    configuration: str = "", command: tuple[str | Path, ...] = (PROGRAM,), options: tuple[str, ...] = ()
) -> Iterator[Broker]:
    """Run a broker whose log need not be JSON; it ends with the block."""
    broker = Broker(configuration, command, ("serve", *options))
    try:
        broker.directory.chmod(0o755)
        broker.configure(configuration)
        broker.launch()
        try:
            yield broker
        finally:
            broker.stop()
    finally:
        broker.remove()


def lines_of(broker: Broker) -> list[str]:
    """Return the lines of the log once the broker serves and has reloaded its configuration."""
    wait_until(lambda: "serving on" in broker.log.read_text())
    broker.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "configuration loaded again" in broker.log.read_text())
    return broker.log.read_text().splitlines()


def test_the_configuration_asks_for_lines_of_text() -> None:
    with logging('log_format = "text"') as broker:
        lines = lines_of(broker)
        assert [line for line in lines if not re.match(LINE, line)] == []
        assert re.search(rf" info    serving on {broker.socket}, with 0 live mounts\n", broker.log.read_text())
        assert re.search(rf" info    configuration loaded again: {broker.config}\n", broker.log.read_text())


def test_the_option_takes_precedence_over_the_configuration() -> None:
    with logging('log_format = "text"', options=("--log-format", "json")) as broker:
        assert {type(json.loads(line)["message"]) for line in lines_of(broker)} == {str}


def test_a_terminal_gets_lines_of_text_and_a_refusal_says_who_where_and_why() -> None:
    ours, theirs = os.openpty()
    place = Path("/proc/tty")
    try:
        with logging(command=("sh", "-c", f'exec "$0" "$@" 2>{os.ttyname(theirs)}', PROGRAM)) as broker:
            begun = read_until(ours, "serving on")
            with Client(broker) as client:
                client.send(mount_request(place), os.open(place, os.O_PATH))
                _, text = client.refused()
            refused = read_until(ours, "refused").splitlines()[-1]
    finally:
        os.close(ours)
        os.close(theirs)
    assert [line for line in begun.splitlines() if not re.match(LINE, line)] == []
    said = rf"refused to mount on {place} for uid 0( in [^:]+)?: {re.escape(text)} \(request [0-9a-f]{{8}}\)"
    assert re.fullmatch(f"{LINE}{said}", refused)


def read_until(terminal: int, words: str) -> str:
    """Return what is written to the terminal, up to the end of the line with these words."""
    read = ""
    while words not in read or not read.endswith("\n"):
        read += os.read(terminal, 4096).decode()
    return read
