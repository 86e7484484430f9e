"""The package on a kernel that is too old: the service says so in one sentence, and does not start.

For the machine of `tests.machines` only whose kernel is older than Linux 5.14.
"""

from __future__ import annotations

import os
import socket

import pytest

from fusermount3_broker.kernel import features
from tests.lab.commands import run
from tests.machines.installed import SERVICE

SENTENCE = f"Error: {features.running()} is too old: it lacks SO_NETNS_COOKIE; the broker needs Linux 5.14 or newer"
SOCKET = "fusermount3-broker.socket"


def state(unit: str) -> str:
    return run(["systemctl", "is-active", unit], check=False).stdout.strip()


def log() -> list[str]:
    return run(["journalctl", "--identifier=fusermount3-broker", "--output=cat"]).stdout.splitlines()


def test_the_machine_has_such_a_kernel() -> None:
    assert tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14)


def test_the_service_says_so_and_is_not_tried_again() -> None:
    assert run(["systemctl", "start", SERVICE], check=False).returncode == 1
    assert state(SERVICE) == "failed"
    assert log() == [SENTENCE]


def test_callers_find_no_socket_in_which_to_wait() -> None:
    run(["systemctl", "start", SOCKET])
    assert state(SOCKET) == "inactive"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller, pytest.raises(FileNotFoundError):
        caller.connect("/run/fusermount3-proxy/broker.sock")
