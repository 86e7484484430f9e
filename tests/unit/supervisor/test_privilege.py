"""Who starts the broker without its rights is told which ones are missing."""

from __future__ import annotations

import os

import pytest

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.supervisor import privilege

ALL = privilege.OF_THE_MOUNTER | {"CHOWN": syscalls.CAP_CHOWN, "KILL": syscalls.CAP_KILL}


def problem(monkeypatch: pytest.MonkeyPatch, uid: int, *lacking: str) -> str:
    """Return what a process of that user is told that has all capabilities but these, in the first user namespace."""
    permitted = sum(1 << number for name, number in ALL.items() if name not in lacking)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr(syscalls, "capget", lambda: permitted)
    monkeypatch.setattr(privilege, "_in_first_user_namespace", lambda: True)
    return privilege.problem(front_has_account=True)


@pytest.mark.parametrize("uid", [0, 998])
def test_who_lacks_nothing_is_told_nothing(monkeypatch: pytest.MonkeyPatch, uid: int) -> None:
    assert problem(monkeypatch, uid) == ""


@pytest.mark.parametrize("uid", [0, 998])
def test_who_lacks_some_is_told_these_and_no_others(monkeypatch: pytest.MonkeyPatch, uid: int) -> None:
    """A user has the others by AmbientCapabilities= of a unit; sudo would not help there."""
    assert problem(monkeypatch, uid, "SYS_PTRACE", "SETUID") == (
        "the broker lacks CAP_SETUID, CAP_SYS_PTRACE; a service of systemd needs CAP_SETUID CAP_SYS_PTRACE in "
        "CapabilityBoundingSet= and, with User=, in AmbientCapabilities=; a container, --cap-add=SETUID "
        "--cap-add=SYS_PTRACE"
    )


def test_a_user_without_any_is_told_to_type_sudo(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problem(monkeypatch, 998, *ALL).startswith("only root can run the broker: type sudo")


def test_root_of_a_container_without_options_is_told_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    told = problem(monkeypatch, 0, "SYS_ADMIN", "SYS_PTRACE")
    assert told.startswith("the broker lacks CAP_SYS_PTRACE, CAP_SYS_ADMIN; a container of the broker is started with")
    assert "--pid=host" in told
